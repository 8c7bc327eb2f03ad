// A residual addition and RMSNorm on CPU. The maths: accel/ops/add_rms_norm.py.
//
// The rows of rms_norm.h, with another way in and out: the bits are those of the two steps.

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

struct AddRmsNormForward {
  const void* x;
  const void* residual;
  const void* bias;  // or null
  const float* scale;
  void* y;
  void* total;
  float* rstd;
  int64_t num_cols;
  float eps;
};

struct AddRmsNormBackward {
  const void* dy;
  const void* dtotal;  // or null
  const void* total;
  const float* scale;
  const float* rstd;
  void* dx;
  int64_t num_cols;
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/add_rms_norm.cpp"
#include "accel/for_each_isa.h"
#endif

#include "rms_norm.h"

namespace accel::ACCEL_ISA {

// Rows [begin, end). Past the caches, total is gathered in a row of `rows_2N` first: it is read twice.
template <typename T, bool kBias, bool kStream>
void add_rms_norm_forward(const AddRmsNormForward& args, int64_t begin, int64_t end, void* rows_2N) {
  const int64_t num_cols = args.num_cols;
  const T* bias = static_cast<const T*>(args.bias);
  T* total = static_cast<T*>(args.total);
  T* y = static_cast<T*>(args.y);
  const auto sums_of = [&](int64_t row) {
    return kStream ? static_cast<T*>(rows_2N) + row % 2 * num_cols : total + row * num_cols;
  };
  const auto value = [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * num_cols;
    const T* residual = static_cast<const T*>(args.residual) + row * num_cols;
    return [=, sums = sums_of(row)](int64_t col, auto span) {
      prefetch_later(x + num_cols, col);
      prefetch_later(residual + num_cols, col);
      Pair v = load(x + col, span);
      if constexpr (kBias) v = rounded(plus(v, load(bias + col, span)), bias);
      store<false>(sums + col, plus(load(residual + col, span), v), span);
      return load(sums + col, span);  // as rounded
    };
  };
  rms_norm_forward_run(
      num_cols, args.eps, begin, end, value, [&](int64_t row, float rstd, auto next_value) {
        args.rstd[row] = rstd;
        const T* sums = sums_of(row);
        if constexpr (kStream) {
          const float* words = reinterpret_cast<const float*>(sums);
          store_row<true>(
              reinterpret_cast<float*>(total + row * num_cols),
              num_cols * static_cast<int64_t>(sizeof(T)) / 4,
              [&](int64_t word, int, auto span) { return load(words + word, span); });
        }
        return scale_row<kStream>(
            sums, rstd, args.scale, y + row * num_cols, num_cols, args.eps, next_value);
      });
  if constexpr (kStream) stream_fence();
}

// Rows [begin, end), their dscale summed into one partial. `block_N` is scratch.
template <typename T, bool kTotal, bool kStream>
void add_rms_norm_backward(
    const AddRmsNormBackward& args, int64_t begin, int64_t end, float* block_N, float* dscale) {
  const int64_t num_cols = args.num_cols;
  const T* dtotal = static_cast<const T*>(args.dtotal);
  rms_norm_backward_run<kStream>(
      static_cast<const T*>(args.dy), static_cast<const T*>(args.total), args.scale, args.rstd,
      static_cast<T*>(args.dx), num_cols, begin, end, block_N, dscale,
      [&](int64_t row, int64_t col, Vec dx, auto span) {
        if constexpr (!kTotal) return dx;
        prefetch(dtotal + (row + kRowsAtOnce) * num_cols, col);
        return rounded(dx, dtotal) + load(dtotal + row * num_cols + col, span);
      });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;

void check_addend(const char* name, const Tensor& addend, const Tensor& x, at::IntArrayRef sizes) {
  ACCEL_CHECK_VALUE(addend.sizes() == sizes && addend.scalar_type() == x.scalar_type(),
                    "add_rms_norm: ", name, " must be ", x.scalar_type(), sizes, " to go with x ",
                    x.sizes(), ", got ", addend.scalar_type(), addend.sizes());
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd_cpu(
    const Tensor& x_in, const Tensor& residual_in, const std::optional<Tensor>& bias_in,
    const Tensor& weight, double eps, bool zero_centered) {
  check_norm_inputs("add_rms_norm", x_in, weight);
  check_addend("residual", residual_in, x_in, x_in.sizes());
  const int64_t num_cols = x_in.size(-1);
  if (bias_in) check_addend("bias", *bias_in, x_in, {num_cols});
  const Tensor x = x_in.contiguous();
  const Tensor residual = residual_in.contiguous();
  const Tensor bias = bias_in ? bias_in->contiguous() : Tensor();
  const Tensor scale = to_fp32(weight, zero_centered ? 1.0f : 0.0f);
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor total = at::empty(x.sizes(), x.options());
  Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  if (x.numel() == 0) return {y, total, rstd.fill_(1.0 / std::sqrt(eps))};

  const AddRmsNormForward args{
      .x = x.const_data_ptr(),
      .residual = residual.const_data_ptr(),
      .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
      .scale = scale.const_data_ptr<float>(),
      .y = y.mutable_data_ptr(),
      .total = total.mutable_data_ptr(),
      .rstd = rstd.mutable_data_ptr<float>(),
      .num_cols = num_cols,
      .eps = static_cast<float>(eps)};
  const bool stream = should_stream(y, num_cols) && should_stream(total, num_cols);
  auto* kernel = float_kernel(x.scalar_type(), "add_rms_norm", [&]<typename T> {
    if (bias.defined()) {
      return stream ? ACCEL_FOR_THIS_CPU(add_rms_norm_forward<T, true, true>)
                    : ACCEL_FOR_THIS_CPU(add_rms_norm_forward<T, true, false>);
    }
    return stream ? ACCEL_FOR_THIS_CPU(add_rms_norm_forward<T, false, true>)
                  : ACCEL_FOR_THIS_CPU(add_rms_norm_forward<T, false, false>);
  });
  at::parallel_for(0, rstd.numel(), rows_per_task(num_cols), [&](int64_t begin, int64_t end) {
    std::vector<float> rows_2N(2 * num_cols);  // wide enough for any T
    kernel(args, begin, end, rows_2N.data());
  });
  return {y, total, rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_bwd_cpu(
    const Tensor& dy_in, const std::optional<Tensor>& dtotal_in, const Tensor& total,
    const Tensor& weight, const Tensor& rstd, bool zero_centered) {
  check_norm_inputs("add_rms_norm backward", total, weight);
  check_norm_grad("add_rms_norm backward", dy_in, total, {rstd});
  ACCEL_CHECK_VALUE(total.is_contiguous(), "add_rms_norm backward: needs the contiguous total of the "
                    "forward, got strides ", total.strides());
  if (dtotal_in) check_addend("dtotal", *dtotal_in, total, total.sizes());
  const Tensor dy = dy_in.contiguous();
  const Tensor dtotal = dtotal_in ? dtotal_in->contiguous() : Tensor();
  const Tensor scale = to_fp32(weight, zero_centered ? 1.0f : 0.0f);
  Tensor dx = at::empty(total.sizes(), total.options());
  if (total.numel() == 0) return {dx, at::zeros_like(weight)};

  const int64_t num_cols = total.size(-1);
  const AddRmsNormBackward args{
      .dy = dy.const_data_ptr(),
      .dtotal = dtotal.defined() ? dtotal.const_data_ptr() : nullptr,
      .total = total.const_data_ptr(),
      .scale = scale.const_data_ptr<float>(),
      .rstd = rstd.const_data_ptr<float>(),
      .dx = dx.mutable_data_ptr(),
      .num_cols = num_cols};
  const bool stream = should_stream(dx, num_cols);
  auto* kernel = float_kernel(total.scalar_type(), "add_rms_norm backward", [&]<typename T> {
    if (dtotal.defined()) {
      return stream ? ACCEL_FOR_THIS_CPU(add_rms_norm_backward<T, true, true>)
                    : ACCEL_FOR_THIS_CPU(add_rms_norm_backward<T, true, false>);
    }
    return stream ? ACCEL_FOR_THIS_CPU(add_rms_norm_backward<T, false, true>)
                  : ACCEL_FOR_THIS_CPU(add_rms_norm_backward<T, false, false>);
  });
  const RowRuns runs(rstd.numel());
  Tensor dscale_PN = at::empty({runs.count, num_cols}, total.options().dtype(at::kFloat));
  float* dscale = dscale_PN.mutable_data_ptr<float>();
  runs.parallel(num_cols, [&](int64_t run, int64_t begin, int64_t end) {
    std::vector<float> block_N(num_cols);
    kernel(args, begin, end, block_N.data(), dscale + run * num_cols);
  });
  return {dx, sum_partials(dscale_PN, weight.scalar_type())};
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("add_rms_norm_fwd", &add_rms_norm_fwd_cpu);
  m.impl("add_rms_norm_bwd", &add_rms_norm_bwd_cpu);
}

}  // namespace
}  // namespace accel
#endif
