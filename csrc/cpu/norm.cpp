#ifndef ACCEL_ISA  // the first time through this file
#include <ATen/ops/empty.h>

#include "accel/check.h"
#include "accel/dtype.h"
#include "norm.h"

#define ACCEL_KERNEL_FILE "cpu/norm.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

template <typename T>
void to_fp32_kernel(const void* vector, float offset, float* out, int64_t num_cols) {
  const T* in = static_cast<const T*>(vector);
  for_each_vec<1>(num_cols, [&](int64_t col, int, auto span) {
    store(out + col, load(in + col, span) + offset, span);
  });
}

// Halves first: fewer roundings in a row than first to last. 8 is small against the call and enough
// for that.
template <typename Span>
Vec sum_rows(const float* in, int64_t num_rows, int64_t stride, Span span) {
  if (num_rows > 8) {
    const int64_t half = num_rows / 2;
    return sum_rows(in, half, stride, span) +
        sum_rows(in + half * stride, num_rows - half, stride, span);
  }
  Vec total{};
  for (int64_t row = 0; row < num_rows; ++row) total += load(in + row * stride, span);
  return total;
}

template <typename T>
void sum_partials_kernel(
    const float* partials_PN, int64_t num_partials, int64_t num_cols, int64_t begin, int64_t end,
    void* grad_N) {
  T* grad = static_cast<T*>(grad_N) + begin;
  for_each_vec<1>(end - begin, [&](int64_t col, int, auto span) {
    store(grad + col, sum_rows(partials_PN + begin + col, num_partials, num_cols, span), span);
  });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {

at::Tensor to_fp32(const at::Tensor& vector_N, float offset) {
  const at::Tensor in = vector_N.contiguous();
  if (in.scalar_type() == at::kFloat && offset == 0.0f) return in;
  at::Tensor out = at::empty(in.sizes(), in.options().dtype(at::kFloat));
  auto* kernel = float_kernel(in.scalar_type(), "to_fp32", []<typename T> {
    return ACCEL_FOR_THIS_CPU(to_fp32_kernel<T>);
  });
  kernel(in.const_data_ptr(), offset, out.mutable_data_ptr<float>(), in.numel());
  return out;
}

at::Tensor sum_partials(const at::Tensor& partials_PN, at::ScalarType dtype) {
  const int64_t num_partials = partials_PN.size(0);
  const int64_t num_cols = partials_PN.size(1);
  at::Tensor grad = at::empty({num_cols}, partials_PN.options().dtype(dtype));
  auto* kernel = float_kernel(dtype, "sum_partials", []<typename T> {
    return ACCEL_FOR_THIS_CPU(sum_partials_kernel<T>);
  });
  const float* in = partials_PN.const_data_ptr<float>();
  void* out = grad.mutable_data_ptr();
  const int64_t cols_per_task = rows_per_task(num_partials);
  at::parallel_for(0, num_cols, cols_per_task, [&](int64_t begin, int64_t end) {
    kernel(in, num_partials, num_cols, begin, end, out);
  });
  return grad;
}

void check_norm_inputs(const char* op, const at::Tensor& x, const at::Tensor& weight) {
  ACCEL_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least 1 dimension, got a scalar");
  ACCEL_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == x.size(-1), op,
                    ": weight and bias must have shape [", x.size(-1), "], the last of x ",
                    x.sizes(), ", got ", weight.sizes());
  ACCEL_CHECK_VALUE(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat,
                    op, ": weight and bias must be ", x.scalar_type(), " like x, or float32, got ",
                    weight.scalar_type());
}

void check_norm_grad(
    const char* op, const at::Tensor& dy, const at::Tensor& x, at::TensorList per_row) {
  ACCEL_CHECK_VALUE(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type(), op,
                    ": dy must be like x, ", x.scalar_type(), x.sizes(), ", got ",
                    dy.scalar_type(), dy.sizes());
  for (const at::Tensor& saved : per_row) {
    ACCEL_CHECK_VALUE(saved.sizes() == x.sizes().slice(0, x.dim() - 1) &&
                          saved.scalar_type() == at::kFloat && saved.is_contiguous(),
                      op, ": needs the contiguous fp32 rstd (and mean) of the forward, got ",
                      saved.scalar_type(), saved.sizes());
  }
}

bool should_stream(const at::Tensor& output, int64_t num_cols) {
  constexpr size_t kMinBytes = 16 << 20;
  constexpr int64_t kLineBytes = 64;
  const auto address = reinterpret_cast<uintptr_t>(output.const_data_ptr());
  return output.nbytes() >= kMinBytes && num_cols * output.element_size() % kLineBytes == 0 &&
      address % kLineBytes == 0;
}

}  // namespace accel
#endif
