// The norm of many tensors, and many tensors times a number. The maths: accel/ops/multi_tensor.py.

#ifndef ACCEL_ISA  // the first time through this file
#include <cmath>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include "accel/dtype.h"
#include "chunks.h"

#define ACCEL_KERNEL_FILE "cpu/multi_tensor.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

typedef double DoubleVec __attribute__((vector_size(kLanes * sizeof(double))));

// The sum of squares of one chunk: fp32 within a lane over 1024 elements, fp64 over lanes and blocks.
template <typename T>
double sum_of_squares(const void* data, int64_t count) {
  constexpr int64_t kBlock = 1024;
  const T* x = static_cast<const T*>(data);
  DoubleVec lanes = {};
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    Vec squares[4] = {};
    for_each_vec<4>(count - begin < kBlock ? count - begin : kBlock, [&](int64_t i, int k, auto span) {
      const Vec v = load(x + begin + i, span);
      squares[k] += v * v;
    });
    for (const Vec& v : squares) lanes += __builtin_convertvector(v, DoubleVec);
  }
  double total = 0.0;
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

template <typename From, typename To>
void scale(const void* source, void* target, float factor, int64_t begin, int64_t end) {
  const From* from = static_cast<const From*>(source) + begin;
  To* to = static_cast<To*>(target) + begin;
  for_each_vec<2>(end - begin, [&](int64_t i, int, auto span) {
    store(to + i, load(from + i, span) * factor, span);
  });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;
using at::TensorList;

Tensor l2_norm_cpu(TensorList tensors) {
  if (tensors.empty()) return at::scalar_tensor(0.0f);
  check_list("l2_norm", "tensors", tensors, tensors);
  std::vector<const char*> data;
  for (const Tensor& t : tensors) data.push_back(static_cast<const char*>(t.const_data_ptr()));
  auto* kernel = float_kernel(tensors[0].scalar_type(), "l2_norm", []<typename T> {
    return ACCEL_FOR_THIS_CPU(sum_of_squares<T>);
  });
  const int64_t item_size = tensors[0].element_size();
  const Chunks chunks(tensors);
  std::vector<double> partials(chunks.count());
  chunks.parallel([&](int64_t i, int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t start = chunk * Chunks::kElements;
      partials[chunks.first(i) + chunk] =
          kernel(data[i] + start * item_size, std::min(Chunks::kElements, tensors[i].numel() - start));
    }
  });
  double total = 0.0;
  for (const double partial : partials) total += partial;
  return at::scalar_tensor(std::sqrt(total), at::kFloat);
}

void scale_cpu(TensorList sources, TensorList targets, double factor) {
  if (sources.empty() && targets.empty()) return;
  check_list("scale", "sources", sources, sources);
  check_list("scale", "targets", targets, sources);
  std::vector<const void*> from;
  std::vector<void*> to;
  for (const Tensor& t : sources) from.push_back(t.const_data_ptr());
  for (const Tensor& t : targets) to.push_back(t.mutable_data_ptr());
  auto* kernel = float_kernel(sources[0].scalar_type(), "scale", [&]<typename From> {
    return float_kernel(targets[0].scalar_type(), "scale", []<typename To> {
      return ACCEL_FOR_THIS_CPU(scale<From, To>);
    });
  });
  Chunks(sources).parallel([&](int64_t i, int64_t begin, int64_t end) {
    kernel(from[i], to[i], static_cast<float>(factor), begin * Chunks::kElements,
           std::min(end * Chunks::kElements, sources[i].numel()));
  });
  bump_versions(targets);
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("l2_norm", &l2_norm_cpu);
  m.impl("scale_", &scale_cpu);
}

}  // namespace
}  // namespace accel
#endif
