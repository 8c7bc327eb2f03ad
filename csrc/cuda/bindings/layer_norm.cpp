#include "layer_norm.h"

#include <cmath>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "accel/cuda/op.h"
#include "norm_checks.h"

namespace accel::cuda {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> forward(
    const Tensor& x_in, const Tensor& weight_in, const Tensor& bias_in, double eps, bool zero_centered) {
  check_norm_inputs("layer_norm", x_in, weight_in);
  check_norm_inputs("layer_norm", x_in, bias_in, "bias");
  const OnDeviceOf device(x_in);
  const Tensor x = x_in.contiguous(), weight = weight_in.contiguous(), bias = bias_in.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  const auto per_row = x.sizes().slice(0, x.dim() - 1);
  Tensor mean = at::empty(per_row, x.options().dtype(at::kFloat)), rstd = at::empty_like(mean);
  check_num_rows("layer_norm", rstd.numel());
  if (x.numel() == 0) return {y, mean.zero_(), rstd.fill_(1.0 / std::sqrt(eps))};
  layer_norm_forward(
      {.x = x.const_data_ptr(),
       .weight = weight.const_data_ptr(),
       .bias = bias.const_data_ptr(),
       .y = y.mutable_data_ptr(),
       .mean = mean.mutable_data_ptr<float>(),
       .rstd = rstd.mutable_data_ptr<float>(),
       .num_rows = rstd.numel(),
       .num_cols = x.size(-1),
       .eps = static_cast<float>(eps),
       .weight_offset = zero_centered ? 1.0f : 0.0f,
       .dtype = dtype_of(x.scalar_type(), "layer_norm"),
       .weight_is_float = weight.scalar_type() == at::kFloat,
       .bias_is_float = bias.scalar_type() == at::kFloat},
      device.queue());
  device.check_launch();
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight_in, const Tensor& mean, const Tensor& rstd,
    bool zero_centered) {
  constexpr const char* op = "layer_norm backward";
  check_norm_inputs(op, x_in, weight_in);
  check_norm_grad(op, dy_in, x_in, rstd);
  check_row_stats(op, "mean", mean, x_in);
  check_num_rows(op, rstd.numel());
  const OnDeviceOf device(x_in);
  const Dtype dtype = dtype_of(x_in.scalar_type(), op);
  const int64_t num_rows = rstd.numel(), num_cols = x_in.size(-1);
  const float weight_offset = zero_centered ? 1.0f : 0.0f;
  const bool in_packs = layer_norm_needs_whole_packs(num_cols, dtype, weight_offset);
  const Tensor dy = contiguous(dy_in, in_packs), x = contiguous(x_in, in_packs);
  const Tensor weight = contiguous(weight_in, in_packs);
  Tensor dx = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return {dx, at::zeros_like(weight), at::zeros_like(weight)};
  const Queue queue = device.queue();
  const int64_t num_programs =
      layer_norm_programs(num_rows, num_cols, dtype, weight_offset, queue.num_processors);
  Tensor partials_2PN = at::empty({2, num_programs, num_cols}, rstd.options());
  Tensor dweight = at::empty({num_cols}, weight.options()), dbias = at::empty({num_cols}, weight.options());
  layer_norm_backward(
      {.dy = dy.const_data_ptr(),
       .x = x.const_data_ptr(),
       .weight = weight.const_data_ptr(),
       .mean = mean.const_data_ptr<float>(),
       .rstd = rstd.const_data_ptr<float>(),
       .dx = dx.mutable_data_ptr(),
       .dweight_PN = partials_2PN.mutable_data_ptr<float>(),
       .dbias_PN = partials_2PN.mutable_data_ptr<float>() + num_programs * num_cols,
       .dweight = dweight.mutable_data_ptr(),
       .dbias = dbias.mutable_data_ptr(),
       .num_rows = num_rows,
       .num_cols = num_cols,
       .weight_offset = weight_offset,
       .dtype = dtype,
       .weight_is_float = weight.scalar_type() == at::kFloat},
      num_programs, queue);
  device.check_launch();
  return {dx, dweight, dbias};
}

}  // namespace

void register_layer_norm(torch::Library& library) {
  library.impl("layer_norm_fwd", &forward);
  library.impl("layer_norm_bwd", &backward);
}

}  // namespace accel::cuda
