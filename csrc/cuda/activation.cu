#include "activation.h"

#include <algorithm>

#include "accel/cuda/device.h"
#include "sum_partials.h"

namespace accel::cuda {
namespace {

constexpr int kMaxThreads = 256;  // of a row: 2048 columns of 16 bits are a tile
// Blocks for each processor: several times as many as it can hold, so that all processors end together.
// SwiGLU of 8192 x 14336 on an H200, us forward and backward: 8 blocks 217 and 308, 16 190 and 301, 32 176
// and 294, 64 169 and 292, 256 168 and 305.
constexpr int kBlocksPerProcessor = 64;
// The same where dbias is summed: what each sums is written and read once more.
constexpr int kBlocksPerProcessorWithBias = 2;

// e^-v and division as exact as fp32 is for fp32 results. For 16 bits e^-v may be some 2^-18 off, and
// v sigmoid(v) is 0 below -87, where it is 1e-36.
template <typename T>
ACCEL_DEVICE float sigmoid(float v) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-v));
  return __fdividef(1.0f, 1.0f + __expf(-v));
}

template <typename T>
ACCEL_DEVICE float times_sigmoid(float a, float v) {
  if constexpr (sizeof(T) == 4) return a / (1.0f + expf(-v));
  return __fdividef(a, 1.0f + __expf(-v));
}

// All but squared ReLU are v sigmoid(q(v)): SiLU with q = v, GELU's approximations with q = 1.702 v and
// q = 2 sqrt(2 / pi) (v + 0.044715 v^3), because (1 + tanh(u)) / 2 = sigmoid(2 u).
struct Exponent {
  float q, slope;
};

template <Kind kKind>
ACCEL_DEVICE Exponent exponent(float v) {
  if constexpr (kKind == Kind::swiglu) return {v, 1.0f};
  if constexpr (kKind == Kind::quick_geglu) return {1.702f * v, 1.702f};
  constexpr float kLinear = 1.5957691216f;  // 2 sqrt(2 / pi)
  constexpr float kCubic = kLinear * 0.044715f;
  const float square = v * v;
  return {v * (kLinear + kCubic * square), kLinear + 3 * kCubic * square};
}

ACCEL_DEVICE float relu(float v) { return v < 0.0f ? 0.0f : v; }  // NaN stays

template <Kind kKind, typename T>
ACCEL_DEVICE float activate(float v) {
  if constexpr (kKind == Kind::squared_relu) return relu(v) * relu(v);
  return times_sigmoid<T>(v, exponent<kKind>(v).q);
}

struct ValueAndSlope {
  float value, slope;
};

template <Kind kKind, typename T>
ACCEL_DEVICE ValueAndSlope activate_with_slope(float v) {
  if constexpr (kKind == Kind::squared_relu) return {relu(v) * relu(v), 2.0f * relu(v)};
  const Exponent e = exponent<kKind>(v);
  const float s = sigmoid<T>(e.q), value = v * s;
  return {value, s + value * (1.0f - s) * e.slope};
}

ACCEL_DEVICE float at_most(float v, float limit) { return v > limit ? limit : v; }  // NaN stays
ACCEL_DEVICE float at_least(float v, float limit) { return v < limit ? limit : v; }

ACCEL_DEVICE float prob_of_row(const Activation& in, int64_t row, Dtype dtype) {
  if (!in.probs) return 1.0f;
  if (in.probs_is_float) return static_cast<const float*>(in.probs)[row];
  return dtype == Dtype::bfloat16 ? to_float(static_cast<const __nv_bfloat16*>(in.probs)[row])
                                  : to_float(static_cast<const __half*>(in.probs)[row]);
}

// This thread's columns, and the rows that it takes in turn: those of blocks that lie alike in y.
struct Share {
  RowTeams teams;
  int64_t col;
  int64_t count;  // columns from there to the end of the row, at most 0 for none

  template <typename T>
  ACCEL_DEVICE static Share of(const Activation& in, int log2_threads) {
    const RowTeams teams{log2_threads};
    const int64_t tile = static_cast<int64_t>(blockIdx.x) * teams.threads();
    const int64_t col = (tile + teams.lane()) * kPack<T>;
    return {teams, col, in.num_cols - col};
  }
  ACCEL_DEVICE int64_t first_row() const {
    return static_cast<int64_t>(blockIdx.y) * teams.teams_per_block();
  }
  ACCEL_DEVICE int64_t rows_at_once() const {
    return static_cast<int64_t>(gridDim.y) * teams.teams_per_block();
  }
};

// A pack of x with the bias on it, in fp32.
template <typename T, bool kWhole>
ACCEL_DEVICE void load_biased(const Activation& in, int64_t at, int64_t col, int64_t count,
                              float (&v)[kPack<T>]) {
  const Pack<T> pack = load<kWhole>(static_cast<const T*>(in.x) + at, count);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) v[i] = pack[i];
  if (in.bias) {
    const Pack<T> bias = load<kWhole>(static_cast<const T*>(in.bias) + col, count);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) v[i] += bias[i];
  }
}

struct ForwardCall {
  ActivationForward op;
  int log2_threads;
};

template <Kind kKind, typename T, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads) activation_forward_kernel(const ForwardCall call) {
  constexpr bool kGated = is_gated(kKind);
  const Activation& in = call.op.in;
  const Share share = Share::of<T>(in, call.log2_threads);
  const int64_t width = in.num_cols * (kGated ? 2 : 1);
  if (share.count <= 0) return;
  for (int64_t row = share.first_row() + share.teams.team(); row < in.num_rows;
       row += share.rows_at_once()) {
    const int64_t at = row * width + share.col;
    float gate[kPack<T>], up[kPack<T>];
    load_biased<T, kWhole>(in, at, share.col, share.count, gate);
    if constexpr (kGated) {
      load_biased<T, kWhole>(in, at + in.num_cols, share.col + in.num_cols, share.count, up);
    }
    const float prob = prob_of_row(in, row, in.dtype);
    float y[kPack<T>];
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      const float g = kGated ? at_most(gate[i], in.limit) : gate[i];
      y[i] = activate<kKind, T>(g) * prob;
      if constexpr (kGated) y[i] *= at_least(at_most(up[i], in.limit), -in.limit) + in.offset;
    }
    store<kWhole>(static_cast<T*>(call.op.y) + row * in.num_cols + share.col, pack_of<T>(y), share.count);
  }
}

struct BackwardCall {
  ActivationBackward op;
  int log2_threads;
};

// dx of a pack of a row, with what it adds to dbias and to the dot product of dprobs.
template <Kind kKind, typename T, bool kWhole, bool kBias>
ACCEL_DEVICE float backward_pack(const ActivationBackward& op, const Share& share, int64_t row,
                                 float (&dbias)[2][kPack<T>]) {
  constexpr bool kGated = is_gated(kKind);
  const Activation& in = op.in;
  const int64_t at = row * in.num_cols * (kGated ? 2 : 1) + share.col;
  float gate[kPack<T>], up[kPack<T>], dup[kPack<T>];
  load_biased<T, kWhole>(in, at, share.col, share.count, gate);
  if constexpr (kGated) {
    load_biased<T, kWhole>(in, at + in.num_cols, share.col + in.num_cols, share.count, up);
  }
  const T* dy = static_cast<const T*>(op.dy) + row * in.num_cols + share.col;
  const Pack<T> dy_pack = load<kWhole>(dy, share.count);
  const float prob = prob_of_row(in, row, in.dtype);
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    float dv = dy_pack[i];
    if constexpr (kGated) {
      const float u = at_least(at_most(up[i], in.limit), -in.limit) + in.offset;
      const auto [value, slope] = activate_with_slope<kKind, T>(at_most(gate[i], in.limit));
      dot += dv * value * u;
      dv *= prob;
      // no gradient where the limit held
      gate[i] = gate[i] > op.gradient_limit ? 0.0f : dv * u * slope;
      dup[i] = up[i] > op.gradient_limit || up[i] < -op.gradient_limit ? 0.0f : dv * value;
    } else {
      const auto [value, slope] = activate_with_slope<kKind, T>(gate[i]);
      dot += dv * value;
      gate[i] = dv * prob * slope;
    }
    if constexpr (kBias) {
      dbias[0][i] += gate[i];
      if constexpr (kGated) dbias[1][i] += dup[i];
    }
  }
  T* dx = static_cast<T*>(op.dx) + at;
  store<kWhole>(dx, pack_of<T>(gate), share.count);
  if constexpr (kGated) store<kWhole>(dx + in.num_cols, pack_of<T>(dup), share.count);
  return dot;
}

// kBias: dbias is summed; written where it is wanted.
template <Kind kKind, typename T, bool kWhole, bool kBias>
__global__ void __launch_bounds__(kMaxThreads, 2) activation_backward_kernel(const BackwardCall call) {
  constexpr bool kGated = is_gated(kKind);
  const ActivationBackward& op = call.op;
  const Activation& in = op.in;
  const Share share = Share::of<T>(in, call.log2_threads);
  float dbias[2][kPack<T>] = {};
  int turn = 0;
  for (int64_t first = share.first_row(); first < in.num_rows; first += share.rows_at_once()) {
    const int64_t row = first + share.teams.team();
    const bool mine = row < in.num_rows && share.count > 0;
    float dot = mine ? backward_pack<kKind, T, kWhole, kBias>(op, share, row, dbias) : 0.0f;
    if (op.dprobs_tiles == nullptr) continue;
    dot = row_sum(dot, share.teams, turn++);
    if (mine && share.teams.lane() == 0) op.dprobs_tiles[blockIdx.x * in.num_rows + row] = dot;
  }
  if (kBias && op.dbias_PN) {
    const int64_t partial =
        static_cast<int64_t>(blockIdx.y) * share.teams.teams_per_block() + share.teams.team();
    float* out = op.dbias_PN + partial * in.num_cols * (kGated ? 2 : 1) + share.col;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      if (i >= share.count) continue;
      out[i] = dbias[0][i];
      if constexpr (kGated) out[in.num_cols + i] = dbias[1][i];
    }
  }
}

struct Plan {
  RowBlock block;
  dim3 grid;

  Plan(const Activation& in, int num_processors, bool with_bias)
      : block(in.num_cols, in.dtype, 1, kMaxThreads) {
    const int64_t cols = (int64_t{kPackBytes} << block.log2_threads) / size_of(in.dtype);
    const int64_t num_tiles = ceil_div(in.num_cols, cols);
    const int64_t blocks = int64_t{num_processors} *
        (with_bias ? kBlocksPerProcessorWithBias : kBlocksPerProcessor) * kMaxThreads /
        block.threads_per_block;
    const int64_t most = std::clamp<int64_t>(ceil_div(blocks, num_tiles), 1, 65535);
    grid = dim3(static_cast<unsigned>(num_tiles),
                static_cast<unsigned>(std::min(most, ceil_div(in.num_rows, block.rows_per_block))));
  }
};

// kernel_for.operator()<kind, T>() for values known at run time.
template <typename F>
auto for_kind(Kind kind, Dtype dtype, F kernel_for) {
  const auto of = [&]<Kind kKind> {
    return for_dtype(dtype, [&]<typename T> { return kernel_for.template operator()<kKind, T>(); });
  };
  switch (kind) {
    case Kind::swiglu: return of.template operator()<Kind::swiglu>();
    case Kind::geglu: return of.template operator()<Kind::geglu>();
    case Kind::quick_geglu: return of.template operator()<Kind::quick_geglu>();
    case Kind::gelu: return of.template operator()<Kind::gelu>();
    default: return of.template operator()<Kind::squared_relu>();
  }
}

}  // namespace

ActivationGrid activation_grid(const Activation& in, int num_processors) {
  const Plan plan(in, num_processors, in.bias != nullptr);
  return {plan.grid.x, int64_t{plan.grid.y} * plan.block.rows_per_block};
}

void activation_forward(const ActivationForward& op, Queue queue) {
  const Plan plan(op.in, queue.num_processors, false);
  const bool whole = whole_packs(op.in.num_cols, op.in.dtype, op.in.x, op.in.bias, op.y);
  auto* kernel = for_kind(op.in.kind, op.in.dtype, [&]<Kind kKind, typename T> {
    return whole ? &activation_forward_kernel<kKind, T, true> : &activation_forward_kernel<kKind, T, false>;
  });
  launch(kernel, plan.grid, plan.block.threads_per_block, queue, ForwardCall{op, plan.block.log2_threads});
}

void activation_backward(const ActivationBackward& op, Queue queue) {
  const Activation& in = op.in;
  const Plan plan(in, queue.num_processors, in.bias != nullptr);
  const bool whole = whole_packs(in.num_cols, in.dtype, in.x, in.bias, op.dy, op.dx);
  auto* kernel = for_kind(in.kind, in.dtype, [&]<Kind kKind, typename T> {
    if (!whole) return &activation_backward_kernel<kKind, T, false, true>;
    return in.bias ? &activation_backward_kernel<kKind, T, true, true>
                   : &activation_backward_kernel<kKind, T, true, false>;
  });
  launch(kernel, plan.grid, plan.block.threads_per_block, queue, BackwardCall{op, plan.block.log2_threads});
  if (in.bias) {
    const int64_t num_partials = int64_t{plan.grid.y} * plan.block.rows_per_block;
    const int64_t width = in.num_cols * (is_gated(in.kind) ? 2 : 1);
    sum_partials({op.dbias_PN, op.dbias, num_partials, width, in.dtype == Dtype::float32}, in.dtype, queue);
  }
  if (op.dprobs_tiles && op.dprobs_tiles != op.dprobs) {
    sum_partials({op.dprobs_tiles, op.dprobs, plan.grid.x, in.num_rows, in.probs_is_float}, in.dtype,
                 queue);
  }
}

}  // namespace accel::cuda
