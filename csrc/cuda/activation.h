// SwiGLU and its relatives on CUDA: the launchers. The maths: accel/ops/activation.py. T rows, F columns of
// y; a gated row of x is [gate | up], each F wide.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

enum class Kind : int { swiglu, geglu, quick_geglu, gelu, squared_relu };

constexpr bool is_gated(Kind kind) { return kind != Kind::gelu && kind != Kind::squared_relu; }

struct Activation {
  const void* x;
  const void* bias;   // of a row of x, or null
  const void* probs;  // [T] or null
  int64_t num_rows, num_cols;
  float limit;  // infinity for none
  float offset;
  Kind kind;
  Dtype dtype;
  bool probs_is_float;
};

struct ActivationForward {
  Activation in;
  void* y;
};

// Each of P programs has a tile of columns and a share of the rows, in which it sums dbias; the dot products
// of dprobs are summed over each tile of a row first.
struct ActivationBackward {
  Activation in;
  const void* dy;
  void* dx;             // may be x
  float* dbias_PN;      // [P, a row of x]; null without bias
  void* dbias;
  float* dprobs_tiles;  // [tiles, T]; null without probs
  void* dprobs;
  float gradient_limit;  // what is beyond it has no gradient
};

struct ActivationGrid {
  int64_t num_tiles;
  int64_t num_partials;  // of dbias
};

ActivationGrid activation_grid(const Activation& in, int num_processors);

void activation_forward(const ActivationForward& args, Queue queue);
void activation_backward(const ActivationBackward& args, Queue queue);

}  // namespace accel::cuda
