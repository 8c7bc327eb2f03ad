// The gradient of accel/ops/add_rms_norm.py in C++.

#include <ATen/ExpandUtils.h>

#include "node.h"

namespace accel {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const std::optional<Tensor>&, const Tensor&, double, bool);
using Backward = std::tuple<Tensor, Tensor>(
    const Tensor&, const std::optional<Tensor>&, const Tensor&, const Tensor&, const Tensor&, bool);

struct AddRmsNorm : torch::autograd::Function<AddRmsNorm> {
  static variable_list forward(
      AutogradContext* ctx, const Tensor& x, const Tensor& residual,
      const std::optional<Tensor>& bias, const Tensor& weight, double eps, bool zero_centered) {
    static const auto op = find_op<Forward>("accel::add_rms_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [y, total, rstd] = op.call(x, residual, bias, weight, eps, zero_centered);
    ctx->set_materialize_grads(false);
    ctx->saved_data["zero_centered"] = zero_centered;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->save_for_backward({total, weight, rstd});
    ctx->mark_non_differentiable({rstd});
    return {y, total, rstd};
  }

  // dy is undefined where only total went on, dtotal where only the norm did.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("accel::add_rms_norm_bwd");
    const variable_list saved = ctx->get_saved_variables();
    Tensor dx = grads[1], dweight;
    if (grads[0].defined()) {
      const auto dtotal = grads[1].defined() ? std::optional<Tensor>(grads[1]) : std::nullopt;
      std::tie(dx, dweight) = op.call(grads[0], dtotal, saved[0], saved[1], saved[2],
                                      ctx->saved_data["zero_centered"].toBool());
    }
    Tensor dbias;
    if (dx.defined() && ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      dbias = at::sum_to(dx, at::IntArrayRef{saved[1].size(0)});
    }
    return {dx, dx, dbias, dweight, Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(
    const Tensor& x, const Tensor& residual, const std::optional<Tensor>& bias,
    const Tensor& weight, double eps, bool zero_centered) {
  const variable_list out = AddRmsNorm::apply(x, residual, bias, weight, eps, zero_centered);
  return {out[0], out[1], out[2]};
}

void implement(torch::Library& m) {
  m.impl("add_rms_norm_fwd", &add_rms_norm_fwd);
  // A second derivative is an error that says so, never a zero.
  m.impl("add_rms_norm_bwd", torch::autograd::autogradNotImplementedFallback());
}

ACCEL_REGISTER_GRADIENTS(implement)

}  // namespace
}  // namespace accel
