// One step of Adam or AdamW on CUDA: the launchers. The maths: accel/ops/adamw.py and accel/ops/remainder.py.
// P parameters.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

// What lies beside each weight: a copy of it in a dtype, or the remainder that it lacks of fp32.
enum class Beside : int { nothing, float32, bfloat16, float16, remainder };

// What depends on the number of steps that a parameter has seen.
struct AdamwCorrection {
  float step_size;         // lr / (1 - beta1^t), or lr
  float root_correction2;  // sqrt(1 - beta2^t), or 1
};

struct AdamwBias {
  double lr, beta1, beta2;
  bool is_corrected;
};

struct AdamwTensor {
  void* weight;  // bfloat16 beside a remainder, else fp32
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  void* beside;
  int64_t num_elements;
  AdamwCorrection correction;
  const AdamwCorrection* correction_on_device;  // null, or what to take in place of `correction`
};

struct Adamw {
  const float* scale_on_device;  // null, or what to take in place of `scale`
  float scale;                   // of the gradients
  float l2;                      // weight decay that goes into the gradient, or 0
  float decay;                   // what the weight is multiplied by: 1 - lr * weight decay, or 1
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  Dtype grad_dtype;
  Beside beside;
};

// Adds 1 to a step on the host.
AdamwCorrection adamw_advance(float* step, const AdamwBias& bias);

// Adds 1 to each of P steps on the device, and as often to one that is there several times.
void adamw_advance(
    float* const* steps, int64_t count, const AdamwBias& bias, AdamwCorrection* corrections_P, Queue queue);

void adamw(const AdamwTensor* tensors, int64_t count, const Adamw& args, Queue queue);

}  // namespace accel::cuda
