// Softmax of masked scores on CPU. The maths: accel/ops/masked_softmax.py.
//
// A row stays in L1 or L2 between the passes over it, so memory is read once.

#ifndef ACCEL_ISA  // the first time through this file
#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "accel/check.h"
#include "accel/dtype.h"

namespace accel {

// All rows; `hidden` has strides of its own, null without a mask.
struct SoftmaxRows {
  const void* in;   // x, or dprobs
  const void* probs;  // backward only
  void* out;
  const uint8_t* hidden;
  int64_t hidden_stride[3];  // of batch, head and query
  int64_t num_heads, num_queries, num_keys;
  float scale;
  bool causal;

  const uint8_t* hidden_row(int64_t row) const {
    if (hidden == nullptr) return nullptr;
    const int64_t query = row % num_queries;
    const int64_t head = row / num_queries % num_heads;
    const int64_t batch = row / num_queries / num_heads;
    return hidden + batch * hidden_stride[0] + head * hidden_stride[1] + query * hidden_stride[2];
  }
  // The keys of a row that are not hidden by the causal mask.
  int64_t num_seen(int64_t row) const { return causal ? row % num_queries + 1 : num_keys; }
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/masked_softmax.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// All ones where a byte is not 0.
template <typename Span>
ACCEL_INLINE VecI32 load_hidden(const uint8_t* hidden, Span span) {
  uint8_t bytes[16] = {};
  if constexpr (std::is_same_v<Span, Full>) {
    std::memcpy(bytes, hidden, kLanes);
  } else {
    std::memcpy(bytes, hidden, span.lanes);
  }
#if ACCEL_LANES == 16
  const VecI32 lanes = (VecI32)_mm512_cvtepu8_epi32(load_bits<__m128i>(bytes));
#elif ACCEL_LANES == 8
  const VecI32 lanes = (VecI32)_mm256_cvtepu8_epi32(load_bits<__m128i>(bytes));
#else
  VecI32 lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = bytes[i];
#endif
  return lanes != 0;
}

template <typename T>
ACCEL_INLINE void zero_rest(T* row, int64_t begin, int64_t end) {
  std::memset(static_cast<void*>(row + begin), 0, (end - begin) * sizeof(T));
}

// Rows [begin, end); `z` is scratch for one.
template <typename T, bool kMask>
void softmax_forward(const SoftmaxRows& args, int64_t begin, int64_t end, float* z) {
  const Vec hidden_score = broadcast(-10000.0f);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.in) + row * args.num_keys;
    T* probs = static_cast<T*>(args.out) + row * args.num_keys;
    const uint8_t* hidden = args.hidden_row(row);
    const int64_t seen = args.num_seen(row);

    const Vec lowest = broadcast(-__builtin_inff());
    Vec largest[4] = {lowest, lowest, lowest, lowest};
    for_each_vec<4>(seen, [&](int64_t col, int k, auto span) {
      Vec v = load(x + col, span) * args.scale;
      if constexpr (kMask) v = load_hidden(hidden + col, span) ? hidden_score : v;
      store(z + col, v, span);
      if constexpr (std::is_same_v<decltype(span), Tail>) {
        for (int i = span.lanes; i < kLanes; ++i) v[i] = -__builtin_inff();
      }
      largest[k] = max(v, largest[k]);
    });
    const float shift = max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));

    Vec sums[4] = {};
    for_each_vec<4>(seen, [&](int64_t col, int k, auto span) {
      const Vec e = keep(exp(load(z + col, span) - shift), span);
      store(z + col, e, span);
      sums[k] += e;
    });
    const float inverse = 1.0f / sum(tree_sum(sums));
    for_each_vec<2>(seen, [&](int64_t col, int, auto span) {
      store(probs + col, load(z + col, span) * inverse, span);
    });
    zero_rest(probs, seen, args.num_keys);
  }
}

template <typename T, bool kMask>
void softmax_backward(const SoftmaxRows& args, int64_t begin, int64_t end, float*) {
  for (int64_t row = begin; row < end; ++row) {
    const T* dprobs = static_cast<const T*>(args.in) + row * args.num_keys;
    const T* probs = static_cast<const T*>(args.probs) + row * args.num_keys;
    T* dx = static_cast<T*>(args.out) + row * args.num_keys;
    const uint8_t* hidden = args.hidden_row(row);
    const int64_t seen = args.num_seen(row);

    Vec dots[4] = {};
    for_each_vec<4>(seen, [&](int64_t col, int k, auto span) {
      dots[k] += load(probs + col, span) * load(dprobs + col, span);
    });
    const float dot = sum(tree_sum(dots));
    for_each_vec<2>(seen, [&](int64_t col, int, auto span) {
      Vec v = load(probs + col, span) * (load(dprobs + col, span) - dot) * args.scale;
      if constexpr (kMask) v = load_hidden(hidden + col, span) ? Vec{} : v;
      store(dx + col, v, span);
    });
    zero_rest(dx, seen, args.num_keys);
  }
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;

// Contiguous along the keys; broadcast by strides along all else.
std::optional<Tensor> expand_mask(const std::optional<Tensor>& mask, const Tensor& x) {
  if (!mask.has_value()) return std::nullopt;
  ACCEL_CHECK_VALUE(
      mask->scalar_type() == at::kBool, "masked_softmax: mask must be bool, got ",
      mask->scalar_type());
  Tensor rows = *mask;
  if (rows.dim() == 0 || rows.size(-1) != x.size(-1)) {
    std::vector<int64_t> shape = rows.dim() == 0 ? std::vector<int64_t>{1} : rows.sizes().vec();
    shape.back() = x.size(-1);
    rows = rows.expand(shape);
  }
  if (rows.stride(-1) != 1) rows = rows.contiguous();
  return rows.expand(x.sizes());
}

template <typename Kernel>
Tensor over_rows(
    Kernel kernel, const Tensor& in, const Tensor& probs, const std::optional<Tensor>& mask,
    double scale, bool causal) {
  Tensor out = at::empty(in.sizes(), in.options());
  if (in.numel() == 0) return out;
  SoftmaxRows rows{
      .in = in.const_data_ptr(),
      .probs = probs.defined() ? probs.const_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .hidden = nullptr,
      .hidden_stride = {},
      .num_heads = in.size(1),
      .num_queries = in.size(2),
      .num_keys = in.size(3),
      .scale = static_cast<float>(scale),
      .causal = causal};
  if (mask.has_value()) {
    rows.hidden = reinterpret_cast<const uint8_t*>(mask->const_data_ptr<bool>());
    for (int i = 0; i < 3; ++i) rows.hidden_stride[i] = mask->stride(i);
  }
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / rows.num_keys);  // worth waking a thread
  at::parallel_for(0, in.numel() / rows.num_keys, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(rows.num_keys);
    kernel(rows, begin, end, scratch.data());
  });
  return out;
}

void check_rows(const Tensor& x, bool causal, bool masked) {
  ACCEL_CHECK_VALUE(
      x.dim() == 4, "masked_softmax: x must have shape [B, H, Q, K], got ", x.sizes());
  ACCEL_CHECK_VALUE(
      !causal || (!masked && x.size(2) == x.size(3)),
      "masked_softmax: causal takes no mask and as many queries as keys, got x ", x.sizes());
}

Tensor masked_softmax_fwd_cpu(
    const Tensor& x_in, const std::optional<Tensor>& mask_in, double scale, bool causal) {
  check_rows(x_in, causal, mask_in.has_value());
  const Tensor x = x_in.contiguous();
  const std::optional<Tensor> mask = expand_mask(mask_in, x);
  auto* kernel = float_kernel(x.scalar_type(), "masked_softmax", [&]<typename T> {
    return mask ? ACCEL_FOR_THIS_CPU(softmax_forward<T, true>)
                : ACCEL_FOR_THIS_CPU(softmax_forward<T, false>);
  });
  return over_rows(kernel, x, Tensor(), mask, scale, causal);
}

Tensor masked_softmax_bwd_cpu(
    const Tensor& dprobs_in, const Tensor& probs_in, const std::optional<Tensor>& mask_in,
    double scale, bool causal) {
  check_rows(probs_in, causal, mask_in.has_value());
  ACCEL_CHECK_VALUE(
      dprobs_in.sizes() == probs_in.sizes() && dprobs_in.scalar_type() == probs_in.scalar_type(),
      "masked_softmax backward: dprobs must be like probs ", probs_in.sizes(), ", got ",
      dprobs_in.sizes());
  const Tensor dprobs = dprobs_in.contiguous();
  const Tensor probs = probs_in.contiguous();
  const std::optional<Tensor> mask = expand_mask(mask_in, probs);
  auto* kernel = float_kernel(probs.scalar_type(), "masked_softmax backward", [&]<typename T> {
    return mask ? ACCEL_FOR_THIS_CPU(softmax_backward<T, true>)
                : ACCEL_FOR_THIS_CPU(softmax_backward<T, false>);
  });
  return over_rows(kernel, dprobs, probs, mask, scale, causal);
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("masked_softmax_fwd", &masked_softmax_fwd_cpu);
  m.impl("masked_softmax_bwd", &masked_softmax_bwd_cpu);
}

}  // namespace
}  // namespace accel
#endif
