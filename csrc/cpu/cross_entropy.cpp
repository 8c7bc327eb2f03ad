// Softmax cross entropy on CPU. The maths and what is saved: accel/ops/cross_entropy.py.
//
// A row is read once: each block of it stays in L1 between the search for its maximum and the sum of
// its exponentials. Both passes are bound by the exponentials as much as by memory, hence an exp of
// their own.

#ifndef ACCEL_ISA  // the first time through this file
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "accel/check.h"
#include "accel/dtype.h"

namespace accel {

// The rows of `stats`, each of num_rows floats; the last is there under label smoothing only.
enum CrossEntropyStat { kMax, kSumExp, kTargetLogit, kSumLogits };

struct CrossEntropyForward {
  const void* logits;
  const int64_t* target;
  float* stats;
  int64_t num_rows;
  int64_t num_cols;
  int64_t vocab_start;  // the token of column 0
};

struct CrossEntropyBackward {
  const void* logits;
  const int64_t* target;
  const float* stats;
  const float* dloss;
  void* dlogits;  // may be logits
  int64_t num_rows;
  int64_t num_cols;
  int64_t vocab_start;
  float on_target;      // what the target has in place of 1, 1 - smoothing
  float on_each_token;  // smoothing / size of the vocabulary
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/cross_entropy.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Columns between two looks at the maximum: 8 KiB of bf16 or 16 KiB of fp32, half of a small L1.
constexpr int64_t kColsPerBlock = 4096;

template <typename T>
ACCEL_INLINE void store_pair(T* p, Pair v) {
  store(p, v.v[0], Full{});
  store(p + kLanes, v.v[1], Full{});
}

// Not for NaN. Ties round away from zero: as near as to even, and three instructions less.
ACCEL_INLINE void store_pair(BFloat16* p, Pair v) {
  const VecU32 even = bit_cast<VecU32>(v.v[0]) + 0x8000u;
  const VecU32 odd = bit_cast<VecU32>(v.v[1]) + 0x8000u;
  const VecU32 bits = (even >> 16) | (odd & 0xffff0000u);
  std::memcpy(static_cast<void*>(p), &bits, sizeof(bits));
}

// Calls on_pair(column, k), k = 0 and 1 in turn, for whole pairs and on_rest(column, span) after them.
template <typename OnPair, typename OnRest>
ACCEL_INLINE void for_each_whole_pair(int64_t num_cols, OnPair on_pair, OnRest on_rest) {
  int64_t first = 0;
  for (; first + 4 * kLanes <= num_cols; first += 4 * kLanes) {
    on_pair(first, 0);
    on_pair(first + 2 * kLanes, 1);
  }
  for_each_vec<1>(num_cols - first, [&](int64_t col, int, auto span) { on_rest(first + col, span); });
}

constexpr float kLog2E = 0x1.715476p+0f;

#if ACCEL_LANES == 16

// Minimax polynomials of 2^(f - 1/2) for 0 <= f <= 1: relative error 2.8e-6 (degree 4), 9.3e-8 (5) and
// 1.8e-8 (6).
template <int kDegree>
ACCEL_INLINE Vec exp2_polynomial(Vec f) {
  static_assert(4 <= kDegree && kDegree <= 6);
  Vec p;
  if constexpr (kDegree == 4) {
    p = f * 0x1.3a027ap-7f + 0x1.2cfbdcp-5f;
    p = p * f + 0x1.5db4cep-3f;
    p = p * f + 0x1.f5c84ap-2f;
    return p * f + 0x1.6a0a28p-1f;
  } else if constexpr (kDegree == 5) {
    p = f * 0x1.5bb99ep-10f + 0x1.a081f2p-8f;
    p = p * f + 0x1.436c5ap-5f;
    p = p * f + 0x1.5bc5b0p-3f;
    p = p * f + 0x1.f5e5a4p-2f;
    return p * f + 0x1.6a09e4p-1f;
  } else {
    p = f * 0x1.41fb76p-13f + 0x1.cd00ecp-11f;
    p = p * f + 0x1.c08edcp-8f;
    p = p * f + 0x1.416432p-5f;
    p = p * f + 0x1.5be3e0p-3f;
    p = p * f + 0x1.f5e45ap-2f;
    return p * f + 0x1.6a09e6p-1f;
  }
}

// e^(x - highest) for x <= highest, but for a common factor; NaN for NaN. Of
// t = x log2(e) + (1/2 - highest log2(e)) it is 2^floor(t) 2^(t - floor(t) - 1/2): AVX-512 takes the
// floors, and -inf needs no care. Far from 0 (masks are often -1e10 or finfo.min) what `bias_` is rounded by is
// more than an exponent holds; values there are equal or so far apart that any exponential is 0, and 2^v does
// for e^v.
class ExpBelow {
 public:
  explicit ExpBelow(float highest)
      : slope_(std::abs(highest) >= 0x1p30f ? 1.0f : kLog2E),
        exact_bias_(-static_cast<double>(highest) * slope_),
        bias_(static_cast<float>(exact_bias_ + 0.5)) {}

  template <int kDegree>
  ACCEL_INLINE Vec of(Vec x) const {
    const Vec t = x * slope_ + bias_;
    const auto fraction = (Vec)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF);
    return scale_by_power_of_2(exp2_polynomial<kDegree>(fraction), t);
  }

  // The factor: what `bias_` was rounded by.
  float factor() const { return static_cast<float>(std::exp2(exact_bias_ - static_cast<double>(bias_) + 0.5)); }

 private:
  float slope_;
  double exact_bias_;  // without the 1/2, which it may be too large for
  float bias_;
};

#else

// Minimax polynomials p(r) = 1 + r q(r) of e^r for |r| <= ln(2) / 2: relative error 2.8e-6 (degree 4),
// 9.3e-8 (5) and 1.8e-8 (6).
template <int kDegree>
ACCEL_INLINE Vec exp_polynomial(Vec r) {
  static_assert(4 <= kDegree && kDegree <= 6);
  Vec q;
  if constexpr (kDegree == 4) {
    q = r * 0x1.541480p-5f + 0x1.57cf54p-3f;
    q = q * r + 0x1.0003f6p-1f;
    q = q * r + 0x1.fffba6p-1f;
  } else if constexpr (kDegree == 5) {
    q = r * 0x1.0fa7d8p-7f + 0x1.573ad0p-5f;
    q = q * r + 0x1.555a6ep-3f;
    q = q * r + 0x1.fffdc4p-2f;
    q = q * r + 0x1.fffff6p-1f;
  } else {
    q = r * 0x1.6ae6e0p-10f + 0x1.1267d8p-7f;
    q = q * r + 0x1.555824p-5f;
    q = q * r + 0x1.555418p-3f;
    q = q * r + 0x1.fffffcp-2f;
    q = q * r + 1.0f;
  }
  return q * r + 1.0f;
}

// e^(x - highest) for x <= highest; NaN for NaN. As exp() of math.h, without what only v > 0 needs and
// with ln 2 in one piece (|v| 2^-28 off, less than the rounding of v itself).
class ExpBelow {
 public:
  explicit ExpBelow(float highest) : highest_(highest) {}

  template <int kDegree>
  ACCEL_INLINE Vec of(Vec x) const {
    const Vec v = max(broadcast(-104.0f), x - highest_);  // where e^v is 0 in fp32
    const Vec n = (v * kLog2E + 0x1.8p23f) - 0x1.8p23f;
    return scale_by_power_of_2(exp_polynomial<kDegree>(v - n * 0x1.62e43p-1f), n);
  }

  float factor() const { return 1.0f; }

 private:
  float highest_;
};

#endif

ACCEL_INLINE Vec or_lowest(Vec v, Full) { return v; }

// -inf in the lanes that a tail does not have.
ACCEL_INLINE Vec or_lowest(Vec v, Tail tail) {
  for (int i = 0; i < kLanes; ++i) v[i] = i < tail.lanes ? v[i] : -kInfinity;
  return v;
}

// NaN is no maximum: it shows in the sum of exponentials.
template <typename T>
ACCEL_INLINE float largest(const T* x, int64_t num_cols) {
  Vec highest[4];
  for (Vec& v : highest) v = broadcast(-1.0f) * kInfinity;
  for_each_whole_pair(
      num_cols,
      [&](int64_t col, int k) {
        const Pair v = load(x + col, FullPair{});
        highest[k] = max(v.v[0], highest[k]);
        highest[k + 2] = max(v.v[1], highest[k + 2]);
      },
      [&](int64_t col, auto span) {
        highest[0] = max(or_lowest(load(x + col, span), span), highest[0]);
      });
  return max(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
}

// Row by row: the largest logit, the sum of e^(x - largest), that of the target minus the largest (0
// where this shard does not have it) and, on request, the sum of x - largest.
template <typename T, bool kWithSum>
void cross_entropy_stats(const CrossEntropyForward& args, int64_t begin, int64_t end) {
  constexpr int kDegree = std::is_same_v<T, float> ? 6 : 5;  // the sum is fp32 for every T
  const int64_t num_cols = args.num_cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.logits) + row * num_cols;
    float highest = -kInfinity, sum_exp = 0.0f, sum_logits = 0.0f;
    for (int64_t first = 0; first < num_cols; first += kColsPerBlock) {
      const int64_t count = num_cols - first < kColsPerBlock ? num_cols - first : kColsPerBlock;
      const float block_max = largest(x + first, count);
      if (block_max > highest) {
        sum_exp *= std::exp(highest - block_max);  // 0 for the first block
        highest = block_max;
      }
      // All -inf so far: their exponentials are 0, and NaN stays NaN.
      const ExpBelow exp_below(highest == -kInfinity ? 0.0f : highest);
      Vec exps[4] = {}, logits[4] = {};
      const auto add = [&](Vec v, int k, auto span) {
        exps[k] += keep(exp_below.of<kDegree>(v), span);
        if constexpr (kWithSum) logits[k] += v;
      };
      for_each_whole_pair(
          count,
          [&](int64_t col, int k) {
            const Pair v = load(x + first + col, FullPair{});
            __builtin_prefetch(x + first + col + kColsPerBlock);  // beyond the row: of the next one
            add(v.v[0], k, Full{});
            add(v.v[1], k + 2, Full{});
          },
          [&](int64_t col, auto span) { add(load(x + first + col, span), 0, span); });
      sum_exp += sum(tree_sum(exps)) * exp_below.factor();
      if constexpr (kWithSum) sum_logits += sum(tree_sum(logits));
    }
    const int64_t target = args.target[row] - args.vocab_start;
    const bool is_here = 0 <= target && target < num_cols;
    float* stats = args.stats + row;
    stats[kMax * args.num_rows] = highest;
    stats[kSumExp * args.num_rows] = sum_exp;
    stats[kTargetLogit * args.num_rows] =
        is_here ? static_cast<float>(x[target]) - highest : 0.0f;
    if constexpr (kWithSum) {
      stats[kSumLogits * args.num_rows] = sum_logits - highest * static_cast<float>(num_cols);
    }
  }
}

// dlogits = dloss (softmax - on_target [column is the target] - on_each_token), rows [begin, end).
template <typename T>
void cross_entropy_backward(const CrossEntropyBackward& args, int64_t begin, int64_t end) {
  constexpr int kDegree = std::is_same_v<T, float> ? 6 : 4;  // 16 bits round to 11 or fewer
  const int64_t num_cols = args.num_cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.logits) + row * num_cols;
    T* dx = static_cast<T*>(args.dlogits) + row * num_cols;
    const float dloss = args.dloss[row];
    if (dloss == 0.0f) {  // a masked token
      std::memset(static_cast<void*>(dx), 0, num_cols * sizeof(T));
      continue;
    }
    const float highest = args.stats[kMax * args.num_rows + row];
    const float scale = dloss / args.stats[kSumExp * args.num_rows + row];
    const float uniform = dloss * args.on_each_token;
    if (!std::isfinite(scale)) {  // so is what follows
      for (int64_t col = 0; col < num_cols; ++col) dx[col] = std::numeric_limits<T>::quiet_NaN();
      continue;
    }
    const int64_t target = args.target[row] - args.vocab_start;
    const bool is_here = 0 <= target && target < num_cols;
    const float target_logit = is_here ? static_cast<float>(x[target]) : 0.0f;

    const ExpBelow exp_below(highest);
    const float scale_below = scale * exp_below.factor();
    const auto gradient = [&](Vec v) { return exp_below.of<kDegree>(v) * scale_below - uniform; };
    for_each_whole_pair(
        num_cols,
        [&](int64_t col, int) {
          const Pair v = load(x + col, FullPair{});
          store_pair(dx + col, {{gradient(v.v[0]), gradient(v.v[1])}});
        },
        [&](int64_t col, auto span) { store(dx + col, gradient(load(x + col, span)), span); });
    if (is_here) {
      const float softmax = std::exp(target_logit - highest) * scale;
      dx[target] = static_cast<T>(softmax - dloss * args.on_target - uniform);
    }
  }
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;

// Fewest rows that are worth a thread of their own: some 10 us of exponentials.
int64_t rows_per_task(int64_t num_cols) { return std::max<int64_t>(1, (1 << 14) / num_cols); }

void check_logits(const char* op, const Tensor& logits, const Tensor& target) {
  ACCEL_CHECK_VALUE(logits.dim() >= 1 && logits.size(-1) >= 1, op,
                    ": logits must have shape [..., V] with V >= 1, got ", logits.sizes());
  ACCEL_CHECK_VALUE(target.scalar_type() == at::kLong, op, ": target must be int64, got ",
                    target.scalar_type());
  ACCEL_CHECK_VALUE(target.sizes() == logits.sizes().slice(0, logits.dim() - 1), op,
                    ": target must have the shape of logits ", logits.sizes(),
                    " without its last dimension, got ", target.sizes());
}

// `vocab_size` 0: targets are not checked.
void check_targets(const Tensor& target, int64_t vocab_size, std::optional<int64_t> ignore_index) {
  if (vocab_size == 0) return;
  const int64_t* tokens = target.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < target.numel(); ++row) {
    const int64_t token = tokens[row];
    TORCH_CHECK_INDEX((0 <= token && token < vocab_size) || token == ignore_index,
                      "cross_entropy: target ", token, " in row ", row,
                      " is outside the vocabulary of ", vocab_size, " tokens");
  }
}

Tensor cross_entropy_stats_cpu(
    const Tensor& logits_in, const Tensor& target_in, int64_t vocab_start, int64_t vocab_size,
    std::optional<int64_t> ignore_index, bool with_sum) {
  check_logits("cross_entropy", logits_in, target_in);
  const Tensor logits = logits_in.contiguous();
  const Tensor target = target_in.contiguous();
  check_targets(target, vocab_size, ignore_index);
  std::vector<int64_t> sizes(target.sizes().begin(), target.sizes().end());
  sizes.insert(sizes.begin(), with_sum ? 4 : 3);
  Tensor stats = at::empty(sizes, logits.options().dtype(at::kFloat));
  const int64_t num_rows = target.numel(), num_cols = logits.size(-1);
  const CrossEntropyForward args{
      .logits = logits.const_data_ptr(),
      .target = target.const_data_ptr<int64_t>(),
      .stats = stats.mutable_data_ptr<float>(),
      .num_rows = num_rows,
      .num_cols = num_cols,
      .vocab_start = vocab_start};
  auto* kernel = float_kernel(logits.scalar_type(), "cross_entropy", [&]<typename T> {
    return with_sum ? ACCEL_FOR_THIS_CPU(cross_entropy_stats<T, true>)
                    : ACCEL_FOR_THIS_CPU(cross_entropy_stats<T, false>);
  });
  at::parallel_for(0, num_rows, rows_per_task(num_cols), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
  return stats;
}

// `dlogits` may be `logits`.
void backward_into(
    const Tensor& dlogits, const Tensor& logits, const Tensor& target_in, const Tensor& stats,
    const Tensor& dloss_in, int64_t vocab_start, int64_t vocab_size, double smoothing) {
  const char* op = "cross_entropy backward";
  check_logits(op, logits, target_in);
  ACCEL_CHECK_VALUE(stats.dim() == target_in.dim() + 1 && stats.size(0) >= 2 &&
                        stats.sizes().slice(1) == target_in.sizes() && stats.is_contiguous() &&
                        stats.scalar_type() == at::kFloat,
                    op, ": needs the contiguous fp32 stats of the forward, got ",
                    stats.scalar_type(), stats.sizes());
  ACCEL_CHECK_VALUE(dloss_in.sizes() == target_in.sizes() && dloss_in.scalar_type() == at::kFloat,
                    op, ": dloss must be float32 ", target_in.sizes(), " like the loss, got ",
                    dloss_in.scalar_type(), dloss_in.sizes());
  ACCEL_CHECK_VALUE(vocab_size >= 1, op, ": vocab_size must be >= 1, got ", vocab_size);
  const Tensor target = target_in.contiguous();
  const Tensor dloss = dloss_in.contiguous();
  const int64_t num_cols = logits.size(-1);
  const CrossEntropyBackward args{
      .logits = logits.const_data_ptr(),
      .target = target.const_data_ptr<int64_t>(),
      .stats = stats.const_data_ptr<float>(),
      .dloss = dloss.const_data_ptr<float>(),
      .dlogits = dlogits.mutable_data_ptr(),
      .num_rows = target.numel(),
      .num_cols = num_cols,
      .vocab_start = vocab_start,
      .on_target = static_cast<float>(1.0 - smoothing),
      .on_each_token = static_cast<float>(smoothing / static_cast<double>(vocab_size))};
  auto* kernel = float_kernel(logits.scalar_type(), op, []<typename T> {
    return ACCEL_FOR_THIS_CPU(cross_entropy_backward<T>);
  });
  at::parallel_for(0, target.numel(), rows_per_task(num_cols), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
}

Tensor cross_entropy_bwd_cpu(
    const Tensor& logits_in, const Tensor& target, const Tensor& stats, const Tensor& dloss,
    int64_t vocab_start, int64_t vocab_size, double smoothing) {
  const Tensor logits = logits_in.contiguous();
  Tensor dlogits = at::empty_like(logits, at::MemoryFormat::Contiguous);
  backward_into(dlogits, logits, target, stats, dloss, vocab_start, vocab_size, smoothing);
  return dlogits;
}

void cross_entropy_bwd_inplace_cpu(
    const Tensor& logits, const Tensor& target, const Tensor& stats, const Tensor& dloss,
    int64_t vocab_start, int64_t vocab_size, double smoothing) {
  ACCEL_CHECK_VALUE(logits.is_contiguous(),
                    "cross_entropy backward in place: logits must be contiguous, got strides ",
                    logits.strides());
  backward_into(logits, logits, target, stats, dloss, vocab_start, vocab_size, smoothing);
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("cross_entropy_stats", &cross_entropy_stats_cpu);
  m.impl("cross_entropy_bwd", &cross_entropy_bwd_cpu);
  m.impl("cross_entropy_bwd_", &cross_entropy_bwd_inplace_cpu);
}

}  // namespace
}  // namespace accel
#endif
