// LayerNorm on CUDA: the launchers. The maths: accel/ops/layer_norm.py. T rows, N columns, P programs, each
// with a share of the rows.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct LayerNormForward {
  const void* x;       // [T, N]
  const void* weight;  // [N]
  const void* bias;    // [N]
  void* y;
  float* mean;  // [T]
  float* rstd;  // [T]
  int64_t num_rows, num_cols;
  float eps;
  float weight_offset;  // added to weight
  Dtype dtype;
  bool weight_is_float, bias_is_float;
};

struct LayerNormBackward {
  const void* dy;
  const void* x;
  const void* weight;
  const float* mean;
  const float* rstd;
  void* dx;
  float* dweight_PN;
  float* dbias_PN;
  void* dweight;
  void* dbias;  // of the dtype of weight
  int64_t num_rows, num_cols;
  float weight_offset;
  Dtype dtype;
  bool weight_is_float;
};

// P, which the caller allocates for.
int64_t layer_norm_programs(int64_t num_rows, int64_t num_cols, Dtype dtype, float weight_offset,
                            int num_processors);

// Whether all that the backward reads must begin with whole packs: copies of the engine have no other.
bool layer_norm_needs_whole_packs(int64_t num_cols, Dtype dtype, float weight_offset);

void layer_norm_forward(const LayerNormForward& op, Queue queue);
void layer_norm_backward(const LayerNormBackward& op, int64_t num_programs, Queue queue);

}  // namespace accel::cuda
