// The gradient of accel/ops/layer_norm.py in C++.

#include "node.h"

namespace accel {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, double, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool);

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static variable_list forward(
      AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
      bool zero_centered) {
    static const auto op = find_op<Forward>("accel::layer_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [y, mean, rstd] = op.call(x, weight, bias, eps, zero_centered);
    ctx->saved_data["zero_centered"] = zero_centered;
    ctx->save_for_backward({x, weight, mean, rstd});
    ctx->mark_non_differentiable({mean, rstd});
    return {y, mean, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("accel::layer_norm_bwd");
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight, dbias] = op.call(
        grads[0], saved[0], saved[1], saved[2], saved[3],
        ctx->saved_data["zero_centered"].toBool());
    return {dx, dweight, dbias, Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(
    const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, bool zero_centered) {
  const variable_list out = LayerNorm::apply(x, weight, bias, eps, zero_centered);
  return {out[0], out[1], out[2]};
}

void implement(torch::Library& m) {
  m.impl("layer_norm_fwd", &layer_norm_fwd);
  // A second derivative is an error that says so, never a zero.
  m.impl("layer_norm_bwd", torch::autograd::autogradNotImplementedFallback());
}

ACCEL_REGISTER_GRADIENTS(implement)

}  // namespace
}  // namespace accel
