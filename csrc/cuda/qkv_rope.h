// Queries, keys and values out of one product, the first two rotated, on CUDA: the launcher. The maths:
// accel/ops/qkv_rope.py. T tokens, G groups of n queries, one key and one value, heads of D.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct QkvRope {
  void* qkv;          // [T, G, n + 2, D]
  void *q, *k, *v;    // [T, G n, D], [T, G, D], [T, G, D]
  const float* cos;   // [rows, 1 or B, D / 2]
  const float* sin;
  int64_t row_stride, batch_stride;
  int64_t num_tokens;  // S B
  int64_t num_batch;
  int num_groups, queries_per_group, head_dim;
  bool interleaved;
  bool is_gradient;  // out of q, k and v into qkv, rotated back
  Dtype dtype;
};

constexpr int kMaxQkvHeads = 1023;  // of a token

// Whether heads are whole packs, chunk by chunk.
bool qkv_rope_takes(int64_t head_dim, Dtype dtype);

void qkv_rope(const QkvRope& args, Queue queue);

}  // namespace accel::cuda
