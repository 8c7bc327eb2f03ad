// The gradient of accel/ops/rms_norm.py in C++.

#include "node.h"

namespace accel {
namespace {

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, bool);
using Backward =
    std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool);

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static variable_list forward(
      AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps, bool zero_centered) {
    static const auto op = find_op<Forward>("accel::rms_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [y, rstd] = op.call(x, weight, eps, zero_centered);
    ctx->saved_data["zero_centered"] = zero_centered;
    ctx->save_for_backward({x, weight, rstd});
    ctx->mark_non_differentiable({rstd});
    return {y, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("accel::rms_norm_bwd");
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight] =
        op.call(grads[0], saved[0], saved[1], saved[2], ctx->saved_data["zero_centered"].toBool());
    return {dx, dweight, Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> rms_norm_fwd(
    const Tensor& x, const Tensor& weight, double eps, bool zero_centered) {
  const variable_list out = RmsNorm::apply(x, weight, eps, zero_centered);
  return {out[0], out[1]};
}

void implement(torch::Library& m) {
  m.impl("rms_norm_fwd", &rms_norm_fwd);
  // A second derivative is an error that says so, never a zero.
  m.impl("rms_norm_bwd", torch::autograd::autogradNotImplementedFallback());
}

ACCEL_REGISTER_GRADIENTS(implement)

}  // namespace
}  // namespace accel
