// [P, N] fp32 -> [N] of a dtype: the sum over P, in an order that P alone fixes.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct Partials {
  const float* partials_PN;
  void* sum;
  int64_t num_partials, num_cols;
  bool is_float;  // sum is fp32, else of the dtype that goes with the call
  // Others to be summed likewise, or null.
  const float* more_partials_PN = nullptr;
  void* more_sum = nullptr;
};

void sum_partials(const Partials& args, Dtype dtype, Queue queue);

}  // namespace accel::cuda
