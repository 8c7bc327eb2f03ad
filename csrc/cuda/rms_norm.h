// RMSNorm on CUDA, alone and behind a residual addition: the launchers. The maths: accel/ops/rms_norm.py
// and accel/ops/add_rms_norm.py. T rows, N columns, P programs, each with a share of the rows.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct RmsNormForward {
  const void* x;  // [T, N]
  const void* residual;  // [T, N], for add_rms_norm
  const void* bias;      // [N] or null, for add_rms_norm
  const void* weight;    // [N]
  void* y;
  void* total;  // residual + (x + bias), for add_rms_norm
  float* rstd;  // [T]
  int64_t num_rows, num_cols;
  float eps;
  float weight_offset;  // added to weight
  Dtype dtype;
  bool weight_is_float;
};

struct RmsNormBackward {
  const void* dy;
  const void* dtotal;  // [T, N], for add_rms_norm, or null where total was not used
  const void* x;       // for add_rms_norm, total
  const void* weight;
  const float* rstd;
  void* dx;
  float* dweight_PN;
  void* dweight;
  int64_t num_rows, num_cols;
  float weight_offset;
  Dtype dtype;
  bool weight_is_float;
};

// P, which the caller allocates for.
int64_t rms_norm_programs(int64_t num_rows, int64_t num_cols, Dtype dtype, float weight_offset,
                          int num_processors);

// Whether all that the backward reads must begin with whole packs: copies of the engine have no other.
bool rms_norm_needs_whole_packs(int64_t num_cols, Dtype dtype, float weight_offset);

void rms_norm_forward(const RmsNormForward& args, Queue queue);
void rms_norm_backward(const RmsNormBackward& args, int64_t num_programs, Queue queue);
void add_rms_norm_forward(const RmsNormForward& args, Queue queue);
void add_rms_norm_backward(const RmsNormBackward& args, int64_t num_programs, Queue queue);

}  // namespace accel::cuda
