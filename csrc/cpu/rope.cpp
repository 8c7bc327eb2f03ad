// Rotary position embedding on CPU. The maths: accel/ops/rope.py.
//
// A token's cosines and sines are read once for all of its heads, of all tensors of the call.

#ifndef ACCEL_ISA  // the first time through this file
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "accel/check.h"
#include "accel/dtype.h"
#include "norm.h"

namespace accel {

struct RopeTensor {
  const void* x;  // [S, B, H, D], its last stride 1
  void* y;        // [S, B, H, D], contiguous
  int64_t stride_S, stride_B, stride_H;  // of x, in elements
  int64_t num_heads, head_dim;
};

struct RopeCall {
  std::vector<RopeTensor> tensors;
  std::vector<int64_t> row_of_token;  // of the tables, for each of S; empty: the same number
  const float* cos;                   // [rows, 1 or B, half or 2 half]
  const float* sin;
  int64_t row_stride, batch_stride;
  int64_t num_batch;
  int64_t half;    // pairs that are rotated
  int64_t second;  // where a table row has the second members of the pairs: half, or 0 if as the first
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/rope.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

struct Rotated {
  Vec first, second;
};

// Elements index[i] of low followed by high.
ACCEL_INLINE Vec pick(Vec low, Vec high, VecI32 index) {
#if __has_builtin(__builtin_shuffle)
  return __builtin_shuffle(low, high, index);
#else
  Vec picked;
  for (int i = 0; i < kLanes; ++i) picked[i] = index[i] < kLanes ? low[index[i]] : high[index[i] - kLanes];
  return picked;
#endif
}

ACCEL_INLINE Rotated deinterleave(Vec low, Vec high) {
  VecI32 even;
  for (int i = 0; i < kLanes; ++i) even[i] = 2 * i;
  return {pick(low, high, even), pick(low, high, even + 1)};
}

ACCEL_INLINE Rotated interleave(Rotated pair) {
  VecI32 low;
  for (int i = 0; i < kLanes; ++i) low[i] = i / 2 + (i % 2) * kLanes;
  return {pick(pair.first, pair.second, low), pick(pair.first, pair.second, low + kLanes / 2)};
}

// Pairs [j, j + kLanes) of a head: side by side in memory, or `half` apart.
template <bool kInterleaved, typename T>
ACCEL_INLINE Rotated load_pairs(const T* head, int64_t j, int64_t half, Full full) {
  if constexpr (!kInterleaved) return {load(head + j, full), load(head + half + j, full)};
  return deinterleave(load(head + 2 * j, full), load(head + 2 * j + kLanes, full));
}

template <bool kInterleaved, typename T>
ACCEL_INLINE Rotated load_pairs(const T* head, int64_t j, int64_t half, Tail tail) {
  if constexpr (!kInterleaved) return {load(head + j, tail), load(head + half + j, tail)};
  T lanes[2 * kLanes] = {};
  std::memcpy(static_cast<void*>(lanes), head + 2 * j, 2 * tail.lanes * sizeof(T));
  return load_pairs<true>(lanes, 0, kLanes, Full{});
}

template <bool kInterleaved, typename T>
ACCEL_INLINE void store_pairs(T* head, int64_t j, int64_t half, Rotated pair, Full full) {
  if constexpr (!kInterleaved) {
    store(head + j, pair.first, full);
    store(head + half + j, pair.second, full);
  } else {
    const Rotated mixed = interleave(pair);
    store(head + 2 * j, mixed.first, full);
    store(head + 2 * j + kLanes, mixed.second, full);
  }
}

template <bool kInterleaved, typename T>
ACCEL_INLINE void store_pairs(T* head, int64_t j, int64_t half, Rotated pair, Tail tail) {
  if constexpr (!kInterleaved) {
    store(head + j, pair.first, tail);
    store(head + half + j, pair.second, tail);
  } else {
    T lanes[2 * kLanes];
    store_pairs<true>(lanes, 0, kLanes, pair, Full{});
    std::memcpy(static_cast<void*>(head + 2 * j), lanes, 2 * tail.lanes * sizeof(T));
  }
}

// Pairs [j, j + 2 kLanes): whole lines, for kStream.
template <bool kInterleaved, bool kStream, typename T>
ACCEL_INLINE void store_pairs(T* head, int64_t j, int64_t half, Rotated a, Rotated b) {
  if constexpr (!kInterleaved) {
    store<kStream>(head + j, a.first, b.first);
    store<kStream>(head + half + j, a.second, b.second);
  } else {
    const Rotated mixed_a = interleave(a), mixed_b = interleave(b);
    store<kStream>(head + 2 * j, mixed_a.first, mixed_a.second);
    store<kStream>(head + 2 * (j + kLanes), mixed_b.first, mixed_b.second);
  }
}

struct Angles {
  const float* cos;
  const float* sin;
  int64_t second;

  // The rotation, or its transpose: with one angle for both members, the rotation back.
  template <bool kInverse, typename Span>
  ACCEL_INLINE Rotated rotate(Rotated x, int64_t j, Span span) const {
    const Vec cos_1 = load(cos + j, span), cos_2 = load(cos + second + j, span);
    const Vec sin_1 = load(sin + j, span), sin_2 = load(sin + second + j, span);
    if constexpr (kInverse) {
      return {x.first * cos_1 + x.second * sin_2, x.second * cos_2 - x.first * sin_1};
    }
    return {x.first * cos_1 - x.second * sin_1, x.second * cos_2 + x.first * sin_2};
  }
};

template <typename T, bool kInterleavedIn, bool kInterleavedOut, bool kInverse, bool kStream>
ACCEL_INLINE void rope_head(const T* x, T* y, const Angles& angles, int64_t half) {
  const auto rotated = [&](int64_t j, auto span) {
    const Rotated pair = load_pairs<kInterleavedIn>(x, j, half, span);
    return angles.rotate<kInverse>(pair, j, span);
  };
  // Of the heads to come, where they follow one another. 2048 x 32 x 128 bf16, 2 threads of an Intel Xeon:
  // 1.05 ms, without 1.38, where a copy takes 0.76.
  constexpr int64_t kAhead = 1024;
  int64_t j = 0;
  for (; j + 2 * kLanes <= half; j += 2 * kLanes) {
    prefetch_pair(x + kAhead + 2 * j);
    prefetch_pair(x + kAhead + 2 * j + 2 * kLanes);
    const Rotated a = rotated(j, Full{}), b = rotated(j + kLanes, Full{});
    store_pairs<kInterleavedOut, kStream>(y, j, half, a, b);
  }
  for (; j + kLanes <= half; j += kLanes) {
    store_pairs<kInterleavedOut>(y, j, half, rotated(j, Full{}), Full{});
  }
  if (j < half) {
    const Tail tail{half - j};
    store_pairs<kInterleavedOut>(y, j, half, rotated(j, tail), tail);
  }
}

// Tokens [begin, end) of S B.
template <typename T, bool kInterleavedIn, bool kInterleavedOut, bool kInverse, bool kStream>
void rope(const RopeCall& call, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t s = token / call.num_batch, b = token % call.num_batch;
    const int64_t row = call.row_of_token.empty() ? s : call.row_of_token[s];
    const int64_t at = row * call.row_stride + b * call.batch_stride;
    const Angles angles{call.cos + at, call.sin + at, call.second};
    for (const RopeTensor& t : call.tensors) {
      const T* x = static_cast<const T*>(t.x) + s * t.stride_S + b * t.stride_B;
      T* y = static_cast<T*>(t.y) + token * t.num_heads * t.head_dim;
      const int64_t kept = t.head_dim - 2 * call.half;
      for (int64_t h = 0; h < t.num_heads; ++h, x += t.stride_H, y += t.head_dim) {
        rope_head<T, kInterleavedIn, kInterleavedOut, kInverse, kStream>(x, y, angles, call.half);
        if (kept) {
          std::memcpy(static_cast<void*>(y + 2 * call.half), x + 2 * call.half, kept * sizeof(T));
        }
      }
    }
  }
  if constexpr (kStream) stream_fence();
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;

// What the values must be, so that `num_tokens` rows are all that is stored, however large they are. Their
// differences are exact as unsigned numbers.
template <typename T>
void check_sequences(const Tensor& cu_seqlens, int64_t cp_size, int64_t num_tokens) {
  const T* start = cu_seqlens.const_data_ptr<T>();
  const int64_t last = cu_seqlens.numel() - 1;
  const auto between = [&](int64_t i, int64_t j) {
    return static_cast<uint64_t>(start[j]) - static_cast<uint64_t>(start[i]);
  };
  for (int64_t i = 0; i < last; ++i) {
    const bool splits = cp_size == 1 || between(i, i + 1) % (2 * static_cast<uint64_t>(cp_size)) == 0;
    ACCEL_CHECK_VALUE(start[i] <= start[i + 1] && splits, "rope: cu_seqlens must not fall, and over ",
                      cp_size, " context-parallel ranks each length must split in 2 chunks for each; "
                      "sequence ", i, " is [", start[i], ", ", start[i + 1], ")");
  }
  const uint64_t held = between(0, last) / static_cast<uint64_t>(cp_size);
  ACCEL_CHECK_VALUE(held == static_cast<uint64_t>(num_tokens), "rope: cu_seqlens hold ", held,
                    " tokens of this context-parallel rank, q has ", num_tokens);
}

template <typename T>
void add_sequences(
    const Tensor& cu_seqlens, uint64_t cp_size, uint64_t cp_rank, bool packed,
    std::vector<int64_t>& rows) {
  const T* start = cu_seqlens.const_data_ptr<T>();
  for (int64_t i = 0; i + 1 < cu_seqlens.numel(); ++i) {
    const uint64_t origin = static_cast<uint64_t>(start[i]), offset = packed ? origin : 0;
    const uint64_t whole = static_cast<uint64_t>(start[i + 1]) - origin, length = whole / cp_size;
    // Rank r has chunks r and 2 cp_size - 1 - r of 2 cp_size.
    const uint64_t head = cp_size == 1 ? length : length / 2;
    for (uint64_t j = 0; j < head; ++j) rows.push_back(static_cast<int64_t>(offset + cp_rank * head + j));
    const uint64_t tail_at = offset + whole - (cp_rank + 1) * head;
    for (uint64_t j = 0; j < length - head; ++j) rows.push_back(static_cast<int64_t>(tail_at + j));
  }
}

// The table row of each of T tokens of packed sequences. With as many rows as tokens (of all
// ranks), every token has its own; else positions start at 0 in each sequence.
std::vector<int64_t> packed_rows(
    const Tensor& cu_seqlens_in, int64_t cp_size, int64_t cp_rank, int64_t num_tokens,
    int64_t num_rows) {
  const Tensor cu_seqlens = cu_seqlens_in.contiguous();
  ACCEL_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1 &&
                        (cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong),
                    "rope: cu_seqlens must be int32 or int64 [sequences + 1], got ",
                    cu_seqlens.scalar_type(), cu_seqlens.sizes());
  ACCEL_CHECK_VALUE(cp_size >= 1 && 0 <= cp_rank && cp_rank < cp_size,
                    "rope: cp_rank must be in [0, cp_size), got ", cp_rank, " of ", cp_size);
  const bool is_int = cu_seqlens.scalar_type() == at::kInt;
  (is_int ? check_sequences<int> : check_sequences<int64_t>)(cu_seqlens, cp_size, num_tokens);
  std::vector<int64_t> rows;
  rows.reserve(num_tokens);
  const int64_t total = is_int ? cu_seqlens.const_data_ptr<int>()[cu_seqlens.numel() - 1]
                               : cu_seqlens.const_data_ptr<int64_t>()[cu_seqlens.numel() - 1];
  (is_int ? add_sequences<int> : add_sequences<int64_t>)(
      cu_seqlens, cp_size, cp_rank, total == num_rows, rows);
  for (const int64_t row : rows) {
    ACCEL_CHECK_VALUE(0 <= row && row < num_rows, "rope: position ", row, " is beyond the ", num_rows,
                      " rows of freqs");
  }
  return rows;
}

void check_tables(
    const Tensor& cos, const Tensor& sin, int64_t rotary_dim, const Tensor& x, bool packed) {
  const bool fits = cos.dim() == 3 && cos.sizes() == sin.sizes() && cos.is_contiguous() &&
      sin.is_contiguous() && cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat &&
      (cos.size(1) == 1 || cos.size(1) == x.size(1)) &&
      (cos.size(2) == rotary_dim || 2 * cos.size(2) == rotary_dim);
  ACCEL_CHECK_VALUE(fits, "rope: cos and sin must be contiguous fp32 [rows, 1 or B, rotary_dim (",
                    rotary_dim, ") or half of it], got ", cos.scalar_type(), cos.sizes(), " and ",
                    sin.scalar_type(), sin.sizes(), " for x ", x.sizes());
  ACCEL_CHECK_VALUE(packed || cos.size(0) >= x.size(0), "rope: freqs must have a row for each of ",
                    x.size(0), " positions, got ", cos.size(0));
}

void check_tensor(const Tensor& x, const Tensor& first, int64_t rotary_dim) {
  ACCEL_CHECK_VALUE(x.dim() == 4 && x.sizes().slice(0, 2) == first.sizes().slice(0, 2) &&
                        x.scalar_type() == first.scalar_type(),
                    "rope: q and k must be [S, B, heads, head_dim] of one dtype, got ",
                    first.scalar_type(), first.sizes(), " and ", x.scalar_type(), x.sizes());
  ACCEL_CHECK_VALUE(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= x.size(3),
                    "rope: the rotary dimension must be even and at most the head's ", x.size(3),
                    ", got ", rotary_dim);
}

template <typename T, bool kInverse, bool kStream>
auto rope_kernel(bool interleaved_in, bool interleaved_out) {
  if (interleaved_in) {
    return interleaved_out ? ACCEL_FOR_THIS_CPU(rope<T, true, true, kInverse, kStream>)
                           : ACCEL_FOR_THIS_CPU(rope<T, true, false, kInverse, kStream>);
  }
  return interleaved_out ? ACCEL_FOR_THIS_CPU(rope<T, false, true, kInverse, kStream>)
                         : ACCEL_FOR_THIS_CPU(rope<T, false, false, kInverse, kStream>);
}

std::vector<Tensor> rope_cpu(
    at::TensorList xs, const Tensor& cos, const Tensor& sin,
    const std::optional<Tensor>& cu_seqlens, int64_t cp_size, int64_t cp_rank, int64_t rotary_dim,
    bool interleaved_in, bool interleaved_out, bool inverse) {
  ACCEL_CHECK_VALUE(!xs.empty() && xs[0].dim() == 4, "rope: needs at least one [S, B, heads, head_dim]");
  const Tensor& first = xs[0];
  for (const Tensor& x : xs) check_tensor(x, first, rotary_dim);
  check_tables(cos, sin, rotary_dim, first, cu_seqlens.has_value());
  RopeCall call{
      .cos = cos.const_data_ptr<float>(),
      .sin = sin.const_data_ptr<float>(),
      .row_stride = cos.size(1) * cos.size(2),
      .batch_stride = cos.size(1) == 1 ? 0 : cos.size(2),
      .num_batch = first.size(1),
      .half = rotary_dim / 2,
      .second = cos.size(2) == rotary_dim ? rotary_dim / 2 : 0};
  if (cu_seqlens) {
    call.row_of_token = packed_rows(*cu_seqlens, cp_size, cp_rank, first.size(0), cos.size(0));
  }
  std::vector<Tensor> inputs, outputs;
  int64_t elements_per_token = 0;
  bool stream = true;
  for (const Tensor& x_in : xs) {
    const Tensor x = x_in.stride(3) == 1 || x_in.size(3) <= 1 ? x_in : x_in.contiguous();
    Tensor y = at::empty(x.sizes(), x.options());
    elements_per_token += x.size(2) * x.size(3);
    stream = stream && should_stream(y, x.size(3)) && should_stream(y, rotary_dim / 2);
    call.tensors.push_back({x.const_data_ptr(), y.mutable_data_ptr(), x.stride(0), x.stride(1),
                            x.stride(2), x.size(2), x.size(3)});
    inputs.push_back(x);
    outputs.push_back(std::move(y));
  }
  auto* kernel = float_kernel(first.scalar_type(), "rope", [&]<typename T> {
    const auto choose = [&]<bool kInverse> {
      return stream ? rope_kernel<T, kInverse, true>(interleaved_in, interleaved_out)
                    : rope_kernel<T, kInverse, false>(interleaved_in, interleaved_out);
    };
    return inverse ? choose.template operator()<true>() : choose.template operator()<false>();
  });
  const int64_t num_tokens = first.size(0) * first.size(1);
  at::parallel_for(0, num_tokens, rows_per_task(elements_per_token), [&](int64_t begin, int64_t end) {
    kernel(call, begin, end);
  });
  return outputs;
}

TORCH_LIBRARY_IMPL(accel, CPU, m) { m.impl("rope", &rope_cpu); }

}  // namespace
}  // namespace accel
#endif
