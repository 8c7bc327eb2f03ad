// Compiles one kernel file once per instruction set; the CPU picks at run time (isa.h). After
// Highway's foreach_target.h. A kernel file reads, from top to bottom:
//
//   #ifndef ACCEL_ISA                             // the first time through
//   #include <...>                                // std and ATen: before this header, see below
//   #define ACCEL_KERNEL_FILE "cpu/rms_norm.cpp"  // the file itself
//   #include "accel/for_each_isa.h"
//   #endif
//   namespace accel::ACCEL_ISA {                  // accel::avx512, accel::avx2, accel::baseline
//     void kernel(const Args&, int64_t begin, int64_t end) { ... Vec, load, store ... }
//   }
//   #if ACCEL_ISA_IS_LAST                         // host code, compiled once, for any CPU
//     ACCEL_FOR_THIS_CPU(kernel)(args, 0, rows);
//   #endif
//
// Everything included before this header is compiled for the baseline. That matters: an inline std
// function compiled for AVX-512 in one object may be the copy that the linker keeps for all of
// them. GCC on x86-64 only; other compilers and CPUs get the baseline (16-byte vectors) alone.
//
// No include guard: the file includes itself through this header.

#ifndef ACCEL_ISA

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "accel/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ACCEL_FOR_THIS_CPU(...)                                          \
  (::accel::isa() == ::accel::Isa::avx512 ? &::accel::avx512::__VA_ARGS__ \
   : ::accel::isa() == ::accel::Isa::avx2 ? &::accel::avx2::__VA_ARGS__   \
                                          : &::accel::baseline::__VA_ARGS__)

#define ACCEL_ISA_IS_LAST 0

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define ACCEL_ISA avx512
#define ACCEL_LANES 16
#include "accel/vec.h"
#include "accel/math.h"
#include ACCEL_KERNEL_FILE
#undef ACCEL_ISA
#undef ACCEL_LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ACCEL_ISA avx2
#define ACCEL_LANES 8
#include "accel/vec.h"
#include "accel/math.h"
#include ACCEL_KERNEL_FILE
#undef ACCEL_ISA
#undef ACCEL_LANES
#pragma GCC pop_options

#undef ACCEL_ISA_IS_LAST
#else
#define ACCEL_FOR_THIS_CPU(...) (&::accel::baseline::__VA_ARGS__)
#endif

// The baseline: the rest of the file that included us.
#define ACCEL_ISA_IS_LAST 1
#define ACCEL_ISA baseline
#define ACCEL_LANES 4
#include "accel/vec.h"
#include "accel/math.h"

#endif
