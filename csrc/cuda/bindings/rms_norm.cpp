#include "rms_norm.h"

#include <cmath>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "accel/cuda/op.h"
#include "norm_checks.h"

namespace accel::cuda {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> forward(
    const Tensor& x_in, const Tensor& weight_in, double eps, bool zero_centered) {
  check_norm_inputs("rms_norm", x_in, weight_in);
  const OnDeviceOf device(x_in);
  const Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  check_num_rows("rms_norm", rstd.numel());
  if (x.numel() == 0) return {y, rstd.fill_(1.0 / std::sqrt(eps))};
  rms_norm_forward(
      {.x = x.const_data_ptr(),
       .residual = nullptr,
       .bias = nullptr,
       .weight = weight.const_data_ptr(),
       .y = y.mutable_data_ptr(),
       .total = nullptr,
       .rstd = rstd.mutable_data_ptr<float>(),
       .num_rows = rstd.numel(),
       .num_cols = x.size(-1),
       .eps = static_cast<float>(eps),
       .weight_offset = zero_centered ? 1.0f : 0.0f,
       .dtype = dtype_of(x.scalar_type(), "rms_norm"),
       .weight_is_float = weight.scalar_type() == at::kFloat},
      device.queue());
  device.check_launch();
  return {y, rstd};
}

std::tuple<Tensor, Tensor> backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight_in, const Tensor& rstd,
    bool zero_centered) {
  check_norm_inputs("rms_norm backward", x_in, weight_in);
  check_norm_grad("rms_norm backward", dy_in, x_in, rstd);
  check_num_rows("rms_norm backward", rstd.numel());
  const OnDeviceOf device(x_in);
  const Dtype dtype = dtype_of(x_in.scalar_type(), "rms_norm backward");
  const int64_t num_rows = rstd.numel(), num_cols = x_in.size(-1);
  const float weight_offset = zero_centered ? 1.0f : 0.0f;
  const bool in_packs = rms_norm_needs_whole_packs(num_cols, dtype, weight_offset);
  const Tensor dy = contiguous(dy_in, in_packs), x = contiguous(x_in, in_packs);
  const Tensor weight = contiguous(weight_in, in_packs);
  Tensor dx = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return {dx, at::zeros_like(weight)};
  const Queue queue = device.queue();
  const int64_t num_programs =
      rms_norm_programs(num_rows, num_cols, dtype, weight_offset, queue.num_processors);
  Tensor dweight_PN = at::empty({num_programs, num_cols}, rstd.options());
  Tensor dweight = at::empty({num_cols}, weight.options());
  rms_norm_backward(
      {.dy = dy.const_data_ptr(),
       .dtotal = nullptr,
       .x = x.const_data_ptr(),
       .weight = weight.const_data_ptr(),
       .rstd = rstd.const_data_ptr<float>(),
       .dx = dx.mutable_data_ptr(),
       .dweight_PN = dweight_PN.mutable_data_ptr<float>(),
       .dweight = dweight.mutable_data_ptr(),
       .num_rows = num_rows,
       .num_cols = num_cols,
       .weight_offset = weight_offset,
       .dtype = dtype,
       .weight_is_float = weight.scalar_type() == at::kFloat},
      num_programs, queue);
  device.check_launch();
  return {dx, dweight};
}

}  // namespace

void register_rms_norm(torch::Library& library) {
  library.impl("rms_norm_fwd", &forward);
  library.impl("rms_norm_bwd", &backward);
}

}  // namespace accel::cuda
