// Backward of rows of whole packs that fill their threads exactly, for GPUs with bulk copies: a block of 256
// threads for each processor, whose next rows are brought into a ring in its shared memory while it works on
// those before. Shorter rows share the block, rows of 512 threads have two of them, in a cluster, that tell
// each other their sums.
//
// Of 64 Mi elements on an H200, bf16: 99 us for rows of 4096, 101 of 8192, 104 of 16384; straight from memory,
// 512 threads for each processor, 108 to 110. With 512 threads and a ring: 107 to 113. A ring of two stages to
// five took the same.
#pragma once

#include "accel/cuda/bulk_copy.h"
#include "rms_norm_parts.h"

namespace accel::cuda {
namespace {

constexpr int kRingThreads = 256;
constexpr int kRingStages = 3;

// Where the 2^kLog2Threads threads of a row are.
template <int kLog2Threads>
struct RingTeams : FixedTeams<kLog2Threads < 8 ? kLog2Threads : 8> {
  static constexpr int kRowThreads = 1 << kLog2Threads;
  static constexpr int kBlocks = kRowThreads > kRingThreads ? kRowThreads / kRingThreads : 1;
  static constexpr int kTeams = kRowThreads < kRingThreads ? kRingThreads / kRowThreads : 1;
  static constexpr int kThreads = kRowThreads / kBlocks;  // of a row in a block

  // Which of the row's blocks this is.
  ACCEL_DEVICE int block_of_row() const { return kBlocks == 1 ? 0 : static_cast<int>(blockIdx.x) % kBlocks; }
  ACCEL_DEVICE int lane_of_row() const { return block_of_row() * kThreads + this->lane(); }
};

// The sums of a row's warps in all of its blocks, and when they are there.
template <int kWarps>
struct SumsOfBlocks {
  float of_warp[2][kWarps];
  Arrivals arrivals[2];
};

template <int kTeams>
struct RingArrivals {
  Arrivals of_stage[kTeams][kRingStages];
};

// row_sum() of a row that several blocks have, in the same order as if one had it.
template <typename Teams>
ACCEL_DEVICE float sum_of_blocks(float v, const Teams& teams, int turn) {
  constexpr int kWarps = Teams::kRowThreads / kWarp, kWarpsOfBlock = kWarps / Teams::kBlocks;
  auto& sums = block_shared<SumsOfBlocks<kWarps>>();
  float* of_warp = sums.of_warp[turn % 2];
  Arrivals& arrivals = sums.arrivals[turn % 2];
  if (threadIdx.x == 0) arrivals.expect(kWarps * sizeof(float));
  for (int offset = kWarp / 2; offset; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane < Teams::kBlocks) arrivals.send(v, of_warp + teams.block_of_row() * kWarpsOfBlock + warp, lane);
  arrivals.wait(turn / 2 % 2);
  v = of_warp[lane % kWarps];
  for (int offset = kWarps / 2; offset; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
}

// The weight is of type W and has no offset.
template <typename T, typename W, bool kAdd, int kLog2Threads>
__global__ void __launch_bounds__(kRingThreads, 1) rms_norm_backward_ring(const BackwardCall call) {
  const RmsNormBackward& op = call.op;
  constexpr RingTeams<kLog2Threads> teams;
  constexpr int kBlocks = teams.kBlocks, kTensors = kAdd ? 3 : 2;
  constexpr int kStep = teams.kRowThreads * kPack<T>, kCols = kPacks * kStep;
  constexpr int kStepOfBlock = kStep / kBlocks, kColsOfBlock = kCols / kBlocks;
  constexpr int kCopies = kBlocks == 1 ? 1 : kPacks, kCopied = kColsOfBlock / kCopies;  // of a tensor, at once
  const int first_col = teams.lane_of_row() * kPack<T>, lane = teams.lane();
  const int num_rows = static_cast<int>(call.rows.num_rows);
  const int program = blockIdx.x / kBlocks, step = gridDim.x / kBlocks * teams.kTeams;
  auto& arrivals = block_shared<RingArrivals<teams.kTeams>>().of_stage[teams.team()];
  T* ring = reinterpret_cast<T*>(launched_shared()) + teams.team() * (kRingStages * kTensors * kColsOfBlock);

  if (lane == 0) {
    for (auto& of_stage : arrivals) of_stage.begin();
    if constexpr (kBlocks > 1) {
      for (auto& of_turn : block_shared<SumsOfBlocks<teams.kRowThreads / kWarp>>().arrivals) of_turn.begin();
    }
  }
  kBlocks > 1 ? cluster_barrier() : __syncthreads();

  const auto fetch = [&](int row, int stage) {
    if (lane != 0 || row >= num_rows) return;
    arrivals[stage].expect(kTensors * kColsOfBlock * sizeof(T));
    const T* tensors[] = {static_cast<const T*>(op.x), static_cast<const T*>(op.dy),
                          static_cast<const T*>(op.dtotal)};
    const int64_t start = int64_t{row} * kCols + first_col;
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      T* to = ring + (stage * kTensors + tensor) * kColsOfBlock;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        arrivals[stage].copy(to + i * kCopied, tensors[tensor] + start + i * kStep, kCopied * sizeof(T));
      }
    }
  };
  int row = program * teams.kTeams + teams.team();
  for (int stage = 0; stage < kRingStages; ++stage) fetch(row + stage * step, stage);

  float dweight[kPacks][kPack<T>] = {};
  WeightPack<T, W> weight[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) weight[k].load(static_cast<const W*>(op.weight) + first_col + k * kStep);
  int turn = 0, stage = 0, phase = 0;
  for (; row < num_rows; row += step) {
    const float rstd = op.rstd[row];
    arrivals[stage].wait(phase);
    const T* here = ring + stage * kTensors * kColsOfBlock + lane * kPack<T>;
    Pack<T> x[kPacks], dy[kPacks], dtotal[kAdd ? kPacks : 1];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const T* at = here + k * kStepOfBlock;
      x[k] = load<true>(at, kPack<T>);
      dy[k] = load<true>(at + kColsOfBlock, kPack<T>);
      if constexpr (kAdd) dtotal[k] = load<true>(at + 2 * kColsOfBlock, kPack<T>);
    }
    Sums dots;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      weight[k].stay_packed();
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) dots.add(i, dy[k][i] * weight[k][i], x[k][i]);
    }
    const float dot = kBlocks == 1 ? row_sum(dots.total(), teams, turn) : sum_of_blocks(dots.total(), teams, turn);
    ++turn;
    fetch(row + kRingStages * step, stage);  // all of the row's threads have read what was there
    if (++stage == kRingStages) stage = 0, phase ^= 1;
    const RowGradient gradient(dot, kCols, rstd);
    const int64_t start = int64_t{row} * kCols + first_col;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      x[k].stay_packed(), dy[k].stay_packed(), weight[k].stay_packed();
      float dx[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        dx[i] = dx_of<T, kAdd>(gradient, x[k].again(i), dy[k].again(i), weight[k].again(i),
                               kAdd ? dtotal[k][i] : 0.0f, dweight[k][i]);
      }
      store<true>(static_cast<T*>(op.dx) + start + k * kStep, pack_of<T>(dx), kPack<T>);
    }
  }
  float* partial = op.dweight_PN + int64_t{program} * kCols;
  if constexpr (kBlocks == 1) {
    store_partial_of_teams<FixedTeams<kLog2Threads>, T>(teams, kCols, dweight, partial);
  } else {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) store_sums(partial + first_col + k * kStep, dweight[k]);
    cluster_barrier();  // the other block may still send
  }
}

template <typename T, typename W, bool kAdd, int kLog2Threads>
void launch_ring_of(const BackwardCall& call, int64_t num_programs, Queue queue) {
  using Teams = RingTeams<kLog2Threads>;
  constexpr size_t kBytes = kRingStages * (kAdd ? 3 : 2) * kRingThreads * kPacks * kPackBytes;
  static_assert(kBytes + 32 * 1024 <= 227 * 1024, "with what dweight is summed in, more than a block may have");
  launch_clusters(&rms_norm_backward_ring<T, W, kAdd, kLog2Threads>, static_cast<unsigned>(num_programs),
                  Blocks{kRingThreads, kBytes, Teams::kBlocks}, queue, call);
}

template <bool kAdd>
void launch_ring(const BackwardCall& call, int64_t num_programs, Queue queue) {
  for_dtype(call.op.dtype, [&]<typename T> {
    const auto with_weight = [&]<typename W>() {
      switch (call.rows.teams.log2_threads) {
        case 6: return launch_ring_of<T, W, kAdd, 6>(call, num_programs, queue);
        case 7: return launch_ring_of<T, W, kAdd, 7>(call, num_programs, queue);
        case 8: return launch_ring_of<T, W, kAdd, 8>(call, num_programs, queue);
        default: return launch_ring_of<T, W, kAdd, 9>(call, num_programs, queue);
      }
    };
    call.op.weight_is_float ? with_weight.template operator()<float>() : with_weight.template operator()<T>();
  });
}

}  // namespace
}  // namespace accel::cuda
