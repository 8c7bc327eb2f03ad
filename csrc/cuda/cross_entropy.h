// Softmax cross entropy on CUDA: the launchers. The maths and what is saved: accel/ops/cross_entropy.py.
// T rows of V tokens.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct CrossEntropyForward {
  const void* x;            // [T, V]
  const int64_t* target;    // [T]
  float* stats;             // [K, T]: max, sum e^(x - max), x[target] - max and, if K = 4, sum (x - max)
  float* parts;             // [T, K - 1, P]; null for rows that are in one part
  int64_t num_rows;
  int num_cols;
  int64_t vocab_start;
  int64_t vocab_size;       // a target beyond fails an assertion; 0: none does
  int64_t ignore_index;     // but this one, if there is one
  bool has_ignore_index;
  bool with_sum;
  Dtype dtype;
};

struct CrossEntropyBackward {
  const void* x;
  const int64_t* target;
  const float* stats;
  const float* dloss;  // [T]
  void* dx;            // may be x
  int64_t num_rows;
  int num_cols;
  int64_t vocab_start;
  float on_target, on_each_token;
  Dtype dtype;
};

// Into how many parts rows are split, each a block's work, so that few rows are enough for all processors.
int cross_entropy_parts(int64_t num_rows, int num_cols, Dtype dtype, int num_processors);

void cross_entropy_forward(const CrossEntropyForward& op, int num_parts, Queue queue);
void cross_entropy_backward(const CrossEntropyBackward& op, Queue queue);

}  // namespace accel::cuda
