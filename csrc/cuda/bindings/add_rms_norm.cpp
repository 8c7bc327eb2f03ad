#include <cmath>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "accel/cuda/op.h"
#include "norm_checks.h"
#include "rms_norm.h"

namespace accel::cuda {
namespace {

using at::Tensor;
using std::optional;

void check_addend(const char* name, const Tensor& addend, const Tensor& x, at::IntArrayRef sizes) {
  ACCEL_CHECK_VALUE(addend.sizes() == sizes && addend.scalar_type() == x.scalar_type() &&
                        addend.device() == x.device(),
                    "add_rms_norm: ", name, " must be ", x.scalar_type(), sizes, " on ", x.device(),
                    " to go with x ", x.sizes(), ", got ", addend.scalar_type(), addend.sizes(), " on ",
                    addend.device());
}

Tensor dense(const optional<Tensor>& t) { return t ? t->contiguous() : Tensor(); }

const void* data_or_null(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

std::tuple<Tensor, Tensor, Tensor> forward(
    const Tensor& x_in, const Tensor& residual_in, const optional<Tensor>& bias_in,
    const Tensor& weight_in, double eps, bool zero_centered) {
  check_norm_inputs("add_rms_norm", x_in, weight_in);
  check_addend("residual", residual_in, x_in, x_in.sizes());
  const int64_t num_cols = x_in.size(-1);
  if (bias_in) check_addend("bias", *bias_in, x_in, {num_cols});
  const OnDeviceOf device(x_in);
  const Tensor x = x_in.contiguous(), residual = residual_in.contiguous(), bias = dense(bias_in);
  const Tensor weight = weight_in.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor total = at::empty(x.sizes(), x.options());
  Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  check_num_rows("add_rms_norm", rstd.numel());
  if (x.numel() == 0) return {y, total, rstd.fill_(1.0 / std::sqrt(eps))};
  add_rms_norm_forward(
      {.x = x.const_data_ptr(),
       .residual = residual.const_data_ptr(),
       .bias = data_or_null(bias),
       .weight = weight.const_data_ptr(),
       .y = y.mutable_data_ptr(),
       .total = total.mutable_data_ptr(),
       .rstd = rstd.mutable_data_ptr<float>(),
       .num_rows = rstd.numel(),
       .num_cols = num_cols,
       .eps = static_cast<float>(eps),
       .weight_offset = zero_centered ? 1.0f : 0.0f,
       .dtype = dtype_of(x.scalar_type(), "add_rms_norm"),
       .weight_is_float = weight.scalar_type() == at::kFloat},
      device.queue());
  device.check_launch();
  return {y, total, rstd};
}

std::tuple<Tensor, Tensor> backward(
    const Tensor& dy_in, const optional<Tensor>& dtotal_in, const Tensor& total_in,
    const Tensor& weight_in, const Tensor& rstd, bool zero_centered) {
  check_norm_inputs("add_rms_norm backward", total_in, weight_in);
  check_norm_grad("add_rms_norm backward", dy_in, total_in, rstd);
  if (dtotal_in) check_addend("dtotal", *dtotal_in, total_in, total_in.sizes());
  check_num_rows("add_rms_norm backward", rstd.numel());
  const OnDeviceOf device(total_in);
  const Dtype dtype = dtype_of(total_in.scalar_type(), "add_rms_norm backward");
  const int64_t num_rows = rstd.numel(), num_cols = total_in.size(-1);
  const float weight_offset = zero_centered ? 1.0f : 0.0f;
  const bool in_packs = rms_norm_needs_whole_packs(num_cols, dtype, weight_offset);
  const Tensor dy = contiguous(dy_in, in_packs), total = contiguous(total_in, in_packs);
  const Tensor dtotal = dtotal_in ? contiguous(*dtotal_in, in_packs) : Tensor();
  const Tensor weight = contiguous(weight_in, in_packs);
  Tensor dx = at::empty(total.sizes(), total.options());
  if (total.numel() == 0) return {dx, at::zeros_like(weight)};
  const Queue queue = device.queue();
  const int64_t num_programs =
      rms_norm_programs(num_rows, num_cols, dtype, weight_offset, queue.num_processors);
  Tensor dweight_PN = at::empty({num_programs, num_cols}, rstd.options());
  Tensor dweight = at::empty({num_cols}, weight.options());
  add_rms_norm_backward(
      {.dy = dy.const_data_ptr(),
       .dtotal = data_or_null(dtotal),
       .x = total.const_data_ptr(),
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

void register_add_rms_norm(torch::Library& library) {
  library.impl("add_rms_norm_fwd", &forward);
  library.impl("add_rms_norm_bwd", &backward);
}

}  // namespace accel::cuda
