// One step of Adam or AdamW over a list of parameters. The maths: accel/ops/adamw.py.
//
// Gradient, moments and master weight are read once and written once; the model's own copy of the
// weight, where there is one, is written in the same pass. Or the weight is bfloat16, and a remainder
// holds the rest of the master (accel/ops/remainder.py).

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
  void* weight;
  int16_t* remainder;
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

// 16-bit words as they are.
template <typename T>
ACCEL_INLINE VecU16 load_words(const T* p, Full) {
  static_assert(sizeof(T) == 2);
  return load_bits<VecU16>(p);
}

template <typename T>
ACCEL_INLINE VecU16 load_words(const T* p, Tail tail) {
  VecU16 words = {};
  std::memcpy(&words, p, tail.lanes * sizeof(T));
  return words;
}

template <typename T>
ACCEL_INLINE void store_words(T* p, VecU16 words, Full) {
  static_assert(sizeof(T) == 2);
  std::memcpy(static_cast<void*>(p), &words, sizeof(words));
}

template <typename T>
ACCEL_INLINE void store_words(T* p, VecU16 words, Tail tail) {
  std::memcpy(static_cast<void*>(p), &words, tail.lanes * sizeof(T));
}

// The fp32 number that a bfloat16 and its remainder tell. No number rounds to a zero that is further from
// zero: a remainder below 0 is that of what the weight was before somebody else set it to zero.
ACCEL_INLINE Vec join(VecU16 weight, VecU16 remainder) {
  const VecI32 upper = (VecI32)(widen(weight) << 16);
  const VecI32 distance = (VecI32)(widen(remainder) << 16) >> 16;
  const VecI32 is_stale = ((upper << 1) == 0) & (distance < 0);
  return bit_cast<Vec>(upper + (distance & ~is_stale));
}

template <typename Span>
ACCEL_INLINE Vec load_joined(const BFloat16* weight, const int16_t* remainder, Span span) {
  return join(load_words(weight, span), load_words(remainder, span));
}

// The largest distance is one too many for 16 bits: that of a tie rounded towards zero.
template <typename Span>
ACCEL_INLINE void store_split(BFloat16* weight, int16_t* remainder, Vec master, Span span) {
  const VecU32 upper = round_to_bfloat16(master) & 0xffff0000u;
  const VecU32 distance = bit_cast<VecU32>(master) - upper;
  const VecU32 kept = distance == 0x8000u ? distance - 1u : distance;
  store_words(weight, narrow(upper >> 16), span);
  store_words(remainder, narrow(kept & 0xffffu), span);
}

// Elements [begin, end). The order of operations is that of torch.optim.Adam.
template <typename Grad, typename Copy, bool kHasCopy, typename Weight = float>
void adamw_kernel(
    const AdamwTensors& tensors, const AdamwScalars& s, int64_t begin, int64_t end) {
  constexpr bool kHasRemainder = std::is_same_v<Weight, BFloat16>;
  Weight* weight = static_cast<Weight*>(tensors.weight) + begin;
  int16_t* remainder = tensors.remainder + (kHasRemainder ? begin : 0);
  const Grad* grad = static_cast<const Grad*>(tensors.grad) + begin;
  float* exp_avg = tensors.exp_avg + begin;
  float* exp_avg_sq = tensors.exp_avg_sq + begin;
  Copy* copy = static_cast<Copy*>(tensors.copy) + (kHasCopy ? begin : 0);
  const bool from_avg = s.one_minus_beta1 < 0.5f;  // interpolate from the nearer end, as lerp does
  const float to_other = from_avg ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f;

  for_each_vec<2>(end - begin, [&](int64_t i, int, auto span) {
    Vec w;
    if constexpr (kHasRemainder) {
      w = load_joined(weight + i, remainder + i, span);
    } else {
      w = load(weight + i, span);
    }
    Vec g = load(grad + i, span) * s.grad_scale;
    if (s.l2 != 0.0f) g += s.l2 * w;
    const Vec m_old = load(exp_avg + i, span);
    const Vec m = (from_avg ? m_old : g) + to_other * (g - m_old);
    const Vec v = load(exp_avg_sq + i, span) * s.beta2 + s.one_minus_beta2 * g * g;
    const Vec denominator = sqrt(v) / s.root_correction2 + s.eps;
    w = w * s.decay - s.step_size * m / denominator;
    store(exp_avg + i, m, span);
    store(exp_avg_sq + i, v, span);
    if constexpr (kHasRemainder) {
      store_split(weight + i, remainder + i, w, span);
    } else {
      store(weight + i, w, span);
    }
    if constexpr (kHasCopy) store(copy + i, w, span);
  });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;
using at::TensorList;

auto* kernel_for(at::ScalarType grad, std::optional<at::ScalarType> copy, bool has_remainder) {
  return float_kernel(grad, "adamw gradient", [&]<typename Grad> {
    if (has_remainder) {
      return ACCEL_FOR_THIS_CPU(adamw_kernel<Grad, float, false, at::BFloat16>);
    }
    if (!copy) return ACCEL_FOR_THIS_CPU(adamw_kernel<Grad, float, false>);
    return float_kernel(*copy, "adamw copy", []<typename Copy> {
      return ACCEL_FOR_THIS_CPU(adamw_kernel<Grad, Copy, true>);
    });
  });
}

void check_inputs(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
                  TensorList steps, TensorList copies, TensorList remainders) {
  check_list("adamw", "params", params, params);
  check_list("adamw", "grads", grads, params);
  check_list("adamw", "exp_avgs", exp_avgs, params);
  check_list("adamw", "exp_avg_sqs", exp_avg_sqs, params);
  if (!copies.empty()) check_list("adamw", "copies", copies, params);
  if (!remainders.empty()) {
    check_list("adamw", "remainders", remainders, params);
    ACCEL_CHECK_VALUE(copies.empty() && params[0].scalar_type() == at::kBFloat16 &&
                          remainders[0].scalar_type() == at::kShort,
                      "adamw on CPU takes int16 remainders of bfloat16 params, without copies; got ",
                      remainders[0].scalar_type(), " of ", params[0].scalar_type());
  }
  for (TensorList list : {remainders.empty() ? params : exp_avgs, exp_avgs, exp_avg_sqs}) {
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
    TensorList steps, TensorList copies, TensorList remainders,
    const std::optional<Tensor>& grad_scale, double lr, double beta1, double beta2, double eps,
    double weight_decay, bool decoupled, bool bias_correction) {
  if (params.empty()) return;
  check_inputs(params, grads, exp_avgs, exp_avg_sqs, steps, copies, remainders);
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
        .weight = params[i].mutable_data_ptr(),
        .remainder = remainders.empty() ? nullptr : remainders[i].mutable_data_ptr<int16_t>(),
        .grad = grads[i].const_data_ptr(),
        .exp_avg = exp_avgs[i].mutable_data_ptr<float>(),
        .exp_avg_sq = exp_avg_sqs[i].mutable_data_ptr<float>(),
        .copy = copies.empty() ? nullptr : copies[i].mutable_data_ptr()};
  }
  auto* kernel = kernel_for(
      grads[0].scalar_type(),
      copies.empty() ? std::nullopt : std::optional(copies[0].scalar_type()), !remainders.empty());
  Chunks(params).parallel([&](int64_t i, int64_t begin, int64_t end) {
    kernel(tensors[i], scalars[i], begin * Chunks::kElements,
           std::min(end * Chunks::kElements, params[i].numel()));
  });
  for (TensorList list : {params, exp_avgs, exp_avg_sqs, steps, copies, remainders}) {
    bump_versions(list);
  }
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("adamw_", &adamw_cpu);
}

}  // namespace
}  // namespace accel
#endif
