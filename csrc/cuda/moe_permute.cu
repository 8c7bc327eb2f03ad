#include "moe_permute.h"

#include <algorithm>
#include <type_traits>

#include "accel/cuda/device.h"

// A team of threads has one token and goes through its rows, so that what lies with the tokens is read or
// written once. The padding is moved as rows of a token more, which several teams share.

namespace accel::cuda {
namespace {

constexpr int kNone = 0x7fffffff;  // beyond every row
constexpr int kPaddingTeams = 64;

// What reading less saves is worth more than four small launches from so many bytes on for each processor:
// 64 MB of 128 processors take 20 us of an H100's 3.3 TB/s.
constexpr int64_t kReadOnceBytes = 512 << 10;

constexpr int kCopyThreads = 256;
constexpr int kCopyUnits = 4;  // of a thread, under way
// 8 packs of a thread are under way in a sum, of four rows two each, and 16 sums of fp32 wait for them.
constexpr int kSumThreads = 256;
constexpr int kSumPacks = 2;
constexpr int kSumRows = 4;
// Of dtokens a thread keeps 4 packs for all rows: 32 KB of a block, or the rows are long.
constexpr int kWeighThreads = 512;
constexpr int kWeighPacks = 4;

ACCEL_DEVICE float load_as_float(const AnyFloats& floats, int64_t i) {
  switch (floats.dtype) {
    case Dtype::bfloat16: return to_float(static_cast<const __nv_bfloat16*>(floats.data)[i]);
    case Dtype::float16: return to_float(static_cast<const __half*>(floats.data)[i]);
    default: return static_cast<const float*>(floats.data)[i];
  }
}

ACCEL_DEVICE void store_float(const AnyFloats& floats, int64_t i, float v) {
  switch (floats.dtype) {
    case Dtype::bfloat16: static_cast<__nv_bfloat16*>(floats.data)[i] = from_float<__nv_bfloat16>(v); break;
    case Dtype::float16: static_cast<__half*>(floats.data)[i] = from_float<__half>(v); break;
    default: static_cast<float*>(floats.data)[i] = v;
  }
}

// Where a [T, E] has what belongs to a place of a row map; -1 for padding and experts that it does not have.
// T E is less than 2^32.
ACCEL_DEVICE int64_t index_of_place(int64_t place, int token, int num_tokens, int num_experts) {
  if (place < 0 || place >= static_cast<int64_t>(num_tokens) * num_experts) return -1;
  const unsigned expert = static_cast<unsigned>(place) / static_cast<unsigned>(num_tokens);
  return static_cast<int64_t>(token) * num_experts + expert;
}

// The rows of one token, or a team's share of the padding: every step-th of `rows` from `first` on.
struct RowsOfTeam {
  int64_t token;  // T for padding; beyond T there are no rows
  int first = 0, step = 1, count = 0;
  const int* rows = nullptr;

  ACCEL_DEVICE RowsOfTeam(const MoeRows& map, int64_t team) : token(team) {
    if (team >= map.num_tokens + kPaddingTeams) return;
    if (team >= map.num_tokens) {
      token = map.num_tokens;
      first = static_cast<int>(team - token);
      step = kPaddingTeams;
    }
    count = map.counts[token];
    rows = map.rows + map.ends[token] - count;
  }

  // The first row behind row `after`, kNone if there is none. Whole warps ask.
  ACCEL_DEVICE int next(int after) const {
    int least = kNone;
    for (int i = threadIdx.x % kWarp; i < count; i += kWarp) {
      const int row = rows[i];
      if (row > after && row < least) least = row;
    }
    return __reduce_min_sync(kAllLanes, least);
  }
};

ACCEL_DEVICE int64_t team_of_grid(RowTeams teams) {
  return static_cast<int64_t>(blockIdx.x) * teams.teams_per_block() + teams.team();
}

// For teams of a warp or a block.
ACCEL_DEVICE void barrier_of(RowTeams teams) { teams.threads() > kWarp ? __syncthreads() : __syncwarp(); }

// -- copies --------------------------------------------------------------------------------------

struct CopyCall {
  MoeCopy op;
  RowTeams teams;
  int64_t num_units;  // of a row
};

template <typename Unit>
ACCEL_DEVICE void load_units(const Unit* row, int64_t first, int64_t count, int step,
                             Unit (&units)[kCopyUnits]) {
#pragma unroll
  for (int k = 0; k < kCopyUnits; ++k) {
    if (first + k * step >= count) continue;
    check_aligned(row + first + k * step, sizeof(Unit));
    units[k] = row[first + k * step];
  }
}

template <typename Unit>
ACCEL_DEVICE void store_units(Unit* row, int64_t first, int64_t count, int step,
                              const Unit (&units)[kCopyUnits]) {
#pragma unroll
  for (int k = 0; k < kCopyUnits; ++k) {
    if (first + k * step >= count) continue;
    check_aligned(row + first + k * step, sizeof(Unit));
    row[first + k * step] = units[k];
  }
}

template <typename Bits>
ACCEL_DEVICE void copy_bits(const MoeCopy& op, int64_t from, int64_t to) {
  static_cast<Bits*>(op.row_probs)[to] = from < 0 ? Bits{} : static_cast<const Bits*>(op.probs)[from];
}

ACCEL_DEVICE void copy_prob(const MoeCopy& op, int64_t row, int64_t place, int token) {
  const int64_t from = index_of_place(place, token, op.map.num_tokens, op.num_experts);
  switch (op.prob_bytes) {
    case 2: return copy_bits<uint16_t>(op, from, row);
    case 4: return copy_bits<uint32_t>(op, from, row);
    default: return copy_bits<uint64_t>(op, from, row);
  }
}

template <typename Unit>
__global__ void __launch_bounds__(kCopyThreads) moe_copy_row_by_row_kernel(const CopyCall call) {
  const MoeCopy& op = call.op;
  const int64_t row = team_of_grid(call.teams);
  if (row >= op.map.num_rows) return;
  const int lane = call.teams.lane(), threads = call.teams.threads();
  const int64_t place = op.map.row_map[row];
  const int token = place < 0 ? 0 : static_cast<int>(place % op.map.num_tokens);
  const Unit* from = static_cast<const Unit*>(op.tokens) + token * call.num_units;
  Unit* to = static_cast<Unit*>(op.rows) + row * call.num_units;
  for (int64_t at = lane; at < call.num_units; at += kCopyUnits * threads) {
    Unit units[kCopyUnits] = {};
    if (place >= 0) load_units(from, at, call.num_units, threads, units);
    store_units(to, at, call.num_units, threads, units);
  }
  if (lane == 0 && op.probs) copy_prob(op, row, place, token);
}

template <typename Unit>
__global__ void __launch_bounds__(kCopyThreads) moe_copy_token_by_token_kernel(const CopyCall call) {
  const MoeCopy& op = call.op;
  const RowsOfTeam team(op.map, team_of_grid(call.teams));
  const int lane = call.teams.lane(), threads = call.teams.threads();
  const Unit* from = static_cast<const Unit*>(op.tokens) + team.token * call.num_units;
  for (int64_t at = lane; at < call.num_units; at += kCopyUnits * threads) {
    Unit units[kCopyUnits] = {};
    if (team.token < op.map.num_tokens) load_units(from, at, call.num_units, threads, units);
    for (int i = team.first; i < team.count; i += team.step) {
      store_units(static_cast<Unit*>(op.rows) + team.rows[i] * call.num_units, at, call.num_units, threads,
                  units);
    }
  }
  if (!op.probs) return;
  for (int i = team.first + lane * team.step; i < team.count; i += threads * team.step) {
    const int row = team.rows[i];
    copy_prob(op, row, op.map.row_map[row], static_cast<int>(team.token));
  }
}

// -- sums ----------------------------------------------------------------------------------------

template <typename Op>
ACCEL_DEVICE float weight_of_row(const Op& op, int64_t token, int row) {
  if (!op.weights.data) return 1.0f;
  if (op.num_experts == 0) return load_as_float(op.weights, row);
  const int64_t at = index_of_place(op.map.row_map[row], static_cast<int>(token), op.map.num_tokens,
                                    op.num_experts);
  return at < 0 ? 0.0f : load_as_float(op.weights, at);
}

// dprobs of one token. Each row sums those of its expert in their order: itself, but in a map made by hand.
template <typename Op>
ACCEL_DEVICE void sum_dweights(const Op& op, const RowsOfTeam& team, RowTeams teams) {
  const int64_t dprobs_E = team.token * op.num_experts;
  for (int expert = teams.lane(); expert < op.num_experts; expert += teams.threads()) {
    store_float(op.dprobs, dprobs_E + expert, 0.0f);
  }
  barrier_of(teams);  // zeros and, of a weighing, dweights are in place
  for (int i = teams.lane(); i < team.count; i += teams.threads()) {
    const int64_t place = op.map.row_map[team.rows[i]];
    const int64_t at = index_of_place(place, static_cast<int>(team.token), op.map.num_tokens, op.num_experts);
    if (at < 0) continue;
    float sum = 0.0f;
    for (int last = -1;;) {
      int next = kNone;
      for (int j = 0; j < team.count; ++j) {
        const int row = team.rows[j];
        if (row > last && row < next && op.map.row_map[row] == place) next = row;
      }
      if (next == kNone) {
        store_float(op.dprobs, at, sum);
        break;
      }
      sum += load_as_float(op.dweights, next);
      last = next;
    }
  }
}

struct SumCall {
  MoeSum op;
  RowTeams teams;
};

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kSumThreads, 2) moe_sum_kernel(const SumCall call) {
  const MoeSum& op = call.op;
  const RowTeams teams = call.teams;
  const int64_t token = team_of_grid(teams);
  if (token >= op.map.num_tokens) return;
  const RowsOfTeam team(op.map, token);
  const int64_t first_col = static_cast<int64_t>(blockIdx.y) * kSumPacks * teams.threads() * kPack<T>;
  const auto col = [&](int k) { return first_col + (k * teams.threads() + teams.lane()) * kPack<T>; };
  float sums[kSumPacks][kPack<T>] = {};
  for (int done = 0, last = -1; done < team.count; done += kSumRows) {
    int rows[kSumRows];
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) rows[r] = last = team.next(last);
    Pack<T> packs[kSumRows][kSumPacks];
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) {
      const T* x = static_cast<const T*>(op.rows) + rows[r] * op.num_cols;
#pragma unroll
      for (int k = 0; k < kSumPacks; ++k) {
        packs[r][k] = load<kWhole>(x + col(k), rows[r] == kNone ? 0 : op.num_cols - col(k));
      }
    }
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) {
      if (rows[r] == kNone) continue;
      const float weight = weight_of_row(op, token, rows[r]);
#pragma unroll
      for (int k = 0; k < kSumPacks; ++k) {
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sums[k][i] = fmaf(packs[r][k][i], weight, sums[k][i]);
      }
    }
  }
  T* out = static_cast<T*>(op.tokens) + token * op.num_cols;
#pragma unroll
  for (int k = 0; k < kSumPacks; ++k) store<kWhole>(out + col(k), pack_of<T>(sums[k]), op.num_cols - col(k));
  if (op.dprobs.data && blockIdx.y == 0) sum_dweights(op, team, teams);
}

// -- weighing ------------------------------------------------------------------------------------

struct WeighCall {
  MoeWeigh op;
  RowTeams teams;
};

// Of up to 32 rows, what each warp of the block has summed.
struct Dots {
  float of_warp[2][kWeighThreads / kWarp][kWarp];
};

// Each lane's dot, of a row of its own, over the warps of a team; in the first of them.
ACCEL_DEVICE float sum_over_warps(float dot, RowTeams teams, int turn) {
  if (teams.threads() <= kWarp) return dot;
  auto& of_warp = block_shared<Dots>().of_warp[turn % 2];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  of_warp[warp][lane] = dot;
  __syncthreads();
  if (warp == 0) {
    for (int other = 1; other < teams.threads() / kWarp; ++other) dot += of_warp[other][lane];
  }
  return dot;
}

template <typename T, bool kWhole, bool kLong>
__global__ void __launch_bounds__(kWeighThreads, 1) moe_weigh_kernel(const WeighCall call) {
  const MoeWeigh& op = call.op;
  const RowTeams teams = call.teams;
  const RowsOfTeam team(op.map, team_of_grid(teams));
  const bool is_padding = team.token == op.map.num_tokens;
  const int lane_of_warp = threadIdx.x % kWarp;
  const int64_t stretch = int64_t{kWeighPacks} * teams.threads() * kPack<T>;
  const auto col = [&](int k) { return int64_t{k * teams.threads() + teams.lane()} * kPack<T>; };
  const T* dtoken = static_cast<const T*>(op.dtokens) + team.token * op.num_cols;
  // Of padding nothing is read, and zeros are written.
  const int64_t readable = is_padding || team.count == 0 ? 0 : op.num_cols;
  Pack<T> dout[kWeighPacks];
  if constexpr (!kLong) {
#pragma unroll
    for (int k = 0; k < kWeighPacks; ++k) dout[k] = load<kWhole>(dtoken + col(k), readable - col(k));
  }
  int turn = 0;
  for (int first = team.first; first < team.count; first += kWarp * team.step) {
    float dots = 0.0f;  // of the row of this lane
    for (int r = 0; r < kWarp && first + r * team.step < team.count; ++r) {
      const int row = team.rows[first + r * team.step];
      const T* y = static_cast<const T*>(op.rows) + row * op.num_cols;
      T* dy = static_cast<T*>(op.drows) + row * op.num_cols;
      const float weight = is_padding ? 0.0f : weight_of_row(op, team.token, row);
      float dot = 0.0f;
      for (int64_t start = 0; start < (kLong ? op.num_cols : 1); start += stretch) {
        Pack<T> packs[kWeighPacks];
#pragma unroll
        for (int k = 0; k < kWeighPacks; ++k) {
          const int64_t at = start + col(k);
          if constexpr (kLong) dout[k] = load<kWhole>(dtoken + at, readable - at);
          packs[k] = load<kWhole>(y + at, readable - at);
        }
#pragma unroll
        for (int k = 0; k < kWeighPacks; ++k) {
          float weighted[kPack<T>];
          dout[k].stay_packed();
#pragma unroll
          for (int i = 0; i < kPack<T>; ++i) {
            weighted[i] = dout[k][i] * weight;
            dot = fmaf(dout[k][i], packs[k][i], dot);
          }
          const int64_t at = start + col(k);
          store<kWhole>(dy + at, pack_of<T>(weighted), op.num_cols - at);
        }
      }
      for (int offset = kWarp / 2; offset; offset /= 2) dot += __shfl_xor_sync(kAllLanes, dot, offset);
      if (r == lane_of_warp) dots = dot;
    }
    dots = sum_over_warps(dots, teams, turn++);
    const int mine = first + lane_of_warp * team.step;
    if (teams.lane() < kWarp && mine < team.count) store_float(op.dweights, team.rows[mine], dots);
  }
  if (!op.dprobs.data || team.token >= op.map.num_tokens) return;
  sum_dweights(op, team, teams);
}

// Teams of a warp or more, each thread with up to so many packs of a row.
RowTeams teams_for(int64_t num_cols, Dtype dtype, int packs_per_thread, int max_threads) {
  return {std::max(RowBlock(num_cols, dtype, packs_per_thread, max_threads).log2_threads, 5)};
}

unsigned threads_of_block(RowTeams teams) { return teams.log2_threads > 5 ? 1u << teams.log2_threads : 128; }

unsigned blocks_for(int64_t num_teams, RowTeams teams) {
  return static_cast<unsigned>(ceil_div(num_teams, threads_of_block(teams) >> teams.log2_threads));
}

template <typename Kernels>
void launch_copy(const MoeCopy& op, int64_t num_teams, Queue queue, Kernels kernel_for) {
  const Dtype dtype = op.element_bytes == 4 ? Dtype::float32 : Dtype::bfloat16;  // or what is as large
  const bool whole = whole_packs(op.num_cols, dtype, op.tokens, op.rows);
  const int unit_bytes = whole ? kPackBytes : op.element_bytes;
  const int64_t num_units = op.num_cols * op.element_bytes / unit_bytes;
  const int64_t threads = next_power_of_2(ceil_div(num_units, kCopyUnits));
  RowTeams teams{0};
  while ((1 << teams.log2_threads) < std::min<int64_t>(threads, kCopyThreads)) ++teams.log2_threads;
  auto* kernel = whole ? kernel_for.template operator()<uint4>()
      : op.element_bytes == 4 ? kernel_for.template operator()<uint32_t>()
                              : kernel_for.template operator()<uint16_t>();
  launch(kernel, blocks_for(num_teams, teams), threads_of_block(teams), queue,
         CopyCall{op, teams, num_units});
}

}  // namespace

bool moe_listing_pays(int64_t num_rows, int64_t num_tokens, int64_t row_bytes, int num_processors) {
  return (num_rows - num_tokens) * row_bytes >= kReadOnceBytes * num_processors;
}

void moe_copy_row_by_row(const MoeCopy& op, Queue queue) {
  launch_copy(op, op.map.num_rows, queue, [&]<typename Unit> { return &moe_copy_row_by_row_kernel<Unit>; });
}

void moe_copy_token_by_token(const MoeCopy& op, Queue queue) {
  launch_copy(op, int64_t{op.map.num_tokens} + kPaddingTeams, queue,
              [&]<typename Unit> { return &moe_copy_token_by_token_kernel<Unit>; });
}

void moe_sum(const MoeSum& op, Queue queue) {
  const RowTeams teams = teams_for(op.num_cols, op.dtype, kSumPacks, kSumThreads);
  const bool whole = whole_packs(op.num_cols, op.dtype, op.rows, op.tokens);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    return whole ? &moe_sum_kernel<T, true> : &moe_sum_kernel<T, false>;
  });
  const int64_t stretch = (int64_t{kSumPacks * kPackBytes} << teams.log2_threads) / size_of(op.dtype);
  const int64_t stretches = std::max<int64_t>(1, ceil_div(op.num_cols, stretch));
  const dim3 grid(blocks_for(op.map.num_tokens, teams), static_cast<unsigned>(stretches));
  launch(kernel, grid, threads_of_block(teams), queue, SumCall{op, teams});
}

void moe_weigh(const MoeWeigh& op, Queue queue) {
  const RowTeams teams = teams_for(op.num_cols, op.dtype, kWeighPacks, kWeighThreads);
  const bool whole = whole_packs(op.num_cols, op.dtype, op.dtokens, op.rows, op.drows);
  const int64_t kept_bytes = int64_t{kWeighPacks * kPackBytes} << teams.log2_threads;
  const bool is_long = op.num_cols * size_of(op.dtype) > kept_bytes;
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    if (whole) return is_long ? &moe_weigh_kernel<T, true, true> : &moe_weigh_kernel<T, true, false>;
    return is_long ? &moe_weigh_kernel<T, false, true> : &moe_weigh_kernel<T, false, false>;
  });
  const unsigned blocks = blocks_for(int64_t{op.map.num_tokens} + kPaddingTeams, teams);
  launch(kernel, blocks, threads_of_block(teams), queue, WeighCall{op, teams});
}

}  // namespace accel::cuda
