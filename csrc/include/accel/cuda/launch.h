// What a launcher of csrc/cuda takes besides its op's own arguments. No CUDA and no torch header: seen by
// nvcc, by the bindings, and by the emulator.
#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace accel::cuda {

enum class Dtype : int { float32, bfloat16, float16 };

constexpr int size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

struct Queue {
  CUstream_st* stream;
  int num_processors;  // streaming multiprocessors of its device
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t next_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

constexpr int kPackBytes = 16;  // what a thread reads and writes at once

// Whether tensors that begin at these addresses, with rows of `num_cols`, can be read in whole packs.
template <typename... Pointers>
bool whole_packs(int64_t num_cols, Dtype dtype, Pointers... pointers) {
  return num_cols * size_of(dtype) % kPackBytes == 0 &&
      ((reinterpret_cast<uintptr_t>(pointers) % kPackBytes == 0) && ...);
}

}  // namespace accel::cuda
