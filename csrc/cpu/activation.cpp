// SwiGLU and its relatives on CPU. The maths: accel/ops/activation.py.

#ifndef ACCEL_ISA  // the first time through this file
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "accel/clamp.h"
#include "accel/dtype.h"
#include "norm.h"

namespace accel {

enum class Kind { swiglu, geglu, quick_geglu, gelu, squared_relu };

constexpr bool is_gated(Kind kind) { return kind != Kind::gelu && kind != Kind::squared_relu; }

// A gated row of x is [gate | up], each `num_cols` wide.
struct ActivationForward {
  const void* x;
  const void* bias;    // may be null
  const float* probs;  // [T], may be null
  void* y;
  int64_t num_cols;  // of y
  float limit;       // infinity for none
  float offset;
  bool stream;
};

struct ActivationBackward {
  const void* dy;
  const void* x;
  const void* bias;
  const float* probs;
  void* dx;       // may be x
  float* dprobs;  // [T], null without probs
  int64_t num_cols;
  float limit;
  float gradient_limit;  // what is beyond it has no gradient
  float offset;
  bool stream;
};

// Columns of one half of a row of dbias partials: whole pairs, in every instruction set.
constexpr int64_t padded(int64_t num_cols) { return (num_cols + 31) / 32 * 32; }

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/activation.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// All but squared ReLU are v sigmoid(q(v)): SiLU with q = v, GELU's approximations with
// q = 1.702 v and q = 2 sqrt(2 / pi) (v + 0.044715 v^3), because (1 + tanh(u)) / 2 = sigmoid(2 u).
struct Exponent {
  Vec q, slope;
};

template <Kind kKind>
ACCEL_INLINE Exponent exponent(Vec v) {
  if constexpr (kKind == Kind::swiglu) return {v, broadcast(1.0f)};
  if constexpr (kKind == Kind::quick_geglu) return {1.702f * v, broadcast(1.702f)};
  constexpr float kLinear = 1.5957691216f;  // 2 sqrt(2 / pi)
  constexpr float kCubic = kLinear * 0.044715f;
  const Vec square = v * v;
  return {v * (kLinear + kCubic * square), kLinear + 3 * kCubic * square};
}

// a / (1 + e^-v), on its way to T. For 16 bits e^-v may be 2^-18 off, 1 / 500 of a rounding to bf16 and
// 1 / 60 of one to fp16, and takes 8 instructions in place of 14: 2^t = 2^floor(t) 2^r with
// t = -v / ln 2, where 2^r, 0 <= r < 1, is the polynomial from 1 that is least off in relative error.
// Infinities and NaN need no care: their r is 0 and NaN, and the scaling looks at t.
template <typename T>
ACCEL_INLINE Vec times_sigmoid_for(Vec a, Vec v) {
#if ACCEL_LANES == 16
  if constexpr (sizeof(T) == 2) {
    const __m512 t = (__m512)(v * -0x1.715476p+0f);
    const Vec r = (Vec)_mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec p = broadcast(0x1.b7f738p-7f);
    p = p * r + 0x1.abf864p-5f;
    p = p * r + 0x1.ee2452p-3f;
    p = p * r + 0x1.62d6c6p-1f;
    p = p * r + 1.0f;
    return a / (1.0f + (Vec)_mm512_scalef_ps((__m512)p, t));
  }
#endif
  return times_sigmoid(a, v);
}

ACCEL_INLINE Vec relu(Vec v) { return v < 0.0f ? Vec{} : v; }  // NaN stays

template <Kind kKind, typename T>
ACCEL_INLINE Vec activate(Vec v) {
  if constexpr (kKind == Kind::squared_relu) return relu(v) * relu(v);
  return times_sigmoid_for<T>(v, exponent<kKind>(v).q);
}

struct ValueAndSlope {
  Vec value, slope;
};

template <Kind kKind, typename T>
ACCEL_INLINE ValueAndSlope activate_with_slope(Vec v) {
  if constexpr (kKind == Kind::squared_relu) return {relu(v) * relu(v), 2.0f * relu(v)};
  const Exponent e = exponent<kKind>(v);
  const Vec s = times_sigmoid_for<T>(broadcast(1.0f), e.q);
  const Vec value = v * s;
  return {value, s + value * (1.0f - s) * e.slope};
}

template <bool kPlain, typename T, typename Span>
ACCEL_INLINE Pair load_biased(const T* x, const T* bias, int64_t col, Span span) {
  Pair pair = load(x + col, span);
  if constexpr (!kPlain) {
    if (bias) {
      const Pair b = load(bias + col, span);
      for (int i = 0; i < 2; ++i) pair.v[i] += b.v[i];
    }
  }
  return pair;
}

template <typename T, typename Span>
ACCEL_INLINE void put(T* p, Pair pair, Span span, bool stream) {
  stream ? store<true>(p, pair, span) : store<false>(p, pair, span);
}

ACCEL_INLINE void add_pair(float* totals, Pair pair) {
  for (int i = 0; i < 2; ++i) {
    float* to = totals + i * kLanes;
    store(to, load(to, Full{}) + pair.v[i], Full{});
  }
}

struct Limited {
  Vec gate, up;
};

ACCEL_INLINE Limited limited(Vec gate, Vec up, float limit, float offset) {
  const Vec most = broadcast(limit), least = broadcast(-limit);
  gate = gate > most ? most : gate;  // NaN stays
  up = up > most ? most : up;
  return {gate, (up < least ? least : up) + offset};
}

// y = activate(gate) * (up + offset) * probs for rows [begin, end). kPlain: none of the options.
// The lambdas are inlined by force: what GCC calls, it hands the captures through memory, where every
// store makes it read them again.
template <Kind kKind, bool kPlain, typename T>
void activation_forward(const ActivationForward& args, int64_t begin, int64_t end) {
  constexpr bool kGated = is_gated(kKind);
  const int64_t num_cols = args.num_cols, width = num_cols * (kGated ? 2 : 1);
  const T* bias = static_cast<const T*>(args.bias);
  const float limit = args.limit, offset = args.offset;
  const bool stream = args.stream;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * width;
    T* y = static_cast<T*>(args.y) + row * num_cols;
    const float prob = args.probs ? args.probs[row] : 1.0f;
    for_each_pair(num_cols, [&](int64_t col, auto span) __attribute__((always_inline)) {
      prefetch_pair(x + width + col);  // the next row
      if constexpr (kGated) prefetch_pair(x + width + num_cols + col);
      const Pair gate = load_biased<kPlain>(x, bias, col, span);
      Pair up = {};
      if constexpr (kGated) up = load_biased<kPlain>(x, bias, num_cols + col, span);
      Pair out;
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        Vec g = gate.v[i], u = up.v[i];
        if constexpr (kGated && !kPlain) {
          const Limited in = limited(g, u, limit, offset);
          g = in.gate, u = in.up;
        }
        out.v[i] = activate<kKind, T>(g);
        if constexpr (kGated) out.v[i] *= u;
        if constexpr (!kPlain) out.v[i] *= prob;
      }
      put(y + col, out, span, stream);
    });
  }
  if (stream) stream_fence();
}

// dx and dprobs of one row; its dbias is added to what is in `dbias`, unless that is null: each half
// is padded(num_cols) wide, in the order of lanes of a Pair of T.
template <Kind kKind, bool kPlain, typename T>
ACCEL_INLINE void activation_backward_row(
    const ActivationBackward& args, int64_t row, float* dbias) {
  constexpr bool kGated = is_gated(kKind);
  const int64_t num_cols = args.num_cols, width = num_cols * (kGated ? 2 : 1);
  const T* bias = static_cast<const T*>(args.bias);
  const T* dy = static_cast<const T*>(args.dy) + row * num_cols;
  const T* x = static_cast<const T*>(args.x) + row * width;
  T* dx = static_cast<T*>(args.dx) + row * width;
  const float limit = args.limit, gradient_limit = args.gradient_limit, offset = args.offset;
  const bool stream = args.stream;
  const float prob = args.probs ? args.probs[row] : 1.0f;
  Vec dots[2] = {};
  for_each_pair(num_cols, [&](int64_t col, auto span) __attribute__((always_inline)) {
    prefetch_pair(dy + num_cols + col);  // the next row
    prefetch_pair(x + width + col);
    if constexpr (kGated) prefetch_pair(x + width + num_cols + col);
    const Pair dy_pair = load(dy + col, span);
    const Pair gate = load_biased<kPlain>(x, bias, col, span);
    Pair up = {};
    if constexpr (kGated) up = load_biased<kPlain>(x, bias, num_cols + col, span);
    Pair dgate, dup;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Vec g = gate.v[i], u = up.v[i], dv = dy_pair.v[i];
      if constexpr (kGated && !kPlain) {
        const Limited in = limited(g, u, limit, offset);
        g = in.gate, u = in.up;
      }
      const auto [value, slope] = activate_with_slope<kKind, T>(g);
      if constexpr (!kPlain) {
        dots[i] += kGated ? dv * value * u : dv * value;
        dv *= prob;
      }
      dgate.v[i] = kGated ? dv * u * slope : dv * slope;
      dup.v[i] = dv * value;
      if constexpr (kGated && !kPlain) {  // no gradient where the limit held
        dgate.v[i] = gate.v[i] > gradient_limit ? Vec{} : dgate.v[i];
        dup.v[i] = up.v[i] > gradient_limit ? Vec{} : dup.v[i];
        dup.v[i] = up.v[i] < -gradient_limit ? Vec{} : dup.v[i];
      }
    }
    put(dx + col, dgate, span, stream);
    if constexpr (kGated) put(dx + num_cols + col, dup, span, stream);
    if constexpr (!kPlain) {
      if (dbias) {
        add_pair(dbias + col, dgate);
        if constexpr (kGated) add_pair(dbias + padded(num_cols) + col, dup);
      }
    }
  });
  if (!kPlain && args.dprobs) args.dprobs[row] = sum(dots[0] + dots[1]);
}

// Rows [begin, end), their dbias summed into one partial. `block` is scratch; both are null where no
// dbias is wanted.
template <Kind kKind, bool kPlain, typename T>
void activation_backward(
    const ActivationBackward& args, int64_t begin, int64_t end, float* block, float* dbias) {
  const int64_t width = padded(args.num_cols) * (is_gated(kKind) ? 2 : 1);
  if (dbias) std::memset(dbias, 0, width * sizeof(float));
  for (int64_t row = begin; row < end;) {
    const int64_t block_end = row + kRowsPerBlock < end ? row + kRowsPerBlock : end;
    if (block) std::memset(block, 0, width * sizeof(float));
    for (; row < block_end; ++row) activation_backward_row<kKind, kPlain, T>(args, row, block);
    if (block) add_to(dbias, block, width);
  }
  if (args.stream) stream_fence();
}

// From the order of lanes of a Pair of T to that of memory.
template <typename T>
void store_in_order(const float* from, void* to, int64_t num_cols) {
  for_each_pair(num_cols, [&](int64_t col, auto span) {
    const Pair pair = {load(from + col, Full{}), load(from + col + kLanes, Full{})};
    store<false>(static_cast<T*>(to) + col, pair, span);
  });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;
using std::optional;

Kind kind_named(std::string_view name) {
  if (name == "swiglu") return Kind::swiglu;
  if (name == "geglu") return Kind::geglu;
  if (name == "quick_geglu") return Kind::quick_geglu;
  if (name == "gelu") return Kind::gelu;
  ACCEL_CHECK_VALUE(name == "squared_relu", "activation: unknown kind '", std::string(name), "'");
  return Kind::squared_relu;
}

// kernel_for.operator()<kind, plain, T>() for values known at run time.
template <typename F>
auto activation_kernel(Kind kind, bool plain, at::ScalarType dtype, F kernel_for) {
  const auto of_kind = [&]<Kind kKind> {
    return float_kernel(dtype, "activation", [&]<typename T> {
      return plain ? kernel_for.template operator()<kKind, true, T>()
                   : kernel_for.template operator()<kKind, false, T>();
    });
  };
  switch (kind) {
    case Kind::swiglu: return of_kind.template operator()<Kind::swiglu>();
    case Kind::geglu: return of_kind.template operator()<Kind::geglu>();
    case Kind::quick_geglu: return of_kind.template operator()<Kind::quick_geglu>();
    case Kind::gelu: return of_kind.template operator()<Kind::gelu>();
    default: return of_kind.template operator()<Kind::squared_relu>();
  }
}

// The inputs of a call, checked, contiguous, probs in fp32.
struct Call {
  Kind kind;
  Tensor x, bias, probs;  // the last two may be undefined
  float limit, offset;
  int64_t num_rows, num_cols;

  Call(const Tensor& x_in, const optional<Tensor>& bias_in, const optional<Tensor>& probs_in,
       std::string_view name, optional<double> clamp_value, double offset)
      : kind(kind_named(name)),
        limit(clamp_value.value_or(std::numeric_limits<double>::infinity())),
        offset(offset) {
    const int64_t halves = is_gated(kind) ? 2 : 1;
    ACCEL_CHECK_VALUE(x_in.dim() >= 1 && x_in.size(-1) % halves == 0, name,
                      ": x must have shape [..., ", halves == 2 ? "2F" : "F", "], got ",
                      x_in.sizes());
    num_cols = x_in.size(-1) / halves;
    num_rows = c10::multiply_integers(x_in.sizes().slice(0, x_in.dim() - 1));
    x = x_in.contiguous();
    if (bias_in) {
      ACCEL_CHECK_VALUE(bias_in->dim() == 1 && bias_in->size(0) == x.size(-1) &&
                            bias_in->scalar_type() == x.scalar_type() && bias_in->is_cpu(),
                        name, ": bias must be ", x.scalar_type(), "[", x.size(-1),
                        "] on the CPU, got ", bias_in->scalar_type(), bias_in->sizes());
      bias = bias_in->contiguous();
    }
    if (probs_in) {
      ACCEL_CHECK_VALUE(probs_in->numel() == num_rows && probs_in->is_cpu(), name,
                        ": probs must have ", num_rows, " elements, got ", probs_in->sizes());
      probs = to_fp32(*probs_in, 0.0f);
    }
    ACCEL_CHECK_VALUE(!(limit < 0), name, ": clamp_value must not be negative, got ", limit);
  }

  bool plain() const { return !bias.defined() && !probs.defined() && limit == INFINITY && offset == 0.0f; }
  const void* bias_data() const { return bias.defined() ? bias.const_data_ptr() : nullptr; }
  const float* probs_data() const {
    return probs.defined() ? probs.const_data_ptr<float>() : nullptr;
  }

  // Whether to write past the caches: needs lines of their own for every row and half.
  bool should_stream(const Tensor& output) const {
    constexpr int64_t kMinBytes = 16 << 20, kLine = 64;
    return static_cast<int64_t>(output.nbytes()) >= kMinBytes &&
        num_cols * static_cast<int64_t>(output.element_size()) % kLine == 0 &&
        reinterpret_cast<uintptr_t>(output.const_data_ptr()) % kLine == 0;
  }
};

Tensor activation_fwd_cpu(
    const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& probs,
    c10::string_view kind, optional<double> clamp_value, double offset, bool) {
  const Call call(x, bias, probs, kind, clamp_value, offset);
  auto sizes = x.sizes().vec();
  sizes.back() = call.num_cols;
  Tensor y = at::empty(sizes, x.options().memory_format(at::MemoryFormat::Contiguous));
  if (y.numel() == 0) return y;
  const ActivationForward args{
      .x = call.x.const_data_ptr(),
      .bias = call.bias_data(),
      .probs = call.probs_data(),
      .y = y.mutable_data_ptr(),
      .num_cols = call.num_cols,
      .limit = call.limit,
      .offset = call.offset,
      .stream = call.should_stream(y)};
  auto* kernel = activation_kernel(
      call.kind, call.plain(), x.scalar_type(), [&]<Kind kKind, bool kPlain, typename T> {
        return ACCEL_FOR_THIS_CPU(activation_forward<kKind, kPlain, T>);
      });
  at::parallel_for(0, call.num_rows, rows_per_task(call.num_cols), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
  return y;
}

// [P, halves * padded(F)] fp32, in the order of lanes -> [halves * F] of `like`.
Tensor sum_dbias(const Tensor& partials, const Call& call) {
  const Tensor total = sum_partials(partials, at::kFloat);
  Tensor dbias = at::empty_like(call.bias);
  auto* kernel = float_kernel(dbias.scalar_type(), "activation backward", []<typename T> {
    return ACCEL_FOR_THIS_CPU(store_in_order<T>);
  });
  const float* from = total.const_data_ptr<float>();
  for (int64_t half = 0; half * call.num_cols < dbias.numel(); ++half) {
    auto* to = static_cast<char*>(dbias.mutable_data_ptr()) +
        half * call.num_cols * dbias.element_size();
    kernel(from + half * padded(call.num_cols), to, call.num_cols);
  }
  return dbias;
}

// Writes dx, which may be the memory of call.x; returns dbias and dprobs, empty where there is none.
std::tuple<Tensor, Tensor> backward_into(
    const Tensor& dx, const Tensor& dy_in, const Call& call, const optional<Tensor>& probs) {
  const Tensor& x = call.x;
  ACCEL_CHECK_VALUE(dy_in.numel() == call.num_rows * call.num_cols &&
                        dy_in.scalar_type() == x.scalar_type() && dy_in.is_cpu(),
                    "activation backward: dy must be like y, ", x.scalar_type(), "[", call.num_rows,
                    ", ", call.num_cols, "], got ", dy_in.scalar_type(), dy_in.sizes());
  const Tensor dy = dy_in.contiguous();
  const auto fp32 = x.options().dtype(at::kFloat);
  const bool with_bias = call.bias.defined();
  const auto none = [&] { return at::empty({0}, x.options()); };
  if (x.numel() == 0) {
    return {with_bias ? at::zeros_like(call.bias) : none(),
            probs ? at::zeros_like(*probs) : none()};
  }
  const Tensor dprobs = probs ? at::empty({call.num_rows}, fp32) : none();
  const bool in_place = dx.const_data_ptr() == x.const_data_ptr();
  const ActivationBackward args{
      .dy = dy.const_data_ptr(),
      .x = x.const_data_ptr(),
      .bias = call.bias_data(),
      .probs = call.probs_data(),
      .dx = dx.mutable_data_ptr(),
      .dprobs = probs ? dprobs.mutable_data_ptr<float>() : nullptr,
      .num_cols = call.num_cols,
      .limit = call.limit,
      .gradient_limit = gradient_limit(call.limit),
      .offset = call.offset,
      .stream = !in_place && call.should_stream(dx)};  // in place, the lines are in the cache
  auto* kernel = activation_kernel(
      call.kind, call.plain(), x.scalar_type(), [&]<Kind kKind, bool kPlain, typename T> {
        return ACCEL_FOR_THIS_CPU(activation_backward<kKind, kPlain, T>);
      });
  Tensor dbias;
  if (with_bias) {
    const RowRuns runs(call.num_rows);
    const int64_t width = padded(call.num_cols) * (is_gated(call.kind) ? 2 : 1);
    Tensor partials = at::empty({runs.count, width}, fp32);
    float* partial = partials.mutable_data_ptr<float>();
    runs.parallel(x.size(-1), [&](int64_t run, int64_t begin, int64_t end) {
      std::vector<float> block(width);
      kernel(args, begin, end, block.data(), partial + run * width);
    });
    dbias = sum_dbias(partials, call);
  } else {
    dbias = none();
    at::parallel_for(
        0, call.num_rows, rows_per_task(x.size(-1)),
        [&](int64_t begin, int64_t end) { kernel(args, begin, end, nullptr, nullptr); });
  }
  return {dbias, probs ? dprobs.to(probs->scalar_type()).view(probs->sizes()) : dprobs};
}

std::tuple<Tensor, Tensor, Tensor> activation_bwd_cpu(
    const Tensor& dy, const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& probs,
    c10::string_view kind, optional<double> clamp_value, double offset) {
  const Call call(x, bias, probs, kind, clamp_value, offset);
  Tensor dx = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  auto [dbias, dprobs] = backward_into(dx, dy, call, probs);
  return {dx, dbias, dprobs};
}

std::tuple<Tensor, Tensor> activation_bwd_inplace_cpu(
    const Tensor& dy, const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& probs,
    c10::string_view kind, optional<double> clamp_value, double offset) {
  ACCEL_CHECK_VALUE(x.is_contiguous(), "activation backward: x must be contiguous to be overwritten");
  return backward_into(x, dy, Call(x, bias, probs, kind, clamp_value, offset), probs);
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("activation_fwd", &activation_fwd_cpu);
  m.impl("activation_bwd", &activation_bwd_cpu);
  m.impl("activation_bwd_inplace", &activation_bwd_inplace_cpu);
}

}  // namespace
}  // namespace accel
#endif
