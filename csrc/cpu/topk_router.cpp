// The router of a mixture of experts on CPU. The maths: accel/ops/topk_router.py.
//
// One row of logits at a time, in a few vectors of scratch; no sort. The k largest are found by k
// passes for a maximum, which is fewer operations than a sort for the k that models use.

#ifndef ACCEL_ISA  // the first time through this file
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/native/TopKImpl.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "accel/dtype.h"

namespace accel {

enum class Score { softmax_all, softmax_chosen, sigmoid, sqrt_softplus };

struct TopkRouter {
  const void* logits;   // [T, E]
  const float* bias;    // [E], or null
  const void* dprobs;   // [T, E]
  void* probs;          // [T, E]; in the backward dlogits
  bool* routing_map;    // [T, E]
  const bool* chosen;   // [T, E], of the backward
  int64_t num_experts;
  int64_t topk;
  int64_t num_groups;   // 0: none
  int64_t group_topk;
  float scale;
  Score score;
  bool normalize_all;  // the scores of the auxiliary loss: probabilities of all experts
};

// What one row needs while it is worked on: [E] each, then [groups] each.
struct RouterScratch {
  float* scores;
  float* choice;
  float* spare;
  float* groups;
  float* group_spare;
  int64_t* indices;        // [topk]
  int64_t* group_indices;  // [group_topk]
};

// torch.topk's own choice, ties and NaN included; the order is its own, too.
inline void torch_topk(const float* values, int64_t count, int64_t k, int64_t* indices) {
  std::vector<float> largest(k);
  char* data[] = {
      reinterpret_cast<char*>(largest.data()), reinterpret_cast<char*>(indices),
      reinterpret_cast<char*>(const_cast<float*>(values))};
  const int64_t strides[] = {0, 0, 0};
  at::native::topk_impl_loop<float, float>(1, 1, 1, k, count, true, true, data, strides, 1);
}

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/topk_router.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

ACCEL_INLINE Vec square_root(Vec v) {
#if ACCEL_LANES == 16
  return (Vec)_mm512_sqrt_ps((__m512)v);
#elif ACCEL_LANES == 8
  return (Vec)_mm256_sqrt_ps((__m256)v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

// log(1 + e^v) = max(v, 0) + log(1 + u) with u = e^-|v| in [0, 1], and log(1 + u) = 2 atanh(s) with
// s = u / (2 + u) up to 1/3: the first term left out of the series is below 2^-29 of the sum.
ACCEL_INLINE Vec softplus(Vec v) {
  const Vec u = exp(v > 0 ? -v : v);
  const Vec s = u / (u + 2.0f);
  const Vec z = s * s;
  Vec series = broadcast(1.0f / 15);
  series = series * z + 1.0f / 13;
  series = series * z + 1.0f / 11;
  series = series * z + 1.0f / 9;
  series = series * z + 1.0f / 7;
  series = series * z + 1.0f / 5;
  series = series * z + 1.0f / 3;
  series = series * z + 1.0f;
  return max(v, Vec{}) + 2.0f * s * series;
}

ACCEL_INLINE Vec softplus_root(Vec v) { return square_root(softplus(v)); }

// The k indices of the largest values in descending order; `values` is used up. Where the choice is
// not unique (equal values, NaN, -inf among the chosen) it is torch's, on a second look at the row.
ACCEL_INLINE void largest(float* values, const float* again, int64_t count, int64_t k,
                          int64_t* indices) {
  float last = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i <= k; ++i) {
    Vec best = broadcast(kLowest);
    VecI32 has_nan{};
    for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      Vec v = load(values + j, span);
      if constexpr (std::is_same_v<decltype(span), Tail>) {
        for (int lane = 0; lane < kLanes; ++lane) v[lane] = lane < span.lanes ? v[lane] : kLowest;
      }
      best = max(v, best);
      has_nan |= v != v;
    });
    bool nan = false;
    for (int lane = 0; lane < kLanes; ++lane) nan |= has_nan[lane] != 0;
    const float top = max(best);
    if (nan || (i < k && top == kLowest) || (i == k && k < count && top == last)) {
      return torch_topk(again, count, k, indices);
    }
    if (i == k) return;
    int64_t index = 0;
    while (values[index] != top) ++index;
    indices[i] = index;
    values[index] = kLowest;
    last = top;
  }
}

ACCEL_INLINE float max_of(float a, float b) { return a > b ? a : b; }

// The score of every expert; for softmax_chosen the logit itself.
template <typename T>
ACCEL_INLINE void router_scores(Score score, const T* logits, int64_t count, float* scores) {
  if (score == Score::sigmoid) {
    return for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      store(scores + j, sigmoid(load(logits + j, span)), span);
    });
  }
  if (score == Score::sqrt_softplus) {
    return for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      store(scores + j, softplus_root(load(logits + j, span)), span);
    });
  }
  float highest = kLowest;
  for_each_vec<1>(count, [&](int64_t j, int, auto span) {
    store(scores + j, load(logits + j, span), span);
  });
  if (score == Score::softmax_chosen) return;
  for (int64_t j = 0; j < count; ++j) highest = max_of(highest, scores[j]);
  Vec total{};
  for_each_vec<1>(count, [&](int64_t j, int, auto span) {
    const Vec v = exp(load(scores + j, span) - highest);
    total += keep(v, span);
    store(scores + j, v, span);
  });
  const float sum_of_all = sum(total);
  for_each_vec<1>(count, [&](int64_t j, int, auto span) {
    store(scores + j, load(scores + j, span) / sum_of_all, span);
  });
}

// Leaves only the experts of the best groups: a group is worth the sum of its best.
ACCEL_INLINE void limit_groups(const TopkRouter& args, const RouterScratch& scratch) {
  const int64_t size = args.num_experts / args.num_groups;
  const int64_t best = args.topk / args.group_topk;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    const float* values = scratch.choice + g * size;
    std::memcpy(scratch.spare, values, size * sizeof(float));
    largest(scratch.spare, values, size, best, scratch.indices);
    float worth = 0;
    for (int64_t i = 0; i < best; ++i) worth += values[scratch.indices[i]];
    scratch.groups[g] = worth;
  }
  std::memcpy(scratch.group_spare, scratch.groups, args.num_groups * sizeof(float));
  largest(scratch.group_spare, scratch.groups, args.num_groups, args.group_topk,
          scratch.group_indices);
  for (int64_t g = 0; g < args.num_groups; ++g) {
    bool kept = false;
    for (int64_t i = 0; i < args.group_topk; ++i) kept |= scratch.group_indices[i] == g;
    for (int64_t j = 0; !kept && j < size; ++j) scratch.choice[g * size + j] = kLowest;
  }
}

// Probabilities of the chosen experts, in place of their scores.
ACCEL_INLINE void router_weights(const TopkRouter& args, const RouterScratch& scratch) {
  float* scores = scratch.scores;
  const int64_t* chosen = scratch.indices;
  if (args.score == Score::softmax_chosen) {
    float highest = scores[chosen[0]];
    for (int64_t i = 1; i < args.topk; ++i) highest = max_of(highest, scores[chosen[i]]);
    float total = 0;
    for (int64_t i = 0; i < args.topk; ++i) {
      scores[chosen[i]] = std::exp(scores[chosen[i]] - highest);
      total += scores[chosen[i]];
    }
    for (int64_t i = 0; i < args.topk; ++i) scores[chosen[i]] /= total;
  } else if (args.score != Score::softmax_all && args.topk > 1) {
    float total = 0;
    for (int64_t i = 0; i < args.topk; ++i) total += scores[chosen[i]];
    for (int64_t i = 0; i < args.topk; ++i) scores[chosen[i]] /= total + 1e-20f;
  }
  if (args.scale != 1) {
    for (int64_t i = 0; i < args.topk; ++i) scores[chosen[i]] *= args.scale;
  }
}

template <typename T>
void topk_router_forward(const TopkRouter& args, int64_t begin, int64_t end,
                         const RouterScratch& scratch) {
  const int64_t count = args.num_experts;
  float* scores = scratch.scores;
  float* choice = scratch.choice;
  for (int64_t row = begin; row < end; ++row) {
    router_scores(args.score, static_cast<const T*>(args.logits) + row * count, count, scores);
    for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      const Vec v = load(scores + j, span);
      store(choice + j, args.bias ? v + load(args.bias + j, span) : v, span);
    });
    if (args.num_groups > 0) limit_groups(args, scratch);
    std::memcpy(scratch.spare, choice, count * sizeof(float));
    largest(scratch.spare, choice, count, args.topk, scratch.indices);
    bool* map = args.routing_map + row * count;
    std::memset(map, 0, count);
    for (int64_t i = 0; i < args.topk; ++i) map[scratch.indices[i]] = true;
    if (args.normalize_all) {
      float* out = static_cast<float*>(args.probs) + row * count;
      Vec total{};
      for_each_vec<1>(count, [&](int64_t j, int, auto span) { total += load(scores + j, span); });
      const float divisor = args.score == Score::softmax_all ? 1.0f : sum(total) + 1e-20f;
      for_each_vec<1>(count, [&](int64_t j, int, auto span) {
        store(out + j, load(scores + j, span) / divisor, span);
      });
      continue;
    }
    router_weights(args, scratch);
    T* probs = static_cast<T*>(args.probs) + row * count;
    std::memset(static_cast<void*>(probs), 0, count * sizeof(T));
    for (int64_t i = 0; i < args.topk; ++i) {
      probs[scratch.indices[i]] = static_cast<T>(scores[scratch.indices[i]]);
    }
  }
}

// dscore / dlogit, of the sigmoid and of the root of softplus.
ACCEL_INLINE Vec score_slope(Score score, Vec logit, Vec value) {
  if (score == Score::sigmoid) return value * (1.0f - value);
  return sigmoid(logit) / (2.0f * value);
}

// With g = dprobs * scale at the chosen experts:
//   softmax        dlogit = p (g - sum(p g)), over all experts or over the chosen ones
//   the others     dscore = (g - sum(p g)) / (sum of the chosen scores), dlogit = dscore dscore/dlogit
// `normalize_all` is the same with every expert chosen.
template <typename T>
void topk_router_backward(const TopkRouter& args, int64_t begin, int64_t end,
                          const RouterScratch& scratch) {
  const int64_t count = args.num_experts;
  float* scores = scratch.scores;
  float* g = scratch.choice;
  float* wanted = scratch.spare;  // 1 for the chosen, 0 for the others
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = static_cast<const T*>(args.logits) + row * count;
    T* dlogits = static_cast<T*>(args.probs) + row * count;
    for (int64_t j = 0; j < count; ++j) {
      wanted[j] = args.normalize_all || args.chosen[row * count + j];
      const float dprob = args.normalize_all
          ? static_cast<const float*>(args.dprobs)[row * count + j]
          : static_cast<float>(static_cast<const T*>(args.dprobs)[row * count + j]);
      g[j] = wanted[j] != 0 ? dprob * args.scale : 0.0f;
    }
    router_scores(args.score, logits, count, scores);
    float divisor = 1;
    if (args.score == Score::softmax_chosen) {
      float highest = kLowest, total = 0;
      for (int64_t j = 0; j < count; ++j) highest = wanted[j] != 0 ? max_of(highest, scores[j]) : highest;
      for (int64_t j = 0; j < count; ++j) {
        scores[j] = wanted[j] != 0 ? std::exp(scores[j] - highest) : 0.0f;
        total += scores[j];
      }
      for (int64_t j = 0; j < count; ++j) scores[j] /= total;
    } else if (args.score != Score::softmax_all && (args.topk > 1 || args.normalize_all)) {
      divisor = 1e-20f;
      for (int64_t j = 0; j < count; ++j) divisor += wanted[j] != 0 ? scores[j] : 0.0f;
    }
    const bool normalized = args.score == Score::softmax_all || args.score == Score::softmax_chosen ||
        args.topk > 1 || args.normalize_all;
    Vec dots{};
    for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      const Vec term = load(scores + j, span) * load(g + j, span);
      dots += load(wanted + j, span) != 0 ? term : Vec{};
    });
    const float mean = normalized ? sum(dots) / divisor : 0.0f;
    for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      const Vec score = load(scores + j, span);
      const Vec centred = load(g + j, span) - mean;
      if (args.score == Score::softmax_all || args.score == Score::softmax_chosen) {
        return store(dlogits + j, score * centred, span);
      }
      const Vec slope = score_slope(args.score, load(logits + j, span), score);
      const Vec dlogit = centred / divisor * slope;
      store(dlogits + j, load(wanted + j, span) != 0 ? dlogit : Vec{}, span);
    });
  }
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;

Score parse_score(c10::string_view name, bool softmax_of_all) {
  if (name == "softmax") return softmax_of_all ? Score::softmax_all : Score::softmax_chosen;
  if (name == "sigmoid") return Score::sigmoid;
  ACCEL_CHECK_VALUE(name == "sqrtsoftplus",
                    "topk_router: score_function must be softmax, sigmoid or sqrtsoftplus, got ", name);
  return Score::sqrt_softplus;
}

void check_logits(const Tensor& logits, int64_t topk) {
  ACCEL_CHECK_VALUE(logits.dim() == 2, "topk_router: logits must have shape [T, E], got ",
                    logits.sizes());
  ACCEL_CHECK_VALUE(1 <= topk && topk <= logits.size(1), "topk_router: topk must be 1 to ",
                    logits.size(1), ", the number of experts, got ", topk);
}

template <typename Kernel>
void for_each_row(const TopkRouter& args, int64_t num_rows, Kernel kernel) {
  const int64_t grain = std::max<int64_t>(1, (1 << 13) / args.num_experts);
  at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> values(3 * args.num_experts + 2 * args.num_groups);
    std::vector<int64_t> indices(args.topk + args.group_topk);
    float* groups = values.data() + 3 * args.num_experts;
    const RouterScratch scratch{
        .scores = values.data(),
        .choice = values.data() + args.num_experts,
        .spare = values.data() + 2 * args.num_experts,
        .groups = groups,
        .group_spare = groups + args.num_groups,
        .indices = indices.data(),
        .group_indices = indices.data() + args.topk};
    kernel(args, begin, end, scratch);
  });
}

void run_forward(TopkRouter args, const Tensor& logits) {
  if (logits.numel() == 0) return;
  auto* kernel = float_kernel(logits.scalar_type(), "topk_router", []<typename T> {
    return ACCEL_FOR_THIS_CPU(topk_router_forward<T>);
  });
  for_each_row(args, logits.size(0), kernel);
}

Tensor run_backward(TopkRouter args, const Tensor& logits) {
  Tensor dlogits = at::empty(logits.sizes(), logits.options());
  if (logits.numel() == 0) return dlogits;
  args.probs = dlogits.mutable_data_ptr();
  auto* kernel = float_kernel(logits.scalar_type(), "topk_router backward", []<typename T> {
    return ACCEL_FOR_THIS_CPU(topk_router_backward<T>);
  });
  for_each_row(args, logits.size(0), kernel);
  return dlogits;
}

std::tuple<Tensor, Tensor> topk_router_fwd_cpu(
    const Tensor& logits_in, int64_t topk, bool use_pre_softmax, int64_t num_groups,
    int64_t group_topk, double scale, c10::string_view score_function,
    const std::optional<Tensor>& expert_bias) {
  check_logits(logits_in, topk);
  const int64_t num_experts = logits_in.size(1);
  ACCEL_CHECK_VALUE(num_groups == 0 ||
                        (num_groups > 0 && num_experts % num_groups == 0 && group_topk >= 1 &&
                         group_topk <= num_groups && topk / group_topk >= 1 &&
                         topk / group_topk <= num_experts / num_groups &&
                         topk <= group_topk * (num_experts / num_groups)),
                    "topk_router: ", num_experts, " experts, topk ", topk, " do not fit num_groups ",
                    num_groups, ", group_topk ", group_topk);
  const Tensor logits = logits_in.contiguous();
  Tensor bias;
  if (expert_bias) {
    ACCEL_CHECK_VALUE(expert_bias->dim() == 1 && expert_bias->size(0) == num_experts,
                      "topk_router: expert_bias must have shape [", num_experts, "], got ",
                      expert_bias->sizes());
    bias = expert_bias->to(at::kFloat).contiguous();
  }
  Tensor probs = at::empty(logits.sizes(), logits.options());
  Tensor routing_map = at::empty(logits.sizes(), logits.options().dtype(at::kBool));
  const TopkRouter args{
      .logits = logits.const_data_ptr(),
      .bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
      .probs = probs.mutable_data_ptr(),
      .routing_map = routing_map.mutable_data_ptr<bool>(),
      .num_experts = num_experts,
      .topk = topk,
      .num_groups = num_groups,
      .group_topk = num_groups > 0 ? group_topk : 0,
      .scale = static_cast<float>(scale),
      .score = parse_score(score_function, use_pre_softmax)};
  run_forward(args, logits);
  return {probs, routing_map};
}

Tensor topk_router_bwd_cpu(
    const Tensor& dprobs_in, const Tensor& logits_in, const Tensor& routing_map_in, int64_t topk,
    bool use_pre_softmax, double scale, c10::string_view score_function) {
  check_logits(logits_in, topk);
  ACCEL_CHECK_VALUE(dprobs_in.sizes() == logits_in.sizes() &&
                        dprobs_in.scalar_type() == logits_in.scalar_type() &&
                        routing_map_in.sizes() == logits_in.sizes() &&
                        routing_map_in.scalar_type() == at::kBool,
                    "topk_router backward: dprobs must be ", logits_in.scalar_type(),
                    logits_in.sizes(), " like the logits and routing_map bool, got ",
                    dprobs_in.scalar_type(), dprobs_in.sizes(), " and ",
                    routing_map_in.scalar_type(), routing_map_in.sizes());
  const Tensor dprobs = dprobs_in.contiguous();
  const Tensor logits = logits_in.contiguous();
  const Tensor routing_map = routing_map_in.contiguous();
  const TopkRouter args{
      .logits = logits.const_data_ptr(),
      .dprobs = dprobs.const_data_ptr(),
      .chosen = routing_map.const_data_ptr<bool>(),
      .num_experts = logits.size(1),
      .topk = topk,
      .scale = static_cast<float>(scale),
      .score = parse_score(score_function, use_pre_softmax)};
  return run_backward(args, logits);
}

std::tuple<Tensor, Tensor> moe_aux_scores_fwd_cpu(
    const Tensor& logits_in, int64_t topk, c10::string_view score_function) {
  check_logits(logits_in, topk);
  const Tensor logits = logits_in.contiguous();
  Tensor routing_map = at::empty(logits.sizes(), logits.options().dtype(at::kBool));
  Tensor scores = at::empty(logits.sizes(), logits.options().dtype(at::kFloat));
  const TopkRouter args{
      .logits = logits.const_data_ptr(),
      .probs = scores.mutable_data_ptr(),
      .routing_map = routing_map.mutable_data_ptr<bool>(),
      .num_experts = logits.size(1),
      .topk = topk,
      .scale = 1,
      .score = parse_score(score_function, true),
      .normalize_all = true};
  run_forward(args, logits);
  return {routing_map, scores};
}

Tensor moe_aux_scores_bwd_cpu(
    const Tensor& dscores_in, const Tensor& logits_in, c10::string_view score_function) {
  check_logits(logits_in, 1);
  ACCEL_CHECK_VALUE(
      dscores_in.sizes() == logits_in.sizes() && dscores_in.scalar_type() == at::kFloat,
      "moe_aux_scores backward: dscores must be float32 ", logits_in.sizes(), ", got ",
      dscores_in.scalar_type(), dscores_in.sizes());
  const Tensor dscores = dscores_in.contiguous();
  const Tensor logits = logits_in.contiguous();
  const TopkRouter args{
      .logits = logits.const_data_ptr(),
      .dprobs = dscores.const_data_ptr(),
      .num_experts = logits.size(1),
      .topk = 1,
      .scale = 1,
      .score = parse_score(score_function, true),
      .normalize_all = true};
  return run_backward(args, logits);
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("topk_router_fwd", &topk_router_fwd_cpu);
  m.impl("topk_router_bwd", &topk_router_bwd_cpu);
  m.impl("moe_aux_scores_fwd", &moe_aux_scores_fwd_cpu);
  m.impl("moe_aux_scores_bwd", &moe_aux_scores_bwd_cpu);
}

}  // namespace
}  // namespace accel
#endif
