// From a run-time dtype to a template:
//   float_kernel(dtype, "rms_norm", []<typename T> { return &kernel<T>; })
#pragma once

#include <ATen/core/Tensor.h>

#include "accel/check.h"

namespace accel {

template <typename F>
auto float_kernel(at::ScalarType dtype, const char* op, F&& kernel_for) {
  switch (dtype) {
    case at::kFloat: return kernel_for.template operator()<float>();
    case at::kBFloat16: return kernel_for.template operator()<at::BFloat16>();
    case at::kHalf: return kernel_for.template operator()<at::Half>();
    default:
      ACCEL_CHECK_VALUE(false, op, " on CPU takes float32, bfloat16 or float16, got ", dtype);
  }
}

}  // namespace accel
