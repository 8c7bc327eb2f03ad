// The gradient of accel/ops/rope.py in C++.

#include "node.h"

namespace accel {
namespace {

using Rope = std::vector<Tensor>(
    at::TensorList, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t, int64_t,
    int64_t, bool, bool, bool);

c10::TypedOperatorHandle<Rope> rope_op() { return find_op<Rope>("accel::rope"); }

struct RopeNode : torch::autograd::Function<RopeNode> {
  static variable_list forward(
      AutogradContext* ctx, at::TensorList xs, const Tensor& cos, const Tensor& sin,
      const std::optional<Tensor>& cu_seqlens, int64_t cp_size, int64_t cp_rank, int64_t rotary_dim,
      bool interleaved_in, bool interleaved_out, bool inverse) {
    static const auto op = rope_op();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({cos, sin, cu_seqlens.value_or(Tensor())});
    ctx->saved_data["cp"] = std::vector<int64_t>{cp_size, cp_rank};
    ctx->saved_data["rotary_dim"] = rotary_dim;
    ctx->saved_data["layout"] = std::vector<bool>{interleaved_in, interleaved_out, inverse};
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(xs, cos, sin, cu_seqlens, cp_size, cp_rank, rotary_dim, interleaved_in,
                   interleaved_out, inverse);
  }

  // Undefined where a gradient is not wanted, or none came in.
  static variable_list backward(AutogradContext* ctx, const variable_list& dys) {
    static const auto op = rope_op();
    constexpr size_t kOtherArguments = 9;
    const variable_list saved = ctx->get_saved_variables();
    const auto cp = ctx->saved_data["cp"].toIntVector();
    const auto layout = ctx->saved_data["layout"].toBoolList();
    variable_list grads(dys.size() + kOtherArguments), wanted;
    std::vector<size_t> positions;
    for (size_t i = 0; i < dys.size(); ++i) {
      if (!dys[i].defined() || !ctx->needs_input_grad(i)) continue;
      wanted.push_back(dys[i]);
      positions.push_back(i);
    }
    if (wanted.empty()) return grads;
    const std::vector<Tensor> dxs = op.call(
        wanted, saved[0], saved[1],
        saved[2].defined() ? std::optional<Tensor>(saved[2]) : std::nullopt, cp[0], cp[1],
        ctx->saved_data["rotary_dim"].toInt(), layout[1], layout[0], !layout[2]);
    for (size_t i = 0; i < dxs.size(); ++i) grads[positions[i]] = dxs[i];
    return grads;
  }
};

std::vector<Tensor> rope(
    at::TensorList xs, const Tensor& cos, const Tensor& sin,
    const std::optional<Tensor>& cu_seqlens, int64_t cp_size, int64_t cp_rank, int64_t rotary_dim,
    bool interleaved_in, bool interleaved_out, bool inverse) {
  return RopeNode::apply(xs, cos, sin, cu_seqlens, cp_size, cp_rank, rotary_dim, interleaved_in,
                         interleaved_out, inverse);
}

void implement(torch::Library& m) { m.impl("rope", &rope); }

ACCEL_REGISTER_GRADIENTS(implement)

}  // namespace
}  // namespace accel
