// ACCEL_CHECK(condition, parts...): throws with the values that broke the rule.
//
//   ACCEL_CHECK(x.dim() >= 1, "rms_norm: x must have at least 1 dimension, got ", x.sizes());
#pragma once

#include <c10/util/Exception.h>

#define ACCEL_CHECK(condition, ...) TORCH_CHECK(condition, __VA_ARGS__)

// The same as a ValueError in Python: the caller passed something that we do not take.
#define ACCEL_CHECK_VALUE(condition, ...) TORCH_CHECK_VALUE(condition, __VA_ARGS__)

// The same as a torch.OutOfMemoryError in Python: there is no room for what was asked.
#define ACCEL_CHECK_MEMORY(condition, ...) TORCH_CHECK_WITH(OutOfMemoryError, condition, __VA_ARGS__)
