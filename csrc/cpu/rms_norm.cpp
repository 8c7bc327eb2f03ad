// RMSNorm on CPU. The maths and what is saved: accel/ops/rms_norm.py.
//
// A row stays in L1 or L2 between the two passes over it, so memory is read once.

#ifndef ACCEL_ISA  // the first time through this file
#include <cmath>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "accel/dtype.h"
#include "norm.h"

namespace accel {

struct RmsNormForward {
  const void* x;
  const float* scale;
  void* y;
  float* rstd;
  int64_t num_cols;
  float eps;
};

struct RmsNormBackward {
  const void* dy;
  const void* x;
  const float* scale;
  const float* rstd;
  void* dx;
  int64_t num_cols;
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/rms_norm.cpp"
#include "accel/for_each_isa.h"
#endif

#include "rms_norm.h"

namespace accel::ACCEL_ISA {

// y = x * rstd * scale with rstd = 1 / sqrt(mean(x^2) + eps), rows [begin, end).
template <typename T, bool kStream>
void rms_norm_forward(const RmsNormForward& args, int64_t begin, int64_t end) {
  const int64_t num_cols = args.num_cols;
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  const auto value = [&](int64_t row) {
    return [x = x + row * num_cols, num_cols](int64_t col, auto span) {
      prefetch_later(x + num_cols, col);
      return load(x + col, span);
    };
  };
  rms_norm_forward_run(
      num_cols, args.eps, begin, end, value, [&](int64_t row, float rstd, auto next_value) {
        args.rstd[row] = rstd;
        return scale_row<kStream>(
            x + row * num_cols, rstd, args.scale, y + row * num_cols, num_cols, args.eps, next_value);
      });
  if constexpr (kStream) stream_fence();
}

template <typename T, bool kStream>
void rms_norm_backward(
    const RmsNormBackward& args, int64_t begin, int64_t end, float* block_N, float* dscale) {
  rms_norm_backward_run<kStream>(
      static_cast<const T*>(args.dy), static_cast<const T*>(args.x), args.scale, args.rstd,
      static_cast<T*>(args.dx), args.num_cols, begin, end, block_N, dscale,
      [](int64_t, int64_t, Vec dx, auto) { return dx; });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> rms_norm_fwd_cpu(
    const Tensor& x_in, const Tensor& weight, double eps, bool zero_centered) {
  check_norm_inputs("rms_norm", x_in, weight);
  const Tensor x = x_in.contiguous();
  const Tensor scale = to_fp32(weight, zero_centered ? 1.0f : 0.0f);
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  if (x.numel() == 0) return {y, rstd.fill_(1.0 / std::sqrt(eps))};

  const int64_t num_cols = x.size(-1);
  const RmsNormForward args{
      .x = x.const_data_ptr(),
      .scale = scale.const_data_ptr<float>(),
      .y = y.mutable_data_ptr(),
      .rstd = rstd.mutable_data_ptr<float>(),
      .num_cols = num_cols,
      .eps = static_cast<float>(eps)};
  const bool stream = should_stream(y, num_cols);
  auto* kernel = float_kernel(x.scalar_type(), "rms_norm", [&]<typename T> {
    return stream ? ACCEL_FOR_THIS_CPU(rms_norm_forward<T, true>)
                  : ACCEL_FOR_THIS_CPU(rms_norm_forward<T, false>);
  });
  at::parallel_for(0, rstd.numel(), rows_per_task(num_cols), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd_cpu(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight, const Tensor& rstd,
    bool zero_centered) {
  check_norm_inputs("rms_norm backward", x_in, weight);
  check_norm_grad("rms_norm backward", dy_in, x_in, {rstd});
  const Tensor x = x_in.contiguous();
  const Tensor dy = dy_in.contiguous();
  const Tensor scale = to_fp32(weight, zero_centered ? 1.0f : 0.0f);
  Tensor dx = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return {dx, at::zeros_like(weight)};

  const int64_t num_cols = x.size(-1);
  const RmsNormBackward args{
      .dy = dy.const_data_ptr(),
      .x = x.const_data_ptr(),
      .scale = scale.const_data_ptr<float>(),
      .rstd = rstd.const_data_ptr<float>(),
      .dx = dx.mutable_data_ptr(),
      .num_cols = num_cols};
  const bool stream = should_stream(dx, num_cols);
  auto* kernel = float_kernel(x.scalar_type(), "rms_norm backward", [&]<typename T> {
    return stream ? ACCEL_FOR_THIS_CPU(rms_norm_backward<T, true>)
                  : ACCEL_FOR_THIS_CPU(rms_norm_backward<T, false>);
  });
  const RowRuns runs(rstd.numel());
  Tensor dscale_PN = at::empty({runs.count, num_cols}, x.options().dtype(at::kFloat));
  float* dscale = dscale_PN.mutable_data_ptr<float>();
  runs.parallel(num_cols, [&](int64_t run, int64_t begin, int64_t end) {
    std::vector<float> block_N(num_cols);
    kernel(args, begin, end, block_N.data(), dscale + run * num_cols);
  });
  return {dx, sum_partials(dscale_PN, weight.scalar_type())};
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("rms_norm_fwd", &rms_norm_fwd_cpu);
  m.impl("rms_norm_bwd", &rms_norm_bwd_cpu);
}

}  // namespace
}  // namespace accel
#endif
