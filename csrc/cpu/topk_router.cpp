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

// What one row needs while it is worked on. Vectors of values are whole: [E] and [groups] up to a
// multiple of kWidestLanes, so that only memory that is ours is ever worked on in parts.
constexpr int64_t kWidestLanes = 16;

struct RouterScratch {
  float* scores;
  float* choice;
  float* groups;
  float* tops;             // [topk] or [group_topk]
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

ACCEL_INLINE float max_of(float a, float b) { return a > b ? a : b; }

// Calls f(j) for the first lane of every vector that holds some of `count` values.
template <typename F>
ACCEL_INLINE void for_vecs(int64_t count, F f) {
  for (int64_t j = 0; j < count; j += kLanes) f(j);
}

ACCEL_INLINE Vec at(const float* values, int64_t j) { return load(values + j, Full{}); }
ACCEL_INLINE void put(float* values, int64_t j, Vec v) { store(values + j, v, Full{}); }

// Sets the lanes beyond `count`.
ACCEL_INLINE void pad(float* values, int64_t count, float with) {
  for (int64_t j = count; j % kLanes != 0; ++j) values[j] = with;
}

ACCEL_INLINE int min_lane(VecI32 v) {
#pragma GCC unroll 4
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const VecI32 other = rotated(v, step);
    v = v < other ? v : other;
  }
  return v[0];
}

// The k largest, in descending order; lanes beyond `count` must hold kLowest. Where the choice is not
// unique (equal values, NaN, -inf among the chosen) it is torch's, on a second look.
ACCEL_INLINE void largest(float* values, int64_t count, int64_t k, int64_t* indices, float* tops) {
  bool unique = true;
  int64_t found = 0;
  VecI32 is_nan{};
  for_vecs(count, [&](int64_t j) { is_nan |= at(values, j) != at(values, j); });
  if (min_lane(is_nan) != 0) unique = false;  // true is -1
  for (; unique && found <= k; ++found) {
    Vec best = broadcast(kLowest);
    VecI32 where{};
    for_vecs(count, [&](int64_t j) {
      const Vec v = at(values, j);
      const VecI32 larger = v > best;
      best = larger ? v : best;
      where = larger ? lane_numbers() + static_cast<int>(j) : where;
    });
    const Vec top = max_everywhere(best);
    if (found == k) {
      unique = k == count || top[0] != tops[k - 1];
      break;
    }
    unique = top[0] != kLowest;
    if (!unique) break;
    const VecI32 nowhere = lane_numbers() * 0 + 0x7fffffff;
    indices[found] = min_lane(best == top ? where : nowhere);
    tops[found] = top[0];
    values[indices[found]] = kLowest;
  }
  for (int64_t i = 0; i < found && i < k; ++i) values[indices[i]] = tops[i];
  if (!unique) torch_topk(values, count, k, indices);
}

// The score of every expert; for softmax_chosen the logit itself. Lanes beyond: what -inf scores.
template <typename T>
ACCEL_INLINE void router_scores(Score score, const T* logits, int64_t count, float* scores) {
  for_each_vec<1>(count, [&](int64_t j, int, auto span) { put(scores, j, load(logits + j, span)); });
  pad(scores, count, kLowest);
  switch (score) {
    case Score::softmax_chosen: return;
    case Score::sigmoid:
      return for_vecs(count, [&](int64_t j) { put(scores, j, sigmoid(at(scores, j))); });
    case Score::sqrt_softplus:
      return for_vecs(count, [&](int64_t j) { put(scores, j, softplus_root(at(scores, j))); });
    case Score::softmax_all: break;
  }
  Vec highest = broadcast(kLowest);
  for_vecs(count, [&](int64_t j) { highest = max(highest, at(scores, j)); });
  highest = max_everywhere(highest);
  Vec total{};
  for_vecs(count, [&](int64_t j) {
    const Vec v = exp(at(scores, j) - highest);
    total += v;
    put(scores, j, v);
  });
  const float sum_of_all = sum(total);
  for_vecs(count, [&](int64_t j) { put(scores, j, at(scores, j) / sum_of_all); });
}

// Leaves only the experts of the best groups: a group is worth the sum of its best.
ACCEL_INLINE void limit_groups(const TopkRouter& args, const RouterScratch& scratch) {
  const int64_t size = args.num_experts / args.num_groups;
  const int64_t best = args.topk / args.group_topk;
  float* group = scratch.groups + (args.num_groups + kWidestLanes - 1) / kWidestLanes * kWidestLanes;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    std::memcpy(group, scratch.choice + g * size, size * sizeof(float));
    pad(group, size, kLowest);
    largest(group, size, best, scratch.indices, scratch.tops);
    float worth = 0;
    for (int64_t i = 0; i < best; ++i) worth += group[scratch.indices[i]];
    scratch.groups[g] = worth;
  }
  pad(scratch.groups, args.num_groups, kLowest);
  largest(scratch.groups, args.num_groups, args.group_topk, scratch.group_indices, scratch.tops);
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
  float total = 0;
  if (args.score == Score::softmax_chosen) {
    float highest = kLowest;
    for (int64_t i = 0; i < args.topk; ++i) highest = max_of(highest, scores[chosen[i]]);
    for (int64_t i = 0; i < args.topk; ++i) {
      scores[chosen[i]] = exp(broadcast(scores[chosen[i]] - highest))[0];
      total += scores[chosen[i]];
    }
  } else if (args.score != Score::softmax_all && args.topk > 1) {
    for (int64_t i = 0; i < args.topk; ++i) total += scores[chosen[i]];
    total += 1e-20f;
  } else {
    total = 1;
  }
  for (int64_t i = 0; i < args.topk; ++i) {
    scores[chosen[i]] = scores[chosen[i]] / total * args.scale;
  }
}

template <typename T>
void topk_router_forward(
    const TopkRouter& args, int64_t begin, int64_t end, const RouterScratch& scratch) {
  const int64_t count = args.num_experts;
  float* scores = scratch.scores;
  float* choice = scratch.choice;
  for (int64_t row = begin; row < end; ++row) {
    router_scores(args.score, static_cast<const T*>(args.logits) + row * count, count, scores);
    for_vecs(count, [&](int64_t j) { put(choice, j, at(scores, j)); });
    if (args.bias) {
      for (int64_t j = 0; j < count; ++j) choice[j] += args.bias[j];
    }
    pad(choice, count, kLowest);
    if (args.num_groups > 0) limit_groups(args, scratch);
    largest(choice, count, args.topk, scratch.indices, scratch.tops);
    bool* map = args.routing_map + row * count;
    std::memset(map, 0, count);
    for (int64_t i = 0; i < args.topk; ++i) map[scratch.indices[i]] = true;
    if (args.normalize_all) {
      float* out = static_cast<float*>(args.probs) + row * count;
      pad(scores, count, 0);
      Vec total{};
      for_vecs(count, [&](int64_t j) { total += at(scores, j); });
      const float divisor = args.score == Score::softmax_all ? 1.0f : sum(total) + 1e-20f;
      for_each_vec<1>(count, [&](int64_t j, int, auto span) {
        store(out + j, at(scores, j) / divisor, span);
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

// What the backward of a row starts from: g = dprobs * scale at the chosen experts and 0 elsewhere,
// wanted = 1 for these.
template <typename T>
ACCEL_INLINE void router_gradient(
    const TopkRouter& args, int64_t row, float* g, float* wanted) {
  const int64_t count = args.num_experts;
  if (args.normalize_all) {
    const float* dscores = static_cast<const float*>(args.dprobs) + row * count;
    for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      put(g, j, load(dscores + j, span));
      put(wanted, j, broadcast(1));
    });
    return pad(wanted, count, 0);
  }
  for_vecs(count, [&](int64_t j) {
    put(g, j, Vec{});
    put(wanted, j, Vec{});
  });
  const T* dprobs = static_cast<const T*>(args.dprobs) + row * count;
  const bool* chosen = args.chosen + row * count;
  for (int64_t j = 0; j < count; j += 8) {
    uint64_t eight = 0;  // most are 0: look at eight at once
    std::memcpy(&eight, chosen + j, count - j < 8 ? count - j : 8);
    for (; eight != 0; eight &= eight - 1) {
      const int64_t expert = j + __builtin_ctzll(eight) / 8;
      g[expert] = static_cast<float>(dprobs[expert]) * args.scale;
      wanted[expert] = 1;
    }
  }
}

// With g = dprobs * scale at the chosen experts and p their probabilities before scaling:
//   softmax        dlogit = p (g - sum(p g)), over all experts or over the chosen ones
//   the others     dscore = (g - sum(p g)) / (sum of the chosen scores), dlogit = dscore dscore/dlogit
// `normalize_all` is the same with every expert chosen.
template <typename T>
void topk_router_backward(
    const TopkRouter& args, int64_t begin, int64_t end, const RouterScratch& scratch) {
  const int64_t count = args.num_experts;
  float* scores = scratch.scores;
  float* g = scratch.choice;
  float* wanted = scratch.groups;
  const bool softmax = args.score == Score::softmax_all || args.score == Score::softmax_chosen;
  const bool normalized = softmax || args.topk > 1 || args.normalize_all;
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = static_cast<const T*>(args.logits) + row * count;
    T* dlogits = static_cast<T*>(args.probs) + row * count;
    router_gradient<T>(args, row, g, wanted);
    router_scores(args.score, logits, count, scores);
    if (args.score == Score::softmax_chosen) {
      Vec highest = broadcast(kLowest);
      for_vecs(count, [&](int64_t j) {
        highest = max(highest, at(wanted, j) != 0 ? at(scores, j) : broadcast(kLowest));
      });
      highest = max_everywhere(highest);
      for_vecs(count, [&](int64_t j) {
        put(scores, j, at(wanted, j) != 0 ? exp(at(scores, j) - highest) : Vec{});
      });
    }
    Vec dots{}, totals{};
    for_vecs(count, [&](int64_t j) {
      const Vec score = at(wanted, j) != 0 ? at(scores, j) : Vec{};
      dots += score * at(g, j);
      totals += score;
    });
    float divisor = 1;
    if (args.score == Score::softmax_chosen) divisor = sum(totals);
    if (!softmax && normalized) divisor = sum(totals) + 1e-20f;
    const float mean = normalized ? sum(dots) / divisor : 0.0f;
    for_each_vec<1>(count, [&](int64_t j, int, auto span) {
      const Vec score = at(scores, j);
      const Vec centred = (at(g, j) - mean) / divisor;
      if (softmax) return store(dlogits + j, score * centred, span);
      Vec slope = score * (1.0f - score);
      if (args.score == Score::sqrt_softplus) {
        // softplus'(x) = 1 - e^-softplus(x), which is softplus(x) where that is small
        const Vec of_large = sigmoid(load(logits + j, span)) / (2.0f * score);
        slope = score * score < 1e-7f ? 0.5f * score : of_large;
      }
      store(dlogits + j, at(wanted, j) != 0 ? centred * slope : Vec{}, span);
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
    // `groups` is followed by one group, no larger than E, and is all of `wanted` in the backward.
    const int64_t padded = at::divup(args.num_experts, kWidestLanes) * kWidestLanes;
    std::vector<float> values(4 * padded + kWidestLanes + args.topk);
    std::vector<int64_t> indices(args.topk + args.group_topk);
    const RouterScratch scratch{
        .scores = values.data(),
        .choice = values.data() + padded,
        .groups = values.data() + 2 * padded,
        .tops = values.data() + 4 * padded + kWidestLanes,
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
  return {scores, routing_map};
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
