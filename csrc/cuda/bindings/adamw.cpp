#include "adamw.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>

#include "accel/cuda/op.h"

namespace accel::cuda {
namespace {

using at::Tensor;
using at::TensorList;
using Dtypes = std::vector<at::ScalarType>;

const Dtypes kFloat32{at::kFloat}, kFloats{at::kFloat, at::kBFloat16, at::kHalf};

// The kernel sees memory, not shapes: what lies beside a parameter must lie as it does.
void check_list(const char* name, TensorList tensors, TensorList params, const Dtypes& dtypes) {
  const auto same_shape = [](const Tensor& t, const Tensor& p) { return t.sizes() == p.sizes(); };
  ACCEL_CHECK_VALUE(std::equal(tensors.begin(), tensors.end(), params.begin(), params.end(), same_shape),
                    "adamw: ", name, " must have the shapes of params, one for each");
  const at::Device device = params[0].device();
  Dtypes found;
  for (const Tensor& t : tensors) {
    ACCEL_CHECK_VALUE(t.is_contiguous() && t.device() == device, "adamw: ", name,
                      " must be contiguous and on ", device);
    if (std::ranges::count(found, t.scalar_type()) == 0) found.push_back(t.scalar_type());
  }
  ACCEL_CHECK_VALUE(found.size() == 1 && std::ranges::count(dtypes, found[0]), "adamw: ", name,
                    " must be of one of ", dtypes, ", got ", found);
}

void check_steps(TensorList steps, TensorList params) {
  const at::Device device = params[0].device();
  const bool fit = steps.size() == params.size() && std::ranges::all_of(steps, [&](const Tensor& t) {
    return t.numel() == 1 && t.scalar_type() == at::kFloat && (t.is_cpu() || t.device() == device);
  });
  ACCEL_CHECK_VALUE(fit, "adamw: a step must be one fp32 number on the CPU or on ", device,
                    ", one for each of ", params.size(), " params");
}

// Whether the steps are beside the parameters; else all of them are on the CPU.
bool are_on_device(TensorList steps, TensorList params, const OnDeviceOf& device) {
  const auto num_there = std::ranges::count_if(
      steps, [&](const Tensor& t) { return t.device() == params[0].device(); });
  if (num_there == static_cast<int64_t>(steps.size())) return true;
  ACCEL_CHECK_VALUE(!device.is_capturing(),
                    "adamw: steps on the CPU are not counted by the replays of a CUDA graph: keep them on ",
                    params[0].device());
  ACCEL_CHECK_VALUE(num_there == 0,
                    "adamw: steps must be on one device, some are on the CPU and some are not");
  return false;
}

Beside beside_of(TensorList copies, TensorList remainders) {
  if (!remainders.empty()) return Beside::remainder;
  if (copies.empty()) return Beside::nothing;
  switch (dtype_of(copies[0].scalar_type(), "adamw")) {
    case Dtype::bfloat16: return Beside::bfloat16;
    case Dtype::float16: return Beside::float16;
    default: return Beside::float32;
  }
}

void step(
    TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList steps,
    TensorList copies, TensorList remainders, const std::optional<Tensor>& grad_scale, double lr,
    double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool bias_correction) {
  if (params.empty()) return;
  ACCEL_CHECK_VALUE(copies.empty() || remainders.empty(), "adamw: params with remainders take no copies");
  check_list("params", params, params, remainders.empty() ? kFloat32 : Dtypes{at::kBFloat16});
  check_list("grads", grads, params, kFloats);
  check_list("exp_avgs", exp_avgs, params, kFloat32);
  check_list("exp_avg_sqs", exp_avg_sqs, params, kFloat32);
  if (!copies.empty()) check_list("copies", copies, params, kFloats);
  if (!remainders.empty()) check_list("remainders", remainders, params, {at::kShort});
  check_steps(steps, params);
  const OnDeviceOf device(params[0]);
  Adamw op{
      .scale_on_device = nullptr,
      .scale = 1.0f,
      .l2 = static_cast<float>(decoupled ? 0.0 : weight_decay),
      .decay = static_cast<float>(decoupled ? 1.0 - lr * weight_decay : 1.0),
      .one_minus_beta1 = static_cast<float>(1.0 - beta1),
      .beta2 = static_cast<float>(beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - beta2),
      .eps = static_cast<float>(eps),
      .grad_dtype = dtype_of(grads[0].scalar_type(), "adamw"),
      .beside = beside_of(copies, remainders)};
  Tensor scale;
  if (grad_scale) {
    ACCEL_CHECK_VALUE(grad_scale->numel() == 1, "adamw: grad_scale must be one number, got ",
                      grad_scale->sizes());
    if (grad_scale->device() == params[0].device()) {
      scale = grad_scale->to(at::kFloat);
      op.scale_on_device = scale.const_data_ptr<float>();
    } else {
      ACCEL_CHECK_VALUE(!device.is_capturing(), "adamw: a CUDA graph needs grad_scale on ",
                        params[0].device());
      op.scale = grad_scale->item<float>();
    }
  }
  const Queue queue = device.queue();
  const AdamwBias bias{lr, beta1, beta2, bias_correction};
  std::vector<float*> counters;
  for (const Tensor& t : steps) counters.push_back(t.mutable_data_ptr<float>());
  const auto count = static_cast<int64_t>(params.size());
  Tensor corrections_P2;
  AdamwCorrection* corrections = nullptr;
  if (are_on_device(steps, params, device)) {
    corrections_P2 = at::empty({count, 2}, exp_avgs[0].options());
    corrections = reinterpret_cast<AdamwCorrection*>(corrections_P2.mutable_data_ptr<float>());
    adamw_advance(counters.data(), count, bias, corrections, queue);
  }
  std::vector<AdamwTensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back(
        {.weight = params[i].mutable_data_ptr(),
         .grad = grads[i].const_data_ptr(),
         .exp_avg = exp_avgs[i].mutable_data_ptr<float>(),
         .exp_avg_sq = exp_avg_sqs[i].mutable_data_ptr<float>(),
         .beside = op.beside == Beside::nothing ? nullptr
             : (remainders.empty() ? copies : remainders)[i].mutable_data_ptr(),
         .num_elements = params[i].numel(),
         .correction = corrections ? AdamwCorrection{} : adamw_advance(counters[i], bias),
         .correction_on_device = corrections ? corrections + i : nullptr});
  }
  adamw(tensors.data(), count, op, queue);
  device.check_launch();
  for (TensorList changed : {params, exp_avgs, exp_avg_sqs, steps, copies, remainders}) {
    for (const Tensor& t : changed) t.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void register_adamw(torch::Library& library) { library.impl("adamw_", &step); }

}  // namespace accel::cuda
