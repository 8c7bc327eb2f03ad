// As much of CUDA as the kernels of csrc/cuda use, on a CPU: for tests, where there is no GPU.
//
// One block runs after the other. Its threads are fibers that take turns at barriers and shuffles, each
// warp as far ahead of the others as it comes: the first warp in every other block and the last one in
// those between, the other way round in half of the launches (the Thue-Morse sequence: an op that launches
// any number of kernels sees both), so that a missing barrier shows. Shared memory is full of NaN when a
// block starts. A barrier or shuffle that some thread of the block or warp never reaches is
// an error. What lies around tensors is watched by guarded_memory.cpp.
//
// The blocks of a cluster run together. A bulk copy is made at once in half of the blocks, so that one which
// comes before its room is free shows, and in the others not before some thread waits for it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct __nv_bfloat16 {
  uint16_t bits;
};

struct __half {
  uint16_t bits;
};

namespace accel::cuda::emulator {

struct Position {
  dim3 thread, block, block_size, grid_size;
};

extern Position position;  // of the thread that runs
extern bool has_bulk_copies;

void run(dim3 grid, unsigned block, const std::function<void()>& kernel, unsigned launched_shared_bytes = 0,
         unsigned blocks_per_cluster = 1);
void barrier();  // of the block
void barrier(int name, unsigned num_threads);  // 1 .. 15
uint32_t exchange(uint32_t word, int from_lane);  // between the lanes of a warp
void* shared_memory(const void* key, size_t num_bytes);
unsigned char* launched_shared();
void cluster_barrier();
void check_aligned(const void* p, size_t num_bytes);  // that begin there, at a multiple of their number
void fail_assertion(const char* condition);

// Class Arrivals of accel/cuda/bulk_copy.h.
void begin_arrivals(uint64_t* arrivals);
void expect_bytes(uint64_t* arrivals, uint32_t num_bytes);
void wait_for_bytes(const uint64_t* arrivals, int phase);
void bulk_copy(void* to_shared, const void* from, uint32_t num_bytes, uint64_t* arrivals);
void send(float value, float* slot, uint64_t* arrivals, int block_of_cluster);

}  // namespace accel::cuda::emulator

#define threadIdx (::accel::cuda::emulator::position.thread)
#define blockIdx (::accel::cuda::emulator::position.block)
#define blockDim (::accel::cuda::emulator::position.block_size)
#define gridDim (::accel::cuda::emulator::position.grid_size)

inline void __syncthreads() { accel::cuda::emulator::barrier(); }

template <typename V>
V __shfl_sync(unsigned, V value, int from_lane) {
  static_assert(sizeof(V) == sizeof(uint32_t));
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  word = accel::cuda::emulator::exchange(word, from_lane);
  std::memcpy(&value, &word, sizeof(word));
  return value;
}

template <typename V>
V __shfl_xor_sync(unsigned lanes, V value, int mask) {
  return __shfl_sync(lanes, value, static_cast<int>(threadIdx.x % 32) ^ mask);
}

template <typename V>
V __shfl_up_sync(unsigned lanes, V value, int offset) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(lanes, value, lane < offset ? lane : lane - offset);
}

inline int __reduce_min_sync(unsigned lanes, int value) {
  for (int mask = 16; mask; mask /= 2) value = std::min(value, __shfl_xor_sync(lanes, value, mask));
  return value;
}

inline unsigned __ballot_sync(unsigned lanes, bool vote) {
  unsigned votes = vote ? 1u << threadIdx.x % 32 : 0u;
  for (int mask = 16; mask; mask /= 2) votes |= __shfl_xor_sync(lanes, votes, mask);
  return votes;
}

inline void __syncwarp() { __shfl_sync(~0u, 0, 0); }

inline int __popc(unsigned v) { return std::popcount(v); }

// Threads take turns only where they wait.
inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}

inline float __bfloat162float(__nv_bfloat16 v) {
  const uint32_t word = static_cast<uint32_t>(v.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  if (std::isnan(v)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float __half2float(__half v) {
  const int exponent = v.bits >> 10 & 31, fraction = v.bits & 1023;
  float size = std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction),
                          (exponent ? exponent : 1) - 25);
  if (exponent == 31) size = fraction ? NAN : INFINITY;
  return v.bits >> 15 ? -size : size;
}

inline __half __float2half_rn(float v) {
  const auto sign = static_cast<uint16_t>(std::signbit(v) ? 0x8000 : 0);
  const float size = std::fabs(v);
  if (std::isnan(v)) return {0x7fff};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent;
  std::frexp(size, &exponent);
  if (size < 0x1p-14f) exponent = -13;  // zero and subnormal
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  return {static_cast<uint16_t>(sign | ((exponent + 13) * 1024 + steps))};
}

// Where a GPU is faster and rounds otherwise, this is as exact as fp32 can be.
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
