#include "activation.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "accel/clamp.h"
#include "accel/cuda/op.h"

namespace accel::cuda {
namespace {

using at::Tensor;
using std::optional;

Kind kind_named(std::string_view name) {
  if (name == "swiglu") return Kind::swiglu;
  if (name == "geglu") return Kind::geglu;
  if (name == "quick_geglu") return Kind::quick_geglu;
  if (name == "gelu") return Kind::gelu;
  ACCEL_CHECK_VALUE(name == "squared_relu", "activation: unknown kind '", std::string(name), "'");
  return Kind::squared_relu;
}

// The inputs of a call, checked and contiguous.
struct Call {
  Tensor x, bias, probs;  // the last two may be undefined
  Activation in;

  Call(const Tensor& x_in, const optional<Tensor>& bias_in, const optional<Tensor>& probs_in,
       std::string_view name, optional<double> clamp_value, double offset) {
    in.kind = kind_named(name);
    const int64_t halves = is_gated(in.kind) ? 2 : 1;
    ACCEL_CHECK_VALUE(x_in.dim() >= 1 && x_in.size(-1) % halves == 0, name, ": x must have shape [..., ",
                      halves == 2 ? "2F" : "F", "], got ", x_in.sizes());
    in.dtype = dtype_of(x_in.scalar_type(), "activation");
    in.num_cols = x_in.size(-1) / halves;
    in.num_rows = c10::multiply_integers(x_in.sizes().slice(0, x_in.dim() - 1));
    in.limit = static_cast<float>(clamp_value.value_or(std::numeric_limits<double>::infinity()));
    in.offset = static_cast<float>(offset);
    ACCEL_CHECK_VALUE(!(in.limit < 0), name, ": clamp_value must not be negative, got ", in.limit);
    x = x_in.contiguous();
    if (bias_in) {
      ACCEL_CHECK_VALUE(bias_in->dim() == 1 && bias_in->size(0) == x.size(-1) &&
                            bias_in->scalar_type() == x.scalar_type() && bias_in->device() == x.device(),
                        name, ": bias must be ", x.scalar_type(), "[", x.size(-1), "] on ", x.device(),
                        ", got ", bias_in->scalar_type(), bias_in->sizes(), " on ", bias_in->device());
      bias = bias_in->contiguous();
    }
    if (probs_in) {
      ACCEL_CHECK_VALUE(probs_in->numel() == in.num_rows && probs_in->device() == x.device() &&
                            (probs_in->scalar_type() == x.scalar_type() ||
                             probs_in->scalar_type() == at::kFloat),
                        name, ": probs must have ", in.num_rows, " elements of ", x.scalar_type(),
                        " or float32 on ", x.device(), ", got ", probs_in->scalar_type(),
                        probs_in->sizes(), " on ", probs_in->device());
      probs = probs_in->contiguous();
    }
    in.x = x.const_data_ptr();
    in.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
    in.probs = probs.defined() ? probs.const_data_ptr() : nullptr;
    in.probs_is_float = probs.defined() && probs.scalar_type() == at::kFloat;
  }
};

Tensor forward(
    const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& probs, c10::string_view kind,
    optional<double> clamp_value, double offset, bool) {
  const OnDeviceOf device(x);
  const Call call(x, bias, probs, kind, clamp_value, offset);
  auto sizes = x.sizes().vec();
  sizes.back() = call.in.num_cols;
  Tensor y = at::empty(sizes, x.options().memory_format(at::MemoryFormat::Contiguous));
  if (y.numel() == 0) return y;
  activation_forward({call.in, y.mutable_data_ptr()}, device.queue());
  device.check_launch();
  return y;
}

// Writes dx, which may be the memory of call.x; returns dbias and dprobs, empty where there is none.
std::tuple<Tensor, Tensor> backward_into(
    const Tensor& dx, const Tensor& dy_in, const Call& call, const optional<Tensor>& probs,
    const OnDeviceOf& device) {
  const Activation& in = call.in;
  const Tensor& x = call.x;
  ACCEL_CHECK_VALUE(dy_in.numel() == in.num_rows * in.num_cols &&
                        dy_in.scalar_type() == x.scalar_type() && dy_in.device() == x.device(),
                    "activation backward: dy must be like y, ", x.scalar_type(), "[", in.num_rows, ", ",
                    in.num_cols, "] on ", x.device(), ", got ", dy_in.scalar_type(), dy_in.sizes(), " on ",
                    dy_in.device());
  if (x.numel() == 0) {
    return {call.bias.defined() ? at::zeros_like(call.bias) : at::empty({0}, x.options()),
            probs ? at::zeros_like(*probs, at::MemoryFormat::Contiguous) : at::empty({0}, x.options())};
  }
  const Tensor dy = dy_in.contiguous();
  const Queue queue = device.queue();
  const ActivationGrid grid = activation_grid(in, queue.num_processors);
  const auto fp32 = x.options().dtype(at::kFloat);
  Tensor dbias_PN, dprobs_tiles;
  Tensor dbias = at::empty({call.bias.defined() ? x.size(-1) : 0}, x.options());
  Tensor dprobs = probs ? at::empty(probs->sizes(), call.probs.options()) : at::empty({0}, x.options());
  if (call.bias.defined()) dbias_PN = at::empty({grid.num_partials, x.size(-1)}, fp32);
  if (probs) {
    // One tile is all of a row: no sum is left to be done.
    const bool one = grid.num_tiles == 1 && in.probs_is_float;
    dprobs_tiles = one ? dprobs : at::empty({grid.num_tiles, in.num_rows}, fp32);
  }
  activation_backward(
      {.in = in,
       .dy = dy.const_data_ptr(),
       .dx = dx.mutable_data_ptr(),
       .dbias_PN = dbias_PN.defined() ? dbias_PN.mutable_data_ptr<float>() : nullptr,
       .dbias = dbias.mutable_data_ptr(),
       .dprobs_tiles = dprobs_tiles.defined() ? dprobs_tiles.mutable_data_ptr<float>() : nullptr,
       .dprobs = dprobs.mutable_data_ptr(),
       .gradient_limit = gradient_limit(in.limit)},
      queue);
  device.check_launch();
  return {dbias, dprobs};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& probs,
    c10::string_view kind, optional<double> clamp_value, double offset) {
  const OnDeviceOf device(x);
  const Call call(x, bias, probs, kind, clamp_value, offset);
  Tensor dx = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  auto [dbias, dprobs] = backward_into(dx, dy, call, probs, device);
  return {dx, dbias, dprobs};
}

std::tuple<Tensor, Tensor> backward_inplace(
    const Tensor& dy, const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& probs,
    c10::string_view kind, optional<double> clamp_value, double offset) {
  ACCEL_CHECK_VALUE(x.is_contiguous(), "activation backward: x must be contiguous to be overwritten");
  const OnDeviceOf device(x);
  return backward_into(x, dy, Call(x, bias, probs, kind, clamp_value, offset), probs, device);
}

}  // namespace

void register_activation(torch::Library& library) {
  library.impl("activation_fwd", &forward);
  library.impl("activation_bwd", &backward);
  library.impl("activation_bwd_inplace", &backward_inplace);
}

}  // namespace accel::cuda
