// Rotary position embedding on CUDA: the launcher. The maths: accel/ops/rope.py.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct RopeTensor {
  const void* x;  // [S, B, H, D], its last stride 1
  void* y;        // [S, B, H, D], contiguous
  int64_t stride_S, stride_B, stride_H;  // of x, in elements
  int num_heads;                         // 0: there is no such tensor
  int head_dim;
};

constexpr int kRopeTensors = 2;  // at once: queries and keys

struct Rope {
  RopeTensor tensors[kRopeTensors];
  const float* cos;  // [num_rows, 1 or B, half or 2 half]
  const float* sin;
  int64_t row_stride, batch_stride;
  int64_t num_rows;
  int64_t num_tokens;  // S B
  int64_t num_batch;
  int half;    // pairs that are rotated
  int second;  // where a table row has the second members of the pairs: half, or 0 if as the first
  // Of packed sequences, [num_sequences + 1]; null where token s has row s.
  const void* cu_seqlens;
  bool cu_seqlens_is_long;
  int64_t num_sequences;
  int64_t cp_size, cp_rank;
  bool interleaved_in, interleaved_out, inverse;
  Dtype dtype;
};

void rope(const Rope& args, Queue queue);

}  // namespace accel::cuda
