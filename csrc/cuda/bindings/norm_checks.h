// What the norms on CUDA ask of their tensors before a kernel reads them, as csrc/cpu/norm.cpp does.
#pragma once

#include <ATen/core/Tensor.h>

#include "accel/check.h"

namespace accel::cuda {

// `weight`, or another vector by its name.
inline void check_norm_inputs(
    const char* op, const at::Tensor& x, const at::Tensor& weight, const char* name = "weight") {
  ACCEL_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least 1 dimension, got a scalar");
  ACCEL_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == x.size(-1), op, ": ", name, " must have shape [",
                    x.size(-1), "], the last of x ", x.sizes(), ", got ", weight.sizes());
  ACCEL_CHECK_VALUE(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat, op, ": ",
                    name, " must be ", x.scalar_type(), " like x, or float32, got ", weight.scalar_type());
  ACCEL_CHECK_VALUE(weight.device() == x.device(), op, ": ", name, " must be on ", x.device(),
                    " like x, got ", weight.device());
}

// What the forward keeps of each row: its rstd, say.
inline void check_row_stats(const char* op, const char* name, const at::Tensor& stats, const at::Tensor& x) {
  ACCEL_CHECK_VALUE(stats.sizes() == x.sizes().slice(0, x.dim() - 1) &&
                        stats.scalar_type() == at::kFloat && stats.is_contiguous() &&
                        stats.device() == x.device(),
                    op, ": needs the contiguous fp32 ", name, " of the forward, got ", stats.scalar_type(),
                    stats.sizes());
}

inline void check_norm_grad(
    const char* op, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd) {
  ACCEL_CHECK_VALUE(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type() &&
                        dy.device() == x.device(),
                    op, ": dy must be like x, ", x.scalar_type(), x.sizes(), " on ", x.device(),
                    ", got ", dy.scalar_type(), dy.sizes(), " on ", dy.device());
  check_row_stats(op, "rstd", rstd, x);
}

// A grid has room for that many blocks.
inline void check_num_rows(const char* op, int64_t num_rows) {
  ACCEL_CHECK_VALUE(num_rows < int64_t{1} << 31, op, " on CUDA takes fewer than 2^31 rows, got ", num_rows);
}

}  // namespace accel::cuda
