// A copy past the caches: the limit that the benchmarks hold kernels against. torch's own copy_
// reads every line of its target before it writes it, which is a third more traffic.

#ifndef ACCEL_ISA  // the first time through this file
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "accel/check.h"

#define ACCEL_KERNEL_FILE "cpu/stream_copy.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// Four vectors a step: whole cache lines, in every instruction set. The CPU's own prefetcher stops at
// the end of a page. 256 MiB, 2 threads of an AMD Zen 4: 51 GB/s without ours, 55 with it.
void stream_copy(const float* source, float* target, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 512;
  for (int64_t i = begin; i < end; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) prefetch(source + kAhead, i + k * kLanes);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) stream(target + i + k * kLanes, load(source + i + k * kLanes, Full{}));
  }
  stream_fence();
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

void stream_copy(const at::Tensor& source, const at::Tensor& target) {
  constexpr int64_t kStep = 64;  // floats in a step of the widest instruction set
  ACCEL_CHECK_VALUE(
      source.scalar_type() == at::kFloat && target.scalar_type() == at::kFloat &&
          source.is_contiguous() && target.is_contiguous() && source.sizes() == target.sizes() &&
          source.numel() % kStep == 0 &&
          reinterpret_cast<uintptr_t>(target.const_data_ptr()) % 64 == 0,
      "stream_copy: needs two contiguous fp32 tensors of one shape, a multiple of ", kStep,
      " elements, got ", source.scalar_type(), source.sizes(), " and ", target.scalar_type(),
      target.sizes());
  const float* from = source.const_data_ptr<float>();
  float* to = target.mutable_data_ptr<float>();
  auto* kernel = ACCEL_FOR_THIS_CPU(stream_copy);
  at::parallel_for(0, source.numel() / kStep, 1 << 10, [&](int64_t begin, int64_t end) {
    kernel(from, to, begin * kStep, end * kStep);
  });
}

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_stream_copy(Tensor source, Tensor(a!) target) -> ()", &stream_copy);
}

}  // namespace
}  // namespace accel
#endif
