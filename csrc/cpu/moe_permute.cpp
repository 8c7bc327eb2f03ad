// Moving tokens to their experts and back on CPU. The maths: accel/ops/moe_permute.py.
//
// Everything runs in the order of the tokens: a token's row is read once for all its copies, or is
// written once from all of them, in the order of the copies. So no two threads write one row, and
// the order of every sum is given by the map alone.

#ifndef ACCEL_ISA  // the first time through this file
#include <algorithm>
#include <bit>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "accel/dtype.h"

namespace accel {

// The copies of token t are the rows at rows[first[t]], ..., rows[first[t + 1] - 1], ascending.
struct Copies {
  const int64_t* first;
  const int64_t* rows;
};

struct MoeRows {
  const void* tokens_in;  // [T, N]
  void* tokens_out;       // [T, N]
  const void* rows_in;    // [P, N]
  void* rows_out;         // [P, N]
  const float* weights;   // [P], or null: all 1
  float* dweights;        // [P], or null
  Copies copies;
  int64_t num_cols;
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/moe_permute.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// rows_out[p] = tokens_in[t] for every copy p of the tokens [begin, end). Bits are moved as floats;
// num_cols counts these.
template <bool kStream>
void moe_copy_to_rows(const MoeRows& args, int64_t begin, int64_t end) {
  const int64_t num_cols = args.num_cols;
  for (int64_t token = begin; token < end; ++token) {
    const float* from = static_cast<const float*>(args.tokens_in) + token * num_cols;
    for (int64_t i = args.copies.first[token]; i < args.copies.first[token + 1]; ++i) {
      float* to = static_cast<float*>(args.rows_out) + args.copies.rows[i] * num_cols;
      if constexpr (kStream) {
        for_each_vec<4>(num_cols, [&](int64_t col, int, auto span) {
          prefetch(from + num_cols, col);  // the next token
          store_one<true>(to + col, load(from + col, span), span);
        });
      } else {
        std::memcpy(to, from, num_cols * sizeof(float));
      }
    }
  }
  if constexpr (kStream) stream_fence();
}

// rows_out[p] = weights[p] tokens_in[t] and dweights[p] = sum(tokens_in[t] rows_in[p]).
template <typename T, bool kStream>
void moe_weigh_to_rows(const MoeRows& args, int64_t begin, int64_t end) {
  const int64_t num_cols = args.num_cols;
  for (int64_t token = begin; token < end; ++token) {
    const T* dout = static_cast<const T*>(args.tokens_in) + token * num_cols;
    for (int64_t i = args.copies.first[token]; i < args.copies.first[token + 1]; ++i) {
      const int64_t row = args.copies.rows[i];
      const T* in = static_cast<const T*>(args.rows_in) + row * num_cols;
      T* out = static_cast<T*>(args.rows_out) + row * num_cols;
      const float weight = args.weights[row];
      Vec dots[4] = {};
      for_each_vec<4>(num_cols, [&](int64_t col, int k, auto span) {
        const Vec v = load(dout + col, span);
        dots[k] += v * load(in + col, span);
        store_one<kStream>(out + col, v * weight, span);
      });
      args.dweights[row] = sum(tree_sum(dots));
    }
  }
  if constexpr (kStream) stream_fence();
}

// out = sum of weights[i] rows[i] over kCount rows, in fp32, rounded once. The next rows are prefetched.
template <typename T, bool kWeighted, bool kStream, int kCount>
ACCEL_INLINE void moe_sum(
    const T* const* rows, const T* const* next_rows, const float* weights, T* out,
    int64_t num_cols) {
  store_row<kStream>(out, num_cols, [&](int64_t col, int, auto span) {
    Vec total{};
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      prefetch(next_rows[i], col);
      const Vec v = load(rows[i] + col, span);
      total += kWeighted ? v * weights[i] : v;
    }
    return total;
  });
}

// tokens_out[t] = sum of weights[p] rows_in[p] over the copies p of t. The number of copies is known
// where the columns are looped over: else the compiler reads their addresses again for each column,
// which took twice as long (bf16, 2 copies).
template <typename T, bool kWeighted, bool kStream>
void moe_sum_rows(const MoeRows& args, int64_t begin, int64_t end) {
  constexpr int kMost = 8;
  const int64_t num_cols = args.num_cols;
  const T* in = static_cast<const T*>(args.rows_in);
  for (int64_t token = begin; token < end; ++token) {
    T* out = static_cast<T*>(args.tokens_out) + token * num_cols;
    const int64_t* copies = args.copies.rows + args.copies.first[token];
    const int64_t count = args.copies.first[token + 1] - args.copies.first[token];
    const int64_t left = args.copies.first[end] - args.copies.first[token];
    const T *rows[kMost], *next_rows[kMost];
    float weights[kMost];
    for (int64_t i = 0; i < count && i < kMost; ++i) {
      rows[i] = in + copies[i] * num_cols;
      next_rows[i] = in + copies[count + i < left ? count + i : i] * num_cols;
      weights[i] = kWeighted ? args.weights[copies[i]] : 1.0f;
    }
    switch (count) {
      case 0: moe_sum<T, kWeighted, kStream, 0>(rows, next_rows, weights, out, num_cols); break;
      case 1: moe_sum<T, kWeighted, kStream, 1>(rows, next_rows, weights, out, num_cols); break;
      case 2: moe_sum<T, kWeighted, kStream, 2>(rows, next_rows, weights, out, num_cols); break;
      case 3: moe_sum<T, kWeighted, kStream, 3>(rows, next_rows, weights, out, num_cols); break;
      case 4: moe_sum<T, kWeighted, kStream, 4>(rows, next_rows, weights, out, num_cols); break;
      case 5: moe_sum<T, kWeighted, kStream, 5>(rows, next_rows, weights, out, num_cols); break;
      case 6: moe_sum<T, kWeighted, kStream, 6>(rows, next_rows, weights, out, num_cols); break;
      case 7: moe_sum<T, kWeighted, kStream, 7>(rows, next_rows, weights, out, num_cols); break;
      case 8: moe_sum<T, kWeighted, kStream, 8>(rows, next_rows, weights, out, num_cols); break;
      default:
        for_each_vec<1>(num_cols, [&](int64_t col, int, auto span) {
          Vec total{};
          for (int64_t i = 0; i < count; ++i) {
            const Vec v = load(in + copies[i] * num_cols + col, span);
            total += kWeighted ? v * args.weights[copies[i]] : v;
          }
          store_one<kStream>(out + col, total, span);
        });
    }
  }
  if constexpr (kStream) stream_fence();
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Whether rows are written past the caches: they must be more than a cache would keep for their
// reader, and whole cache lines.
bool should_stream_rows(const Tensor& output) {
  constexpr size_t kMinBytes = 16 << 20;
  constexpr int64_t kLine = 64;
  const int64_t row_bytes = output.size(1) * output.element_size();
  const auto address = reinterpret_cast<uintptr_t>(output.const_data_ptr());
  return output.nbytes() >= kMinBytes && row_bytes % kLine == 0 && address % kLine == 0;
}

// What a row map says: for each row p its token and expert, and for each token its rows.
class RowMap {
 public:
  RowMap(const char* op, const Tensor& row_map, int64_t num_tokens)
      : num_tokens_(num_tokens), tokens_(row_map.numel()), experts_(row_map.numel()) {
    ACCEL_CHECK_VALUE(row_map.dim() == 1 && row_map.scalar_type() == at::kLong, op,
                      ": row_map must be int64 of shape [P], got ", row_map.scalar_type(),
                      row_map.sizes());
    ACCEL_CHECK_VALUE(num_tokens >= 0, op, ": num_tokens must not be negative, got ", num_tokens);
    const Tensor map = row_map.contiguous();
    read(op, map.const_data_ptr<int64_t>());
    group();
  }

  Copies copies() const { return {first_.data(), rows_.data()}; }
  int64_t num_rows() const { return tokens_.size(); }
  int64_t token(int64_t row) const { return tokens_[row]; }  // -1: padding
  int64_t expert(int64_t row) const { return experts_[row]; }
  int64_t last_expert() const { return last_expert_; }  // that has a row; 0 if none has

 private:
  void read(const char* op, const int64_t* map) {
    // A division is slow, and the next row nearly always belongs to the same expert.
    int64_t expert = 0, base = 0;
    for (int64_t row = 0; row < num_rows(); ++row) {
      const int64_t place = map[row];
      ACCEL_CHECK_VALUE(place >= -1 && (place == -1 || num_tokens_ > 0), op, ": row_map[", row,
                        "] must be -1 or name one of ", num_tokens_, " tokens, got ", place);
      if (place == -1) {
        tokens_[row] = -1;
        continue;
      }
      if (place < base || place - base >= num_tokens_) {
        expert = place / num_tokens_;
        base = expert * num_tokens_;
        last_expert_ = std::max(last_expert_, expert);
      }
      tokens_[row] = place - base;
      experts_[row] = expert;
    }
  }

  void group() {
    first_.assign(num_tokens_ + 1, 0);
    for (const int64_t token : tokens_) {
      if (token >= 0) ++first_[token + 1];
    }
    for (int64_t token = 0; token < num_tokens_; ++token) first_[token + 1] += first_[token];
    rows_.resize(first_[num_tokens_]);
    std::vector<int64_t> next(first_.begin(), first_.end() - 1);
    for (int64_t row = 0; row < num_rows(); ++row) {
      if (tokens_[row] >= 0) rows_[next[tokens_[row]]++] = row;
    }
  }

  int64_t num_tokens_;
  int64_t last_expert_ = 0;
  std::vector<int64_t> tokens_;
  std::vector<int64_t> experts_;
  std::vector<int64_t> first_;
  std::vector<int64_t> rows_;
};

// Where the probability of a row lies: at [token, expert] of a [T, E], or at its own place in a [P].
class Probs {
 public:
  Probs(const char* op, const Tensor& probs, const RowMap& map, int64_t num_tokens)
      : map_(map), by_row_(probs.dim() == 1), num_experts_(by_row_ ? 1 : probs.size(-1)) {
    const bool fits = by_row_ ? probs.size(0) == map.num_rows()
                              : probs.dim() == 2 && probs.size(0) == num_tokens &&
            (map.last_expert() < probs.size(1) || map.num_rows() == 0);
    ACCEL_CHECK_VALUE(fits, op, ": probs must have shape [", map.num_rows(), "], one for each row, "
                      "or [", num_tokens, ", E] with E above ", map.last_expert(), ", got ",
                      probs.sizes());
  }

  // The place of a row's probability, or -1 for padding.
  int64_t operator[](int64_t row) const {
    if (by_row_) return row;
    const int64_t token = map_.token(row);
    return token < 0 ? -1 : token * num_experts_ + map_.expert(row);
  }

 private:
  const RowMap& map_;
  bool by_row_;
  int64_t num_experts_;
};

// probs -> [P], 0 for padding.
template <typename T>
void gather(const Tensor& probs, const Probs& places, Tensor& out_P) {
  const T* from = static_cast<const T*>(probs.const_data_ptr());
  T* to = static_cast<T*>(out_P.mutable_data_ptr());
  for (int64_t row = 0; row < out_P.numel(); ++row) {
    const int64_t place = places[row];
    to[row] = place < 0 ? T(0) : from[place];
  }
}

Tensor gather_probs(const Tensor& probs_in, const Probs& places, int64_t num_rows) {
  const Tensor probs = probs_in.contiguous();
  Tensor out_P = at::empty({num_rows}, probs.options());
  switch (probs.element_size()) {  // bits are moved, whatever they mean
    case 2: gather<uint16_t>(probs, places, out_P); break;
    case 4: gather<uint32_t>(probs, places, out_P); break;
    case 8: gather<uint64_t>(probs, places, out_P); break;
    default: ACCEL_CHECK_VALUE(false, "moe_permute: no probs of dtype ", probs.scalar_type());
  }
  return out_P;
}

// The gradient of gather_probs. Rows that share a place add up in the order of the rows.
Tensor scatter_probs(
    const Tensor& dprobs_P, const Probs& places, at::IntArrayRef shape, at::ScalarType dtype) {
  const Tensor from = dprobs_P.to(at::kFloat).contiguous();
  Tensor to = at::zeros(shape, from.options());
  const float* in = from.const_data_ptr<float>();
  float* out = to.mutable_data_ptr<float>();
  for (int64_t row = 0; row < from.numel(); ++row) {
    if (const int64_t place = places[row]; place >= 0) out[place] += in[row];
  }
  return to.to(dtype);
}

void check_rows(const char* op, const char* name, const Tensor& rows) {
  ACCEL_CHECK_VALUE(rows.dim() == 2, op, ": ", name, " must have shape [rows, N], got ",
                    rows.sizes());
}

template <typename F>
void for_tokens(int64_t num_tokens, int64_t num_cols, F kernel) {
  // 32K elements are worth a thread of their own (see norm.h).
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, num_cols));
  at::parallel_for(0, num_tokens, grain, kernel);
}

void zero_padding(const RowMap& map, Tensor& rows) {
  const int64_t row_bytes = rows.size(1) * rows.element_size();
  char* data = static_cast<char*>(rows.mutable_data_ptr());
  for (int64_t row = 0; row < map.num_rows(); ++row) {
    if (map.token(row) < 0) std::memset(data + row * row_bytes, 0, row_bytes);
  }
}

// [T, N] -> [P, N]: a copy of its token in every row, 0 in padding.
Tensor copy_to_rows(const Tensor& tokens, const RowMap& map) {
  Tensor rows = at::empty({map.num_rows(), tokens.size(1)}, tokens.options());
  if (rows.numel() == 0) return rows;
  zero_padding(map, rows);
  const int64_t row_bytes = tokens.size(1) * tokens.element_size();
  if (row_bytes % sizeof(float) != 0) {  // an odd number of 16-bit columns
    const char* from = static_cast<const char*>(tokens.const_data_ptr());
    char* to = static_cast<char*>(rows.mutable_data_ptr());
    const int64_t grain = std::max<int64_t>(1, (1 << 16) / row_bytes);
    at::parallel_for(0, map.num_rows(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (map.token(row) < 0) continue;
        std::memcpy(to + row * row_bytes, from + map.token(row) * row_bytes, row_bytes);
      }
    });
    return rows;
  }
  const MoeRows args{
      .tokens_in = tokens.const_data_ptr(),
      .rows_out = rows.mutable_data_ptr(),
      .copies = map.copies(),
      .num_cols = row_bytes / static_cast<int64_t>(sizeof(float))};
  auto* kernel = should_stream_rows(rows) ? ACCEL_FOR_THIS_CPU(moe_copy_to_rows<true>)
                                          : ACCEL_FOR_THIS_CPU(moe_copy_to_rows<false>);
  for_tokens(tokens.size(0), tokens.size(1), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
  return rows;
}

// [P, N] -> [T, N]: the sum over each token's rows, weighted where weights_P is defined.
Tensor sum_rows(
    const char* op, const Tensor& rows, const RowMap& map, int64_t num_tokens,
    const Tensor& weights_P) {
  Tensor tokens = at::empty({num_tokens, rows.size(1)}, rows.options());
  if (tokens.numel() == 0) return tokens;
  const bool weighted = weights_P.defined();
  const MoeRows args{
      .tokens_out = tokens.mutable_data_ptr(),
      .rows_in = rows.const_data_ptr(),
      .weights = weighted ? weights_P.const_data_ptr<float>() : nullptr,
      .copies = map.copies(),
      .num_cols = rows.size(1)};
  const bool stream = should_stream_rows(tokens);
  auto* kernel = float_kernel(rows.scalar_type(), op, [&]<typename T> {
    return weighted ? stream ? ACCEL_FOR_THIS_CPU(moe_sum_rows<T, true, true>)
                             : ACCEL_FOR_THIS_CPU(moe_sum_rows<T, true, false>)
        : stream    ? ACCEL_FOR_THIS_CPU(moe_sum_rows<T, false, true>)
                    : ACCEL_FOR_THIS_CPU(moe_sum_rows<T, false, false>);
  });
  for_tokens(num_tokens, rows.size(1), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
  return tokens;
}

std::tuple<Tensor, Tensor> moe_permute_fwd_cpu(
    const Tensor& x, const Tensor& row_map, const OptionalTensor& probs) {
  check_rows("moe_permute", "x", x);
  const RowMap map("moe_permute", row_map, x.size(0));
  const Tensor permuted_probs = probs
      ? gather_probs(*probs, Probs("moe_permute", *probs, map, x.size(0)), map.num_rows())
      : at::empty({0}, x.options());
  return {copy_to_rows(x.contiguous(), map), permuted_probs};
}

// dprobs has the shape of the probs [T, num_experts]; without probs num_experts is 0.
std::tuple<Tensor, Tensor> moe_permute_bwd_cpu(
    const Tensor& dy, const Tensor& dpermuted_probs, const Tensor& row_map, int64_t num_tokens,
    int64_t num_experts, at::ScalarType probs_dtype) {
  check_rows("moe_permute backward", "dy", dy);
  const RowMap map("moe_permute backward", row_map, num_tokens);
  ACCEL_CHECK_VALUE(dy.size(0) == map.num_rows(), "moe_permute backward: dy must have ",
                    map.num_rows(), " rows, got ", dy.sizes());
  Tensor dx = sum_rows("moe_permute backward", dy.contiguous(), map, num_tokens, {});
  if (num_experts == 0) return {dx, at::empty({0}, dy.options().dtype(probs_dtype))};
  ACCEL_CHECK_VALUE(dpermuted_probs.dim() == 1 && dpermuted_probs.size(0) == map.num_rows(),
                    "moe_permute backward: the gradient of the permuted probs must have shape [",
                    map.num_rows(), "], got ", dpermuted_probs.sizes());
  const Tensor like = at::empty({num_tokens, num_experts}, dy.options());
  const Probs places("moe_permute backward", like, map, num_tokens);
  return {dx, scatter_probs(dpermuted_probs, places, like.sizes(), probs_dtype)};
}

Tensor moe_unpermute_fwd_cpu(
    const Tensor& y, const Tensor& row_map, int64_t num_tokens, const OptionalTensor& probs) {
  check_rows("moe_unpermute", "y", y);
  const RowMap map("moe_unpermute", row_map, num_tokens);
  ACCEL_CHECK_VALUE(y.size(0) == map.num_rows(), "moe_unpermute: y must have ", map.num_rows(),
                    " rows like row_map, got ", y.sizes());
  Tensor weights_P;
  if (probs) {
    const Probs places("moe_unpermute", *probs, map, num_tokens);
    weights_P = gather_probs(probs->to(at::kFloat), places, map.num_rows());
  }
  return sum_rows("moe_unpermute", y.contiguous(), map, num_tokens, weights_P);
}

Tensor moe_unpermute_bwd_cpu(const Tensor& dout, const Tensor& row_map) {
  check_rows("moe_unpermute backward", "dout", dout);
  return copy_to_rows(dout.contiguous(), RowMap("moe_unpermute backward", row_map, dout.size(0)));
}

std::tuple<Tensor, Tensor> moe_unpermute_probs_bwd_cpu(
    const Tensor& dout_in, const Tensor& y_in, const Tensor& row_map, const Tensor& probs) {
  constexpr const char* op = "moe_unpermute backward";
  check_rows(op, "dout", dout_in);
  const Tensor dout = dout_in.contiguous();
  const Tensor y = y_in.contiguous();
  const RowMap map(op, row_map, dout.size(0));
  ACCEL_CHECK_VALUE(y.dim() == 2 && y.size(0) == map.num_rows() && y.size(1) == dout.size(1) &&
                        y.scalar_type() == dout.scalar_type(),
                    op, ": y must be ", dout.scalar_type(), " of shape [", map.num_rows(), ", ",
                    dout.size(1), "], got ", y.scalar_type(), y.sizes());
  const Probs places(op, probs, map, dout.size(0));
  const Tensor weights_P = gather_probs(probs.to(at::kFloat), places, map.num_rows());
  Tensor dweights_P = at::zeros(weights_P.sizes(), weights_P.options());
  Tensor dy = at::empty(y.sizes(), y.options());
  zero_padding(map, dy);
  const MoeRows args{
      .tokens_in = dout.const_data_ptr(),
      .rows_in = y.const_data_ptr(),
      .rows_out = dy.mutable_data_ptr(),
      .weights = weights_P.const_data_ptr<float>(),
      .dweights = dweights_P.mutable_data_ptr<float>(),
      .copies = map.copies(),
      .num_cols = y.size(1)};
  const bool stream = should_stream_rows(dy);
  auto* kernel = float_kernel(y.scalar_type(), op, [&]<typename T> {
    return stream ? ACCEL_FOR_THIS_CPU(moe_weigh_to_rows<T, true>)
                  : ACCEL_FOR_THIS_CPU(moe_weigh_to_rows<T, false>);
  });
  for_tokens(dout.size(0), y.size(1), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
  return {dy, scatter_probs(dweights_P, places, probs.sizes(), probs.scalar_type())};
}

// Calls f(token, expert) for every token that goes to an expert, token by token.
static_assert(std::endian::native == std::endian::little);
template <typename F>
void for_each_routed(const Tensor& routing_map, F f) {
  const int64_t num_experts = routing_map.size(1);
  const bool* map = routing_map.const_data_ptr<bool>();
  for (int64_t token = 0; token < routing_map.size(0); ++token) {
    const bool* row = map + token * num_experts;
    for (int64_t expert = 0; expert < num_experts; expert += 8) {
      uint64_t eight = 0;  // most are 0: look at eight at once
      std::memcpy(&eight, row + expert, std::min<int64_t>(8, num_experts - expert));
      for (; eight != 0; eight &= eight - 1) f(token, expert + std::countr_zero(eight) / 8);
    }
  }
}

// `capacity` rows for every expert, or as many as it has tokens, up to a multiple of `align`.
Tensor moe_row_map_cpu(
    const Tensor& routing_map_in, int64_t num_rows, int64_t capacity, int64_t align) {
  ACCEL_CHECK_VALUE(routing_map_in.dim() == 2 && routing_map_in.scalar_type() == at::kBool,
                    "moe_row_map: routing_map must be bool of shape [T, E], got ",
                    routing_map_in.scalar_type(), routing_map_in.sizes());
  ACCEL_CHECK_VALUE(num_rows >= 0 && align >= 1,
                    "moe_row_map: num_rows must not be negative and align be 1 or more, got ",
                    num_rows, " and ", align);
  const Tensor routing_map = routing_map_in.contiguous();
  const int64_t num_tokens = routing_map.size(0);
  const int64_t num_experts = routing_map.size(1);
  // An expert has at most num_tokens + align rows; all routing maps have less than 2^62 elements.
  constexpr int64_t kMost = int64_t{1} << 62;
  ACCEL_CHECK_VALUE((capacity >= 0 ? capacity : align) <= kMost / std::max<int64_t>(num_experts, 1),
                    "moe_row_map counts rows to ", kMost, ", got ", num_experts, " experts with capacity ",
                    capacity, " and align ", align);
  std::vector<int64_t> next(num_experts + 1, 0);  // first the counts, then where the next row goes
  for_each_routed(routing_map, [&](int64_t, int64_t expert) { ++next[expert + 1]; });
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t wanted = capacity >= 0 ? capacity : (next[expert + 1] + align - 1) / align * align;
    next[expert + 1] = next[expert] + wanted;
  }
  const std::vector<int64_t> last(next.begin() + 1, next.end());
  Tensor row_map = at::full({num_rows}, -1, at::kLong);
  int64_t* rows = row_map.mutable_data_ptr<int64_t>();
  for_each_routed(routing_map, [&](int64_t token, int64_t expert) {
    const int64_t row = next[expert];
    if (row < last[expert]) ++next[expert];
    if (row < std::min(last[expert], num_rows)) rows[row] = expert * num_tokens + token;
  });
  if (capacity < 0) return row_map;
  // Rows that an expert has left over go to tokens that did not ask for it, the first ones first.
  const bool* map = routing_map.const_data_ptr<bool>();
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    for (int64_t token = 0; token < num_tokens && next[expert] < last[expert]; ++token) {
      if (map[token * num_experts + expert]) continue;
      const int64_t row = next[expert]++;
      if (row < num_rows) rows[row] = expert * num_tokens + token;
    }
  }
  return row_map;
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("moe_row_map", &moe_row_map_cpu);
  m.impl("moe_permute_fwd", &moe_permute_fwd_cpu);
  m.impl("moe_permute_bwd", &moe_permute_bwd_cpu);
  m.impl("moe_unpermute_fwd", &moe_unpermute_fwd_cpu);
  m.impl("moe_unpermute_bwd", &moe_unpermute_bwd_cpu);
  m.impl("moe_unpermute_probs_bwd", &moe_unpermute_probs_bwd_cpu);
}

}  // namespace
}  // namespace accel
#endif
