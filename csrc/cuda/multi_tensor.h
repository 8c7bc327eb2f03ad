// The norm of many tensors, and many tensors times one number, on CUDA: the launchers. The maths:
// accel/ops/multi_tensor.py.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct SquaredTensor {
  const void* x;
  int64_t num_elements;
};

struct ScaledTensor {
  const void* source;
  void* target;  // may be the source
  int64_t num_elements;
};

// Sums that `l2_norm` needs memory for.
int64_t num_sums_of_squares(const SquaredTensor* tensors, int64_t count);

void l2_norm(
    const SquaredTensor* tensors, int64_t count, Dtype dtype, double* sums, float* norm, Queue queue);

void scale(
    const ScaledTensor* tensors, int64_t count, Dtype source, Dtype target, float factor, Queue queue);

}  // namespace accel::cuda
