// What the norms have in common: which threads have a row, the parameters' share of a pack, and the sums of
// their gradients over the rows of a block. N columns, P programs, each with a share of the rows.
#pragma once

#include <algorithm>

#include "accel/cuda/device.h"

namespace accel::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxThreadsBackward = 512;
// Rows that a program has at least, where there are enough for all processors: its sum of dweight, written
// and read once as fp32, is then below a tenth of what it moves.
constexpr int kMinRows = 8;

struct NormRows {
  int64_t num_rows, num_cols;
  RowTeams teams;

  // The columns at which this thread's packs begin.
  template <typename T>
  ACCEL_DEVICE int64_t first() const {
    return int64_t{teams.lane()} * kPack<T>;
  }
  template <typename T>
  ACCEL_DEVICE int64_t step() const {
    return int64_t{teams.threads()} * kPack<T>;
  }
  template <typename T>
  ACCEL_DEVICE int64_t col(int k) const {
    return first<T>() + k * step<T>();
  }
};

template <typename T, bool kWhole>
ACCEL_DEVICE void load_scale(const void* weight, bool weight_is_float, float offset, int64_t col,
                             int64_t count, float (&scale)[kPack<T>]) {
  load_columns<kWhole, T>(weight, weight_is_float, col, count, scale);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) scale[i] += offset;
}

// A pack's share of the weight, kept in registers.
template <typename T, typename W>
struct WeightPack {
  Pack<W> packs[kPack<T> / kPack<W>];

  ACCEL_DEVICE void load(const W* p) {
#pragma unroll
    for (int i = 0; i < kPack<T> / kPack<W>; ++i) {
      packs[i] = cuda::load<true>(p + i * kPack<W>, kPack<W>);
    }
  }
  ACCEL_DEVICE float operator[](int i) const { return packs[i / kPack<W>][i % kPack<W>]; }
  ACCEL_DEVICE float again(int i) const { return packs[i / kPack<W>].again(i % kPack<W>); }
  ACCEL_DEVICE void stay_packed() {
#pragma unroll
    for (int i = 0; i < kPack<T> / kPack<W>; ++i) packs[i].stay_packed();
  }
};

// What the warps of a block with several rows to a warp have summed.
template <typename T, int kCount>
struct WarpSums {
  float of_warp[4][kWarp * kCount * kPack<T>];
};

// What the threads of a block of whole teams have.
template <typename T>
struct alignas(kPackBytes) ThreadSums {
  float of_thread[kMaxThreadsBackward * kPack<T>];
};

// The sums of a pack, 16 bytes at a time: element by element they would meet in few banks.
template <int kCount>
ACCEL_DEVICE void store_sums(float* to, const float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += kPack<float>) {
    const float four[kPack<float>] = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    store<true>(to + i, pack_of<float>(four), kPack<float>);
  }
}

// Each thread's sums, one for each of its columns, over the teams of a block of 512 threads or less: a pack
// at a time.
template <typename Teams, typename T, int kCount>
ACCEL_DEVICE void store_partial_of_teams(const Teams& teams, int64_t num_cols,
                                         const float (&sums)[kCount][kPack<T>], float* partial_N) {
  auto& of_thread = block_shared<ThreadSums<T>>().of_thread;
  const int step = teams.threads() * kPack<T>;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    __syncthreads();  // what was stored before this is read
    store_sums(of_thread + threadIdx.x * kPack<T>, sums[k]);
    __syncthreads();
    for (int col = threadIdx.x; col < step && k * step + col < num_cols; col += blockDim.x) {
      float sum = 0.0f;
      for (int team = 0; team < teams.teams_per_block(); ++team) sum += of_thread[team * step + col];
      partial_N[k * step + col] = sum;
    }
  }
}

// Likewise of any rows, in a block of one team or in one of 128 threads.
template <typename T, int kCount>
ACCEL_DEVICE void store_partial(const NormRows& rows, const float (&sums)[kCount][kPack<T>],
                                float* partial_N) {
  const RowTeams teams = rows.teams;
  if (teams.teams_per_block() == 1) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int64_t col = rows.template col<T>(k);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if (col + i < rows.num_cols) partial_N[col + i] = sums[k][i];
      }
    }
    return;
  }
  auto& of_warp = block_shared<WarpSums<T, kCount>>().of_warp;
  const int warp = threadIdx.x / kWarp;
  __syncthreads();  // what was stored before this is read
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int64_t col = rows.template col<T>(k);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      float sum = sums[k][i];
      for (int offset = teams.threads(); offset < kWarp; offset *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, offset);
      }
      if (threadIdx.x % kWarp < teams.threads()) of_warp[warp][col + i] = sum;
    }
  }
  __syncthreads();
  for (int64_t col = threadIdx.x; col < rows.num_cols; col += blockDim.x) {
    partial_N[col] = (of_warp[0][col] + of_warp[1][col]) + (of_warp[2][col] + of_warp[3][col]);
  }
}

// Whether threads hold a row, each so many packs of it.
bool fits(const RowBlock& block, int packs_per_thread, int64_t num_cols, Dtype dtype) {
  return (int64_t{packs_per_thread} << block.log2_threads) * kPackBytes >= num_cols * size_of(dtype);
}

// P of the backward of rows in such blocks: as many as processors hold at once, 512 threads each.
int64_t norm_programs(const RowBlock& block, int64_t num_rows, int num_processors) {
  const int64_t most = std::clamp<int64_t>(512 / block.threads_per_block, 1, 4) * num_processors;
  const int64_t groups = ceil_div(num_rows, block.rows_per_block);
  return std::min(groups, std::clamp<int64_t>(ceil_div(groups, kMinRows), num_processors, most));
}

}  // namespace
}  // namespace accel::cuda
