#include "cross_entropy.h"

#include <algorithm>

#include "accel/cuda/device.h"

// Forward, a block reads one row, or one part of it where rows are few: every thread has a maximum and a
// sum of its own, and nothing crosses threads until the end. Backward, a block has a stretch of a row. Each
// moves every logit once, in packs wherever a row begins: what is left at its ends goes one by one.

namespace accel::cuda {
namespace {

// 64 bytes of each thread are on their way, 64 KB of a processor that holds 4 blocks of 256.
constexpr int kPacks = 4;
constexpr int kMaxThreads = 256;
constexpr int kBlocksPerProcessor = 4;
// Rows are split until there are so many blocks: two rounds of what a processor holds, so that the last
// round, when processors idle, is no more than half of the time.
constexpr int kPartsPerProcessor = 8;
constexpr int kMaxParts = 64;

constexpr float kLog2E = 1.4426950408889634f;
// e^v is 2^(v log2(e)): one multiply-add and one instruction for the power. So the maximum is subtracted
// after the multiplication, once it is rounded; `rounding` makes up for that.
// Far from 0 (masks are often -1e10 or finfo.min) what rounding adds is more than an exponent holds, or the
// product overflows. Values there are equal or so far apart that any exponential is 0: 2^v does for e^v.
constexpr float kFar = 1073741824.0f;

ACCEL_DEVICE float slope_of(float highest) { return fabsf(highest) >= kFar ? 1.0f : kLog2E; }

// The exponent of a maximum; 0 for -inf, from which no difference may be taken.
ACCEL_DEVICE float or_0(float exponent) { return exponent == -INFINITY ? 0.0f : exponent; }

// What a sum is multiplied with; 0 where the slopes, and so the maxima, are far apart.
ACCEL_DEVICE float from(float slope, float exponent, float to_slope, float to_exponent) {
  return slope == to_slope ? fast_exp2(exponent - to_exponent) : 0.0f;
}

// 2^(what rounding added to highest slope): so much below e^(x - highest) is 2^ of the rounded.
ACCEL_DEVICE float rounding(float highest) {
  const float slope = slope_of(highest);
  return fast_exp2(fmaf(or_0(highest), -slope, or_0(highest * slope)));
}

// A row as packs that begin at multiples of 16 bytes, and what is left at either end, less than a pack.
template <typename T>
struct RowPacks {
  int head, num_packs, tail;

  ACCEL_DEVICE RowPacks(const T* row, int num_cols) {
    const int beyond = static_cast<int>(reinterpret_cast<uintptr_t>(row) % kPackBytes / sizeof(T));
    head = std::min((kPack<T> - beyond) % kPack<T>, num_cols);
    num_packs = (num_cols - head) / kPack<T>;
    tail = num_cols - head - num_packs * kPack<T>;
  }
  ACCEL_DEVICE int col(int pack) const { return head + pack * kPack<T>; }
};

struct Shifted {
  float highest = -INFINITY;  // of x
  float exponent = -INFINITY;
  float sum_exp = 0.0f;       // of 2^(x slope - exponent)
  float sum = 0.0f;           // of x

  template <bool kSum, int kCount>
  ACCEL_DEVICE void take(const float (&x)[kCount]) {
    const float before = slope_of(highest);
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest = fmaxf(highest, x[i]);
    const float slope = slope_of(highest), higher = highest * slope, shift = or_0(higher);
    float more = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) more += fast_exp2(fmaf(x[i], slope, -shift));
    sum_exp = fmaf(sum_exp, from(before, exponent, slope, shift), more);
    exponent = higher;
    if constexpr (kSum) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum += x[i];
    }
  }
};

template <int kCount, bool kSum, typename T>
ACCEL_DEVICE void take_packs(const T* x, int step, Shifted& stats) {
  Pack<T> packs[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) packs[k] = load<true>(x + k * step, kPack<T>);
  float v[kCount * kPack<T>];
#pragma unroll
  for (int i = 0; i < kCount * kPack<T>; ++i) v[i] = packs[i / kPack<T>][i % kPack<T>];
  stats.take<kSum>(v);
}

template <bool kSum, typename T>
ACCEL_DEVICE void take_one(T x, Shifted& stats) {
  const float v[1] = {to_float(x)};
  stats.take<kSum>(v);
}

struct RowStats {
  float highest, sum_exp, sum;
};

// Part `part` of a row, in every thread of the block.
template <typename T, bool kSum>
ACCEL_DEVICE RowStats stats_of_part(const T* x, int num_cols, int part, int num_parts, RowTeams teams) {
  const RowPacks<T> row(x, num_cols);
  const int lane = teams.lane(), threads = teams.threads();
  const int packs_per_part = (row.num_packs + num_parts - 1) / num_parts;
  const int last = std::min((part + 1) * packs_per_part, row.num_packs);
  Shifted stats;
  int pack = part * packs_per_part + lane;
  for (; pack + (kPacks - 1) * threads < last; pack += kPacks * threads) {
    take_packs<kPacks, kSum>(x + row.col(pack), threads * kPack<T>, stats);
  }
  for (; pack < last; pack += threads) take_packs<1, kSum>(x + row.col(pack), 0, stats);
  if (part == 0 && lane < row.head) take_one<kSum>(x[lane], stats);
  if (part == num_parts - 1 && lane < row.tail) take_one<kSum>(x[row.col(row.num_packs) + lane], stats);
  const float highest = row_max(stats.highest, teams, 0);
  const float slope = slope_of(highest);
  const float mine = stats.sum_exp * from(slope_of(stats.highest), stats.exponent, slope, or_0(highest * slope));
  const float sum_exp = row_sum(mine, teams, 1) * rounding(highest);
  return {highest, sum_exp, kSum ? row_sum(stats.sum, teams, 2) : 0.0f};
}

struct ForwardCall {
  CrossEntropyForward op;
  RowTeams teams;
  int num_parts;
};

template <typename T>
ACCEL_DEVICE void store_stats(const CrossEntropyForward& op, int64_t row, const RowStats& stats) {
  const int64_t target = op.target[row], token = target - op.vocab_start;
  const bool is_ignored = op.has_ignore_index && target == op.ignore_index;
  const bool target_is_in_the_vocabulary = 0 <= target && target < op.vocab_size;
  ACCEL_DEVICE_ASSERT(target_is_in_the_vocabulary || is_ignored || op.vocab_size == 0);
  float at_target = 0.0f;
  if (0 <= token && token < op.num_cols) {
    at_target = to_float(static_cast<const T*>(op.x)[row * op.num_cols + token]) - stats.highest;
  }
  op.stats[row] = stats.highest;
  op.stats[op.num_rows + row] = stats.sum_exp;
  op.stats[2 * op.num_rows + row] = at_target;
  if (op.with_sum) {
    op.stats[3 * op.num_rows + row] = stats.sum - stats.highest * static_cast<float>(op.num_cols);
  }
}

template <typename T, bool kSum>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor)
    cross_entropy_stats(const ForwardCall call) {
  const CrossEntropyForward& op = call.op;
  const int64_t row = blockIdx.x;
  const int part = static_cast<int>(blockIdx.y);
  const T* x = static_cast<const T*>(op.x) + row * op.num_cols;
  const RowStats stats = stats_of_part<T, kSum>(x, op.num_cols, part, call.num_parts, call.teams);
  if (threadIdx.x) return;
  if (!op.parts) return store_stats<T>(op, row, stats);
  float* parts = op.parts + row * (kSum ? 3 : 2) * call.num_parts + part;
  parts[0] = stats.highest;
  parts[call.num_parts] = stats.sum_exp;
  if constexpr (kSum) parts[2 * call.num_parts] = stats.sum;
}

// The stats of whole rows from those of their parts, a warp to each row.
template <typename T, bool kSum>
__global__ void __launch_bounds__(kMaxThreads) cross_entropy_merge(const ForwardCall call) {
  const CrossEntropyForward& op = call.op;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * call.teams.teams_per_block() + call.teams.team();
  const float* parts = op.parts + row * (kSum ? 3 : 2) * call.num_parts;
  const int lane = call.teams.lane(), num_parts = row < op.num_rows ? call.num_parts : 0;
  float highest = -INFINITY, sum_exp = 0.0f, sum = 0.0f;
  for (int part = lane; part < num_parts; part += kWarp) highest = fmaxf(highest, parts[part]);
  highest = row_max(highest, call.teams, 0);
  for (int part = lane; part < num_parts; part += kWarp) {
    sum_exp += parts[call.num_parts + part] * expf(parts[part] - or_0(highest));
    if constexpr (kSum) sum += parts[2 * call.num_parts + part];
  }
  sum_exp = row_sum(sum_exp, call.teams, 1);
  if constexpr (kSum) sum = row_sum(sum, call.teams, 2);
  if (lane == 0 && num_parts) store_stats<T>(op, row, {highest, sum_exp, sum});
}

struct BackwardCall {
  CrossEntropyBackward op;
  int blocks_per_row;
};

// dloss (softmax - on_target [column is the target] - on_each_token) of one row.
struct Gradient {
  float dloss, slope, exponent, scale, on_target, on_each_token;
  int64_t token;

  ACCEL_DEVICE Gradient(const CrossEntropyBackward& op, int64_t row, float dloss) : dloss(dloss) {
    const float highest = op.stats[row];
    slope = slope_of(highest);
    exponent = highest * slope;
    scale = dloss / op.stats[op.num_rows + row] * rounding(highest);
    on_target = dloss * op.on_target;
    on_each_token = dloss * op.on_each_token;
    token = op.target[row] - op.vocab_start;
  }
  ACCEL_DEVICE float operator()(float x, int col) const {
    const float dx = fast_exp2(fmaf(x, slope, -exponent)) * scale - on_each_token;
    return col == token ? dx - on_target : dx;
  }
};

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor)
    cross_entropy_backward_kernel(const BackwardCall call) {
  const CrossEntropyBackward& op = call.op;
  const int64_t row = blockIdx.x / call.blocks_per_row;
  const int block = static_cast<int>(blockIdx.x % call.blocks_per_row), threads = blockDim.x;
  const T* x = static_cast<const T*>(op.x) + row * op.num_cols;
  T* dx = static_cast<T*>(op.dx) + row * op.num_cols;
  const RowPacks<T> packs(x, op.num_cols);
  const int first = block * kPacks * threads + threadIdx.x;
  const int lane = threadIdx.x, tail = packs.col(packs.num_packs) + lane;
  const float dloss = op.dloss[row];
  if (dloss == 0.0f) {  // a masked token
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int pack = first + k * threads;
      if (pack < packs.num_packs) store<kWhole>(dx + packs.col(pack), Pack<T>{}, kPack<T>);
    }
    if (block == 0 && lane < packs.head) dx[lane] = from_float<T>(0.0f);
    if (block == 0 && lane < packs.tail) dx[tail] = from_float<T>(0.0f);
    return;
  }
  Pack<T> v[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int pack = first + k * threads;
    if (pack < packs.num_packs) v[k] = load<true>(x + packs.col(pack), kPack<T>);
  }
  const Gradient gradient(op, row, dloss);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int pack = first + k * threads, col = packs.col(pack);
    if (pack >= packs.num_packs) continue;
    float d[kPack<T>];
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) d[i] = gradient(v[k][i], col + i);
    store<kWhole>(dx + col, pack_of<T>(d), kPack<T>);
  }
  if (block == 0 && lane < packs.head) dx[lane] = from_float<T>(gradient(to_float(x[lane]), lane));
  if (block == 0 && lane < packs.tail) dx[tail] = from_float<T>(gradient(to_float(x[tail]), tail));
}

// Threads for a row of so many, each with kPacks or fewer; a warp at least, which the ends need.
int log2_threads(int num_cols, Dtype dtype) {
  return std::max(RowBlock(num_cols, dtype, kPacks, kMaxThreads).log2_threads, 5);
}

// Stretches of a row of which each thread of a block has kPacks packs; one at least.
int stretches(int num_cols, Dtype dtype) {
  const int64_t packs = ceil_div(int64_t{num_cols} * size_of(dtype), kPackBytes);
  return static_cast<int>(std::max<int64_t>(1, ceil_div(packs, kPacks << log2_threads(num_cols, dtype))));
}

}  // namespace

int cross_entropy_parts(int64_t num_rows, int num_cols, Dtype dtype, int num_processors) {
  const int64_t wanted = ceil_div(int64_t{kPartsPerProcessor} * num_processors, num_rows);
  return static_cast<int>(std::min<int64_t>({wanted, stretches(num_cols, dtype), kMaxParts}));
}

void cross_entropy_forward(const CrossEntropyForward& op, int num_parts, Queue queue) {
  const auto kernels = for_dtype(op.dtype, [&]<typename T> {
    return op.with_sum ? std::pair(&cross_entropy_stats<T, true>, &cross_entropy_merge<T, true>)
                       : std::pair(&cross_entropy_stats<T, false>, &cross_entropy_merge<T, false>);
  });
  const RowTeams teams{log2_threads(op.num_cols, op.dtype)};
  const dim3 grid(static_cast<unsigned>(op.num_rows), static_cast<unsigned>(num_parts));
  launch(kernels.first, grid, 1u << teams.log2_threads, queue, ForwardCall{op, teams, num_parts});
  if (num_parts == 1) return;
  const auto blocks = static_cast<unsigned>(ceil_div(op.num_rows, kMaxThreads / kWarp));
  launch(kernels.second, blocks, kMaxThreads, queue, ForwardCall{op, RowTeams{5}, num_parts});
}

void cross_entropy_backward(const CrossEntropyBackward& op, Queue queue) {
  const auto apart = reinterpret_cast<uintptr_t>(op.x) - reinterpret_cast<uintptr_t>(op.dx);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    return apart % kPackBytes == 0 ? &cross_entropy_backward_kernel<T, true>
                                   : &cross_entropy_backward_kernel<T, false>;
  });
  const BackwardCall call{op, stretches(op.num_cols, op.dtype)};
  const auto blocks = static_cast<unsigned>(op.num_rows * call.blocks_per_row);
  launch(kernel, blocks, 1u << log2_threads(op.num_cols, op.dtype), queue, call);
}

}  // namespace accel::cuda
