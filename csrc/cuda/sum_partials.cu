#include "sum_partials.h"

#include "accel/cuda/device.h"

namespace accel::cuda {
namespace {

constexpr int kCols = kWarp;  // of a block: 128 bytes of each partial
constexpr int kSlices = 16;   // threads that share a column: partials are few, columns may be few too

struct SliceSums {
  float of_slice[kSlices][kCols];
};

template <typename T>
__global__ void __launch_bounds__(kCols * kSlices) sum_partials_kernel(const Partials args) {
  const int col_of_block = threadIdx.x % kCols, slice = threadIdx.x / kCols;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kCols + col_of_block;
  float sums[4] = {};  // four loads under way
  if (col < args.num_cols) {
    const float* partial = (blockIdx.y ? args.more_partials_PN : args.partials_PN) + col;
    int64_t p = slice;
    for (; p + 3 * kSlices < args.num_partials; p += 4 * kSlices) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += partial[(p + i * kSlices) * args.num_cols];
    }
    for (; p < args.num_partials; p += kSlices) sums[0] += partial[p * args.num_cols];
  }
  auto& of_slice = block_shared<SliceSums>().of_slice;
  of_slice[slice][col_of_block] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int half = kSlices / 2; half; half /= 2) {
    __syncthreads();
    if (slice < half) of_slice[slice][col_of_block] += of_slice[slice + half][col_of_block];
  }
  if (slice == 0 && col < args.num_cols) {
    const float sum = of_slice[0][col_of_block];
    void* to = blockIdx.y ? args.more_sum : args.sum;
    if (args.is_float) {
      static_cast<float*>(to)[col] = sum;
    } else {
      static_cast<T*>(to)[col] = from_float<T>(sum);
    }
  }
}

}  // namespace

void sum_partials(const Partials& args, Dtype dtype, Queue queue) {
  auto* kernel = for_dtype(dtype, []<typename T> { return &sum_partials_kernel<T>; });
  const auto num_blocks = static_cast<unsigned>(ceil_div(args.num_cols, kCols));
  launch(kernel, dim3(num_blocks, args.more_sum ? 2 : 1), kCols * kSlices, queue, args);
}

}  // namespace accel::cuda
