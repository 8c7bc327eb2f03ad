// What the kernels of csrc/cuda are written with: 16-byte packs, fp32 in between, sums over the threads of
// a row, and the launch. nvcc compiles them for GPUs; g++ compiles the same files against
// csrc/cuda/emulator, where tests run them on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "accel/cuda/launch.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "emulator/cuda_on_cpu.h"
#endif

#define ACCEL_DEVICE __device__ __forceinline__

namespace accel::cuda {

// kernel<<<grid, block, 0, queue.stream>>>(args); nothing for an empty grid.
template <typename Args>
void launch(void (*kernel)(Args), dim3 grid, unsigned block, Queue queue, const Args& args) {
  if (grid.x == 0 || grid.y == 0) return;
#ifdef __CUDACC__
  kernel<<<grid, block, 0, queue.stream>>>(args);
#else
  emulator::run(grid, block, [&] { kernel(args); });
#endif
}

// The block's own T: the same for all of its threads, one for each T of a kernel, not initialised.
template <typename T>
ACCEL_DEVICE T& block_shared() {
#ifdef __CUDACC__
  __shared__ T storage;
  return storage;
#else
  static const char key = 0;
  return *static_cast<T*>(emulator::shared_memory(&key, sizeof(T)));
#endif
}

template <typename T>
constexpr int kPack = kPackBytes / static_cast<int>(sizeof(T));  // elements

template <typename To, typename From>
ACCEL_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

ACCEL_DEVICE float to_float(float v) { return v; }
ACCEL_DEVICE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
ACCEL_DEVICE float to_float(__half v) { return __half2float(v); }

template <typename T>
ACCEL_DEVICE T from_float(float v) {
  if constexpr (sizeof(T) == 4) return v;
  if constexpr (__is_same(T, __nv_bfloat16)) return __float2bfloat16_rn(v);
  if constexpr (__is_same(T, __half)) return __float2half_rn(v);
}

// 2^v in one instruction, some 2^-22 off; 0 below 2^-126.
ACCEL_DEVICE float fast_exp2(float v) {
#ifdef __CUDACC__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
#else
  return exp2f(v);
#endif
}

// So many threads of the block wait for each other, whole warps, those that name this barrier (1 .. 15).
ACCEL_DEVICE void named_barrier(int barrier, int num_threads) {
#ifdef __CUDACC__
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
#else
  emulator::barrier(barrier, num_threads);
#endif
}

// v as a T would hold it.
template <typename T>
ACCEL_DEVICE float rounded(float v) {
  return to_float(from_float<T>(v));
}

// Two floats as one word of a 16-bit T, in one instruction where the processor has it.
template <typename T>
ACCEL_DEVICE uint32_t word_of(float low, float high) {
#ifdef __CUDACC__
  if constexpr (__is_same(T, __nv_bfloat16)) return bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
  if constexpr (__is_same(T, __half)) return bits_as<uint32_t>(__floats2half2_rn(low, high));
#endif
  return bits_as<uint16_t>(from_float<T>(low)) |
      static_cast<uint32_t>(bits_as<uint16_t>(from_float<T>(high))) << 16;
}

// 16 bytes of T in four registers.
template <typename T>
struct Pack {
  uint32_t words[4];

  ACCEL_DEVICE float operator[](int i) const {
    if constexpr (sizeof(T) == 4) return bits_as<float>(words[i]);
    const uint32_t word = words[i / 2];
    if constexpr (__is_same(T, __nv_bfloat16)) {
      return bits_as<float>(i % 2 ? word & 0xffff0000u : word << 16);
    }
    if constexpr (__is_same(T, __half)) {
      return to_float(bits_as<__half>(static_cast<uint16_t>(i % 2 ? word >> 16 : word)));
    }
  }

  // Element i again, by another instruction: ptxas sees through stay_packed() and would keep the floats after
  // all. (RMSNorm backward in fp16 then spilled 120 bytes.)
  ACCEL_DEVICE float again(int i) const {
#ifdef __CUDACC__
    if constexpr (sizeof(T) == 2) {
      uint32_t bits;  // the element above zeros
      if (i % 2) {
        asm("prmt.b32 %0, %1, 0, 0x3244;" : "=r"(bits) : "r"(words[i / 2]));
      } else {
        asm("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(bits) : "r"(words[i / 2]));
      }
      if constexpr (__is_same(T, __half)) return to_float(bits_as<__half>(static_cast<uint16_t>(bits >> 16)));
      return bits_as<float>(bits);
    }
#endif
    return (*this)[i];
  }

  // Forgets that floats were made of it: the compiler makes them again and does not keep them in twice
  // as many registers for as long as the pack lives.
  ACCEL_DEVICE void stay_packed() {
#ifdef __CUDACC__
    asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
#endif
  }
};

// No load after this is begun before it: fewer are under way, and fewer registers wait for them.
ACCEL_DEVICE void one_after_the_other() {
#ifdef __CUDACC__
  asm volatile("" ::: "memory");
#endif
}

// fp32, rounded to T.
template <typename T>
ACCEL_DEVICE Pack<T> pack_of(const float (&v)[kPack<T>]) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      pack.words[i] = bits_as<uint32_t>(v[i]);
    } else {
      pack.words[i] = word_of<T>(v[2 * i], v[2 * i + 1]);
    }
  }
  return pack;
}

// Ends the GPU's work with an error that the host sees when it next waits, NDEBUG or not.
#ifdef __CUDACC__
#define ACCEL_DEVICE_ASSERT(condition) \
  if (!(condition)) __assert_fail(#condition, __FILE__, __LINE__, __func__)
#else
#define ACCEL_DEVICE_ASSERT(condition) \
  if (!(condition)) emulator::fail_assertion(#condition)
#endif

// A GPU faults where 16 bytes do not begin at a multiple of 16, or 8 at one of 8; so does the emulator,
// which a CPU would not.
ACCEL_DEVICE void check_aligned(
    [[maybe_unused]] const void* p, [[maybe_unused]] size_t num_bytes = kPackBytes) {
#ifndef __CUDACC__
  emulator::check_aligned(p, num_bytes);
#endif
}

// The elements [0, count) at p, and zeros. kWhole: p divides by 16, and so does `count` if it is less
// than a pack.
template <bool kWhole, typename T>
ACCEL_DEVICE Pack<T> load(const T* p, int64_t count) {
  Pack<T> pack{};
  if constexpr (kWhole) {
    if (count > 0) {
      check_aligned(p);
      [[maybe_unused]] const uint4 raw = *reinterpret_cast<const uint4*>(p);
      pack = {raw.x, raw.y, raw.z, raw.w};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      if (i >= count) continue;
      if constexpr (sizeof(T) == 4) {
        pack.words[i] = bits_as<uint32_t>(p[i]);
      } else {
        pack.words[i / 2] |= static_cast<uint32_t>(bits_as<uint16_t>(p[i])) << (i % 2 * 16);
      }
    }
  }
  return pack;
}

template <bool kWhole, typename T>
ACCEL_DEVICE void store(T* p, const Pack<T>& pack, int64_t count) {
  if constexpr (kWhole) {
    if (count > 0) {
      check_aligned(p);
      *reinterpret_cast<uint4*>(p) = {pack.words[0], pack.words[1], pack.words[2], pack.words[3]};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      if (i >= count) continue;
      if constexpr (sizeof(T) == 4) {
        p[i] = bits_as<float>(pack.words[i]);
      } else {
        p[i] = bits_as<T>(static_cast<uint16_t>(pack.words[i / 2] >> (i % 2 * 16)));
      }
    }
  }
}

// kCount elements of a vector, as fp32.
template <bool kWhole, typename T, int kCount>
ACCEL_DEVICE void load_floats(const T* p, int64_t count, float (&out)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k += kPack<T>) {
    const Pack<T> pack = load<kWhole>(p + k, count - k);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) out[k + i] = pack[i];
  }
}

// A pack's columns of a vector of T, or of fp32 where `is_float`.
template <bool kWhole, typename T>
ACCEL_DEVICE void load_columns(const void* vector, bool is_float, int64_t col, int64_t count,
                               float (&out)[kPack<T>]) {
  if (is_float) {
    load_floats<kWhole, float, kPack<T>>(static_cast<const float*>(vector) + col, count, out);
  } else {
    load_floats<kWhole, T, kPack<T>>(static_cast<const T*>(vector) + col, count, out);
  }
}

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The threads of a block that share a row: 1, 2, 4, ... 32 lanes side by side, several rows to a warp; or
// the whole block, a power of 2 of at least 64.
struct RowTeams {
  int log2_threads;

  ACCEL_DEVICE int threads() const { return 1 << log2_threads; }
  ACCEL_DEVICE int lane() const { return static_cast<int>(threadIdx.x) & (threads() - 1); }
  ACCEL_DEVICE int team() const { return static_cast<int>(threadIdx.x) >> log2_threads; }
  ACCEL_DEVICE int teams_per_block() const { return static_cast<int>(blockDim.x) >> log2_threads; }
  // One team of more than a warp is the block.
  ACCEL_DEVICE void wait() const { __syncthreads(); }
  ACCEL_DEVICE int first_warp() const { return 0; }
};

// Where several teams of more than a warp, 15 at most, may share a block. (For one, with a barrier that has a
// name, layer_norm spilled on sm_100.)
struct ManyTeams : RowTeams {
  ACCEL_DEVICE void wait() const { named_barrier(1 + team(), threads()); }
  ACCEL_DEVICE int first_warp() const { return (threadIdx.x >> log2_threads << log2_threads) / kWarp; }
};

// Likewise, of a number of threads that the compiler knows.
template <int kLog2Threads>
struct FixedTeams {
  static ACCEL_DEVICE constexpr int threads() { return 1 << kLog2Threads; }
  ACCEL_DEVICE int lane() const { return static_cast<int>(threadIdx.x) & (threads() - 1); }
  ACCEL_DEVICE int team() const { return static_cast<int>(threadIdx.x) >> kLog2Threads; }
  ACCEL_DEVICE int teams_per_block() const { return static_cast<int>(blockDim.x) >> kLog2Threads; }
  ACCEL_DEVICE void wait() const { named_barrier(1 + team(), threads()); }
  ACCEL_DEVICE int first_warp() const { return team() * (threads() / kWarp); }
};

struct WarpValues {
  float of_warp[2][kWarp];
};

// What combine(a, b) makes of the v of all threads of a row, the same bits in each of them. Every thread of
// the team calls it, and of its warps. `turn` counts the calls: what they shared the turn before may still be
// being read.
template <typename Teams, typename Combine>
ACCEL_DEVICE float reduce_row(float v, const Teams& teams, int turn, Combine combine) {
  const int lanes = teams.threads() < kWarp ? teams.threads() : kWarp;
  for (int offset = lanes / 2; offset; offset /= 2) v = combine(v, __shfl_xor_sync(kAllLanes, v, offset));
  if (teams.threads() <= kWarp) return v;
  const int warps = teams.threads() / kWarp, lane = threadIdx.x % kWarp;
  float* shared = block_shared<WarpValues>().of_warp[turn % 2];
  if (lane == 0) shared[threadIdx.x / kWarp] = v;
  teams.wait();
  v = shared[teams.first_warp() + lane % warps];
  for (int offset = warps / 2; offset; offset /= 2) v = combine(v, __shfl_xor_sync(kAllLanes, v, offset));
  return v;
}

template <typename Teams>
ACCEL_DEVICE float row_sum(float v, const Teams& teams, int turn) {
  return reduce_row(v, teams, turn, [](float a, float b) { return a + b; });
}

// NaN counts for nothing.
template <typename Teams>
ACCEL_DEVICE float row_max(float v, const Teams& teams, int turn) {
  return reduce_row(v, teams, turn, [](float a, float b) { return fmaxf(a, b); });
}

// kernel_for.operator()<T>() for a dtype known at run time.
template <typename F>
auto for_dtype(Dtype dtype, F&& kernel_for) {
  switch (dtype) {
    case Dtype::bfloat16: return kernel_for.template operator()<__nv_bfloat16>();
    case Dtype::float16: return kernel_for.template operator()<__half>();
    default: return kernel_for.template operator()<float>();
  }
}

// How many threads share a row of `num_cols`, as a power of 2, where each holds up to `packs_per_thread`;
// and the block that it makes: smaller teams share a block of 128.
struct RowBlock {
  int log2_threads;
  int threads_per_block;
  int rows_per_block;

  RowBlock(int64_t num_cols, Dtype dtype, int packs_per_thread, int64_t max_threads = 1024) {
    const int64_t packs = ceil_div(num_cols * size_of(dtype), kPackBytes);
    int64_t threads = next_power_of_2(ceil_div(packs, packs_per_thread));
    threads = threads < max_threads ? threads : max_threads;
    log2_threads = 0;
    while ((1 << log2_threads) < threads) ++log2_threads;
    threads_per_block = static_cast<int>(threads > kWarp ? threads : 128);
    rows_per_block = threads_per_block >> log2_threads;
  }
};

}  // namespace accel::cuda
