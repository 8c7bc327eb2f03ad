// Backward passes of norms over rows of whole packs that fill their threads exactly, for GPUs with bulk
// copies: a block of 256 threads for each processor, whose next rows are brought into a ring in its shared
// memory while it works on those before. Shorter rows share the block; rows of 512 threads have two blocks,
// in a cluster, that tell each other their sums.
//
// RMSNorm of 64 Mi elements, bf16, on an H200: 101 us for rows of 4096, 102 of 8192, 106 of 16384 (99, 101 and
// 104 by kernels written out for one shape each); straight from memory, 512 threads for each processor,
// 108 to 110. What counts is how much a processor works on at once: 32 KB, as here, are fast; 48 KB (three
// rows of 128 threads) and 64 (512 threads) took 107 to 113, 16 took 113. Rings of two stages to five took
// the same.
#pragma once

#include <algorithm>
#include <bit>

#include "accel/cuda/bulk_copy.h"
#include "norm_rows.h"

namespace accel::cuda {
namespace {

constexpr int kRingThreads = 256;
constexpr int kRingStages = 3;
constexpr int kRingPacks = 4;  // of a row, in each thread

// Where the 2^kLog2Threads threads of a row are: in a share of a block, or in several blocks.
template <int kLog2Threads>
struct RingTeams : FixedTeams<kLog2Threads < 8 ? kLog2Threads : 8> {
  static constexpr int kRowThreads = 1 << kLog2Threads;
  static constexpr int kRowWarps = kRowThreads / kWarp;
  static constexpr int kBlocks = kRowThreads > kRingThreads ? kRowThreads / kRingThreads : 1;
  static constexpr int kTeams = kRowThreads < kRingThreads ? kRingThreads / kRowThreads : 1;

  // Which of the row's blocks this is; each has its columns side by side.
  static ACCEL_DEVICE int block_of_row() { return static_cast<int>(blockIdx.x) % kBlocks; }
  static ACCEL_DEVICE int program() { return static_cast<int>(blockIdx.x) / kBlocks; }
  static ACCEL_DEVICE int num_programs() { return static_cast<int>(gridDim.x) / kBlocks; }
};

// The sums of the warps of a block, or of all blocks of a row, and when those are there.
template <int kCount>
struct RingSums {
  float of_warp[2][kCount][kWarp];
  Arrivals arrivals[2];
};

template <int kTeams>
struct RingArrivals {
  Arrivals of_stage[kTeams][kRingStages];
};

// kTensors tensors of T of the same shape. Each thread makes one and goes through its rows:
//
//     RowRing<...> ring(num_rows, x, dy);
//     for (; ring.has_row(); ring.next()) {
//       ring.wait();
//       ... ring.pack(tensor, k)
//       ring.sum(sums);  // all packs have been read
//       ...
//     }
//     ring.end();
template <typename T, int kTensors, int kSums, int kLog2Threads>
class RowRing {
 public:
  using Teams = RingTeams<kLog2Threads>;
  static constexpr int kStep = Teams::kRowThreads / Teams::kBlocks * kPack<T>;  // between a thread's packs
  static constexpr int kColsOfBlock = kRingPacks * kStep, kCols = Teams::kBlocks * kColsOfBlock;
  static constexpr size_t kBytes = kRingStages * kTensors * kRingThreads * kRingPacks * kPackBytes;

  // As many of the tensors as kTensors.
  ACCEL_DEVICE RowRing(int64_t num_rows, const void* first, const void* second, const void* third = nullptr)
      : num_rows_(static_cast<int>(num_rows)), row_(Teams::program() * Teams::kTeams + teams_.team()) {
    const void* const tensors[] = {first, second, third};
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      tensors_[i] = static_cast<const T*>(tensors[i]) + Teams::block_of_row() * kColsOfBlock;
    }
    ring_ = reinterpret_cast<T*>(launched_shared()) + teams_.team() * (kRingStages * kTensors * kColsOfBlock);
    if (teams_.lane() == 0) {
      for (Arrivals& of_stage : arrivals()) of_stage.begin();
      if constexpr (Teams::kBlocks > 1) {
        for (Arrivals& of_turn : sums().arrivals) of_turn.begin();
      }
    }
    Teams::kBlocks > 1 ? cluster_barrier() : __syncthreads();
    for (int stage = 0; stage < kRingStages; ++stage) fetch(row_ + stage * step(), stage);
  }

  ACCEL_DEVICE bool has_row() const { return row_ < num_rows_; }
  ACCEL_DEVICE int row() const { return row_; }
  ACCEL_DEVICE int first_col() const {
    return Teams::block_of_row() * kColsOfBlock + teams_.lane() * kPack<T>;
  }
  ACCEL_DEVICE int64_t start() const { return int64_t{row_} * kCols + first_col(); }

  ACCEL_DEVICE void wait() { arrivals()[stage_].wait(phase_); }

  ACCEL_DEVICE Pack<T> pack(int tensor, int k) const {
    const T* of_tensor = ring_ + (stage_ * kTensors + tensor) * kColsOfBlock;
    return load<true>(of_tensor + teams_.lane() * kPack<T> + k * kStep, kPack<T>);
  }

  // Makes sums over the row of what each thread has, the same bits in all of them. What the ring had of the
  // row is given to a later one.
  ACCEL_DEVICE void sum(float (&values)[kSums]) {
    RingSums<kSums>& shared = sums();
    auto& of_warp = shared.of_warp[turn_ % 2];
    Arrivals& arrivals_of_sums = shared.arrivals[turn_ % 2];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (float& v : values) {
      for (int offset = kWarp / 2; offset; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
    }
    if constexpr (Teams::kBlocks == 1) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) of_warp[i][warp] = values[i];
      }
      teams_.wait();
    } else {
      if (threadIdx.x == 0) arrivals_of_sums.expect(kSums * Teams::kRowWarps * sizeof(float));
      const int warp_of_row = Teams::block_of_row() * (Teams::kRowWarps / Teams::kBlocks) + warp;
      if (lane < Teams::kBlocks) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) arrivals_of_sums.send(values[i], &of_warp[i][warp_of_row], lane);
      }
      arrivals_of_sums.wait(turn_ / 2 % 2);
    }
    const int first_warp = Teams::kBlocks == 1 ? teams_.first_warp() : 0;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float v = of_warp[i][first_warp + lane % Teams::kRowWarps];
      for (int offset = Teams::kRowWarps / 2; offset; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
      values[i] = v;
    }
    ++turn_;
    fetch(row_ + kRingStages * step(), stage_);
    if (++stage_ == kRingStages) stage_ = 0, phase_ ^= 1;
  }

  ACCEL_DEVICE void next() { row_ += step(); }

  // Writes what the threads have summed over their rows, one for each of their columns.
  ACCEL_DEVICE void store(const float (&of_packs)[kRingPacks][kPack<T>], float* partial_PN) const {
    float* partial = partial_PN + int64_t{Teams::program()} * kCols;
    if constexpr (Teams::kBlocks == 1) {
      store_partial_of_teams<FixedTeams<kLog2Threads>, T>(teams_, kCols, of_packs, partial);
    } else {
#pragma unroll
      for (int k = 0; k < kRingPacks; ++k) store_sums(partial + first_col() + k * kStep, of_packs[k]);
    }
  }

  // A block stays for as long as another may send to it.
  ACCEL_DEVICE void end() const {
    if constexpr (Teams::kBlocks > 1) cluster_barrier();
  }

 private:
  static ACCEL_DEVICE RingSums<kSums>& sums() { return block_shared<RingSums<kSums>>(); }
  ACCEL_DEVICE auto& arrivals() const {
    return block_shared<RingArrivals<Teams::kTeams>>().of_stage[teams_.team()];
  }
  static ACCEL_DEVICE int step() { return Teams::num_programs() * Teams::kTeams; }

  ACCEL_DEVICE void fetch(int row, int stage) const {
    if (teams_.lane() != 0 || row >= num_rows_) return;
    Arrivals& of_stage = arrivals()[stage];
    of_stage.expect(kTensors * kColsOfBlock * sizeof(T));
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      T* to = ring_ + (stage * kTensors + tensor) * kColsOfBlock;
      of_stage.copy(to, tensors_[tensor] + int64_t{row} * kCols, kColsOfBlock * sizeof(T));
    }
  }

  Teams teams_;
  const T* tensors_[kTensors];
  T* ring_;
  int num_rows_, row_, turn_ = 0, stage_ = 0, phase_ = 0;
};

// The threads of a row in a ring, if it can be in one: of tensors that begin with whole packs.
struct RingRows {
  int threads;

  RingRows(int64_t num_cols, Dtype dtype)
      : threads(static_cast<int>(num_cols * size_of(dtype) / (kRingPacks * kPackBytes))) {}

  bool is_ring(int64_t num_cols, Dtype dtype) const {
    const bool known = threads == 64 || threads == 128 || threads == 256 || threads == 512;
    const int64_t row_bytes = int64_t{threads} * kRingPacks * kPackBytes;
    return known && num_cols * size_of(dtype) == row_bytes && has_bulk_copies();
  }

  // P: one for each block, or for those that share rows.
  int64_t num_programs(int64_t num_rows, int num_processors) const {
    const int rows_of_block = std::max(1, kRingThreads / threads);
    const int blocks_of_row = std::max(1, threads / kRingThreads);
    return std::min<int64_t>(ceil_div(num_rows, rows_of_block), std::max(1, num_processors / blocks_of_row));
  }
};

// Whether the backward of these rows goes by a ring.
bool goes_by_ring(int64_t num_cols, Dtype dtype, float weight_offset) {
  return weight_offset == 0.0f && RingRows(num_cols, dtype).is_ring(num_cols, dtype);
}

// launch.operator()<kLog2Threads>() for a row of so many columns.
template <typename F>
void with_log2_threads(int64_t num_cols, Dtype dtype, F&& launch) {
  switch (std::countr_zero(static_cast<unsigned>(RingRows(num_cols, dtype).threads))) {
    case 6: return launch.template operator()<6>();
    case 7: return launch.template operator()<7>();
    case 8: return launch.template operator()<8>();
    default: return launch.template operator()<9>();
  }
}

// `kernel` goes through its rows by a Ring.
template <typename Ring, typename Args>
void launch_ring(void (*kernel)(Args), int64_t num_programs, Queue queue, const Args& args) {
  static_assert(Ring::kBytes + (32 << 10) <= kMostSharedBytes, "with what is summed over rows, too much");
  const Blocks blocks{kRingThreads, Ring::kBytes, Ring::Teams::kBlocks};
  launch_clusters(kernel, static_cast<unsigned>(num_programs), blocks, queue, args);
}

}  // namespace
}  // namespace accel::cuda
