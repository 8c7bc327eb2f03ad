// One step of Adam or AdamW over a list of parameters. The maths: accel/ops/adamw.py.
//
// Gradient, moments and master weight are read once and written once; the model's own copy of the
// weight, where there is one, is written in the same pass.

#ifndef ACCEL_ISA  // the first time through this file
#include <cmath>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "accel/dtype.h"
#include "chunks.h"

namespace accel {

// Scalars of one parameter, rounded to fp32 as late as PyTorch rounds them.
struct AdamwScalars {
  float grad_scale;
  float l2;                // weight decay that goes into the gradient, or 0
  float decay;             // what the weight is multiplied by: 1 - lr * weight decay, or 1
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float root_correction2;  // sqrt(1 - beta2^t), or 1
  float eps;
  float step_size;         // lr / (1 - beta1^t), or lr
};

struct AdamwTensors {
  float* weight;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  void* copy;
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/adamw.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// Elements [begin, end). The order of operations is that of torch.optim.Adam.
template <typename Grad, typename Copy, bool kHasCopy>
void adamw_kernel(
    const AdamwTensors& tensors, const AdamwScalars& s, int64_t begin, int64_t end) {
  float* weight = tensors.weight + begin;
  const Grad* grad = static_cast<const Grad*>(tensors.grad) + begin;
  float* exp_avg = tensors.exp_avg + begin;
  float* exp_avg_sq = tensors.exp_avg_sq + begin;
  Copy* copy = static_cast<Copy*>(tensors.copy) + (kHasCopy ? begin : 0);
  const bool from_avg = s.one_minus_beta1 < 0.5f;  // interpolate from the nearer end, as lerp does
  const float to_other = from_avg ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f;

  for_each_vec<2>(end - begin, [&](int64_t i, int, auto span) {
    Vec w = load(weight + i, span);
    Vec g = load(grad + i, span) * s.grad_scale;
    if (s.l2 != 0.0f) g += s.l2 * w;
    const Vec m_old = load(exp_avg + i, span);
    const Vec m = (from_avg ? m_old : g) + to_other * (g - m_old);
    const Vec v = load(exp_avg_sq + i, span) * s.beta2 + s.one_minus_beta2 * g * g;
    const Vec denominator = sqrt(v) / s.root_correction2 + s.eps;
    w = w * s.decay - s.step_size * m / denominator;
    store(exp_avg + i, m, span);
    store(exp_avg_sq + i, v, span);
    store(weight + i, w, span);
    if constexpr (kHasCopy) store(copy + i, w, span);
  });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;
using at::TensorList;

auto* kernel_for(at::ScalarType grad, std::optional<at::ScalarType> copy) {
  return float_kernel(grad, "adamw gradient", [&]<typename Grad> {
    if (!copy) return ACCEL_FOR_THIS_CPU(adamw_kernel<Grad, float, false>);
    return float_kernel(*copy, "adamw copy", []<typename Copy> {
      return ACCEL_FOR_THIS_CPU(adamw_kernel<Grad, Copy, true>);
    });
  });
}

void check_inputs(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
                  TensorList steps, TensorList copies) {
  check_list("adamw", "params", params, params);
  check_list("adamw", "grads", grads, params);
  check_list("adamw", "exp_avgs", exp_avgs, params);
  check_list("adamw", "exp_avg_sqs", exp_avg_sqs, params);
  if (!copies.empty()) check_list("adamw", "copies", copies, params);
  for (TensorList list : {params, exp_avgs, exp_avg_sqs}) {
    ACCEL_CHECK_VALUE(list[0].scalar_type() == at::kFloat,
                      "adamw on CPU takes fp32 params, exp_avgs and exp_avg_sqs, got ",
                      list[0].scalar_type());
  }
  ACCEL_CHECK_VALUE(steps.size() == params.size(), "adamw: needs one of steps for each parameter, ",
                    params.size(), ", got ", steps.size());
  for (const Tensor& step : steps) {
    ACCEL_CHECK_VALUE(
        step.numel() == 1 && step.scalar_type() == at::kFloat && step.device().is_cpu(),
        "adamw: a step must be one fp32 number on the CPU, got ", step.scalar_type(), step.sizes(),
        " on ", step.device());
  }
}

void adamw_cpu(
    TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
    TensorList steps, TensorList copies, const std::optional<Tensor>& grad_scale, double lr,
    double beta1, double beta2, double eps, double weight_decay, bool decoupled,
    bool bias_correction) {
  if (params.empty()) return;
  check_inputs(params, grads, exp_avgs, exp_avg_sqs, steps, copies);
  AdamwScalars same{
      .grad_scale = grad_scale ? grad_scale->item<float>() : 1.0f,
      .l2 = static_cast<float>(decoupled ? 0.0 : weight_decay),
      .decay = static_cast<float>(decoupled ? 1.0 - lr * weight_decay : 1.0),
      .one_minus_beta1 = static_cast<float>(1.0 - beta1),
      .beta2 = static_cast<float>(beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - beta2),
      .root_correction2 = 1.0f,
      .eps = static_cast<float>(eps),
      .step_size = static_cast<float>(lr)};
  std::vector<AdamwTensors> tensors(params.size());
  std::vector<AdamwScalars> scalars(params.size(), same);
  for (size_t i = 0; i < params.size(); ++i) {
    const float step = *steps[i].mutable_data_ptr<float>() += 1.0f;
    if (bias_correction) {
      scalars[i].root_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, step)));
      scalars[i].step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, step)));
    }
    tensors[i] = {
        .weight = params[i].mutable_data_ptr<float>(),
        .grad = grads[i].const_data_ptr(),
        .exp_avg = exp_avgs[i].mutable_data_ptr<float>(),
        .exp_avg_sq = exp_avg_sqs[i].mutable_data_ptr<float>(),
        .copy = copies.empty() ? nullptr : copies[i].mutable_data_ptr()};
  }
  auto* kernel = kernel_for(
      grads[0].scalar_type(),
      copies.empty() ? std::nullopt : std::optional(copies[0].scalar_type()));
  Chunks(params).parallel([&](int64_t i, int64_t begin, int64_t end) {
    kernel(tensors[i], scalars[i], begin * Chunks::kElements,
           std::min(end * Chunks::kElements, params[i].numel()));
  });
  for (TensorList list : {params, exp_avgs, exp_avg_sqs, steps, copies}) bump_versions(list);
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("adamw_", &adamw_cpu);
}

}  // namespace
}  // namespace accel
#endif
