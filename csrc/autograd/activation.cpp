// The gradient of accel/ops/activation.py in C++.

#include "accel/check.h"
#include "node.h"

namespace accel {
namespace {

using std::optional;
using MaybeTensor = const optional<Tensor>&;
using Forward = Tensor(
    const Tensor&, MaybeTensor, MaybeTensor, c10::string_view, optional<double>, double, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, MaybeTensor, MaybeTensor, c10::string_view, optional<double>,
    double);
using BackwardInplace = std::tuple<Tensor, Tensor>(
    const Tensor&, const Tensor&, MaybeTensor, MaybeTensor, c10::string_view, optional<double>,
    double);

optional<Tensor> maybe(const Tensor& t) { return t.defined() ? optional(t) : std::nullopt; }

struct Activation : torch::autograd::Function<Activation> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, MaybeTensor bias, MaybeTensor probs,
      const std::string& kind, optional<double> clamp_value, double offset, bool inplace_grad) {
    static const auto op = find_op<Forward>("accel::activation_fwd");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->saved_data["kind"] = kind;
    ctx->saved_data["clamp_value"] = clamp_value;
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["overwrites"] = inplace_grad && x.requires_grad() && x.is_contiguous();
    ctx->saved_data["spent"] = false;
    ctx->save_for_backward({x, bias.value_or(Tensor()), probs.value_or(Tensor())});
    return op.call(x, bias, probs, kind, clamp_value, offset, inplace_grad);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("accel::activation_bwd");
    static const auto inplace_op = find_op<BackwardInplace>("accel::activation_bwd_inplace");
    const std::string kind = ctx->saved_data["kind"].toStringRef();
    const auto clamp_value = ctx->saved_data["clamp_value"].toOptional<double>();
    const double offset = ctx->saved_data["offset"].toDouble();
    const bool overwrites = ctx->saved_data["overwrites"].toBool();
    ACCEL_CHECK(!ctx->saved_data["spent"].toBool(), kind,
                ": a second backward needs the input that inplace_grad=True has overwritten");
    ACCEL_CHECK(!overwrites || !at::GradMode::is_enabled(), kind,
                ": inplace_grad=True cannot be combined with create_graph=True");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& x = saved[0];
    const auto bias = maybe(saved[1]), probs = maybe(saved[2]);
    Tensor dx, dbias, dprobs;
    if (overwrites) {
      ctx->saved_data["spent"] = true;
      std::tie(dbias, dprobs) =
          inplace_op.call(grads[0], x, bias, probs, kind, clamp_value, offset);
      x.unsafeGetTensorImpl()->bump_version();  // whoever else saved x must hear of it
      dx = x.detach();
    } else {
      std::tie(dx, dbias, dprobs) = op.call(grads[0], x, bias, probs, kind, clamp_value, offset);
    }
    return {dx, bias ? dbias : Tensor(), probs ? dprobs : Tensor(), Tensor(), Tensor(), Tensor(),
            Tensor()};
  }
};

Tensor activation_fwd(
    const Tensor& x, MaybeTensor bias, MaybeTensor probs, c10::string_view kind,
    optional<double> clamp_value, double offset, bool inplace_grad) {
  return Activation::apply(
      x, bias, probs, std::string(kind), clamp_value, offset, inplace_grad);
}

void implement(torch::Library& m) {
  m.impl("activation_fwd", &activation_fwd);
  // A second derivative is an error that says so, never a zero.
  m.impl("activation_bwd", torch::autograd::autogradNotImplementedFallback());
}

ACCEL_REGISTER_GRADIENTS(implement)

}  // namespace
}  // namespace accel
