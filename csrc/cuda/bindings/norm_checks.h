// What the norms on CUDA ask of their tensors before a kernel reads them, as csrc/cpu/norm.cpp does.
#pragma once

#include <ATen/core/Tensor.h>

#include "accel/check.h"

namespace accel::cuda {

inline void check_norm_inputs(const char* op, const at::Tensor& x, const at::Tensor& weight) {
  ACCEL_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least 1 dimension, got a scalar");
  ACCEL_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == x.size(-1), op, ": weight must have shape [",
                    x.size(-1), "], the last of x ", x.sizes(), ", got ", weight.sizes());
  ACCEL_CHECK_VALUE(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat, op,
                    ": weight must be ", x.scalar_type(), " like x, or float32, got ",
                    weight.scalar_type());
  ACCEL_CHECK_VALUE(weight.device() == x.device(), op, ": weight must be on ", x.device(),
                    " like x, got ", weight.device());
}

inline void check_norm_grad(
    const char* op, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd) {
  ACCEL_CHECK_VALUE(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type() &&
                        dy.device() == x.device(),
                    op, ": dy must be like x, ", x.scalar_type(), x.sizes(), " on ", x.device(),
                    ", got ", dy.scalar_type(), dy.sizes(), " on ", dy.device());
  ACCEL_CHECK_VALUE(rstd.sizes() == x.sizes().slice(0, x.dim() - 1) &&
                        rstd.scalar_type() == at::kFloat && rstd.is_contiguous() &&
                        rstd.device() == x.device(),
                    op, ": needs the contiguous fp32 rstd of the forward, got ", rstd.scalar_type(),
                    rstd.sizes());
}

// A grid has room for that many blocks.
inline void check_num_rows(const char* op, int64_t num_rows) {
  ACCEL_CHECK_VALUE(num_rows < int64_t{1} << 31, op, " on CUDA takes fewer than 2^31 rows, got ", num_rows);
}

}  // namespace accel::cuda
