// Attention on CPU. The maths, the layouts and what is saved: accel/ops/attention.py.
//
// Flash attention: blocks of queries against blocks of keys. The products of two blocks are ATen's
// brgemm (oneDNN); everything between them is a kernel of this file, compiled for every instruction
// set. The host code at the end walks the blocks.
//
// Measured on one core of an AMD Zen 4 (GFLOP/s, M x N x K of 32..256 x 64..512 x 64..512): brgemm of
// bf16 217 to 233, at::mm of a tile 188, at::mm of 2048 x 2048 x 2048 211; brgemm of fp32 116. On one core
// of an Intel Xeon brgemm uses AMX: 64 x 512 x 128 1670, 64 x 128 x 512 2440, at::mm of 2048^3 1340; there
// half the time of the forward is between the products.
//
// Blocks are packed as brgemm wants its operands (T in memory, E in a block), zero-padded so that it
// has to generate few kernels, 0.2 ms each:
//   rows     [rows][cols], the left operand.
//   paired   the right operand. bf16: two rows in each 32-bit lane, [rows / 2][cols][2]; fp32: rows.
// bf16 is multiplied in bf16 and summed in fp32 where the CPU can; all else is multiplied in fp32.

#ifndef ACCEL_ISA  // the first time through this file
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "accel/check.h"
#include "accel/dtype.h"

namespace accel {

// Every block's sides are multiples of this: whole vectors, and whole tiles of AMX.
constexpr int64_t kGranule = 32;
constexpr int64_t kMaxLanes = 16;  // of any instruction set

// Rows of `pair<E>` share a 32-bit lane of a right operand.
template <typename E>
constexpr int64_t kPair = 4 / sizeof(E);

// Philox4x32-10 (Salmon et al. 2011). An element is dropped if its 32 random bits are below
// `threshold`; see `dropout_mask_ref` in accel/ops/attention.py for who gets which bits.
struct Dropout {
  uint32_t key[2];  // a sequence's seed
  uint32_t threshold;
  float scale;  // of what is kept

  Dropout of(int64_t seed) const {
    const auto halves = static_cast<uint64_t>(seed);
    return {{static_cast<uint32_t>(halves), static_cast<uint32_t>(halves >> 32)}, threshold, scale};
  }
};

// One block of probabilities' gradients; all blocks are [keys][queries], so that the statistics of
// the queries are vectors.
template <typename E>
struct GradientTile {
  const float* scores;
  const float* dprobs;
  const float* keep;   // what dropout multiplied with; null without dropout
  const float* lse;    // [queries], times log2(e)
  const float* delta;  // [queries]
  int64_t num_keys;
  int64_t num_queries;  // also the stride of every block
  float scale;          // times log2(e), as lse
  E* probs;
  E* dscores;
  E* dscores_paired;  // unused where E is float: rows are paired as they are
};

// One block of softmax: rows are queries, and there are whole vectors of them, whatever num_queries.
template <typename E>
struct SoftmaxTile {
  const float* scores;
  const float* keep;  // null without dropout
  int64_t num_queries;
  int64_t num_keys;
  int64_t stride;  // of scores, keep and probs
  float scale;     // times log2(e): powers of 2 are cheaper than those of e
  float* max;   // [queries], running, times log2(e)
  float* sums;  // [queries][lanes], running
  float* out;   // what was accumulated so far, to be rescaled; null at the first block
  int64_t out_cols;
  E* probs;
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/attention.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// Two vectors as bf16, one after the other. With AVX-512 by one instruction, of an extension that every CPU
// has whose brgemm takes bf16 (see multiplies_bf16); its intrinsic would need that extension in whatever
// inlines it.
ACCEL_INLINE VecU32 to_bf16(Vec first, Vec second) {
#if ACCEL_LANES == 16
  VecU32 words;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(words) : "v"(first), "v"(second));
  return words;
#else
  BFloat16 words[2 * kLanes];
  store(words, first, Full{});
  store(words + kLanes, second, Full{});
  return load_bits<VecU32>(words);
#endif
}

ACCEL_INLINE void store_bits(void* p, VecU32 bits) { std::memcpy(p, &bits, sizeof(bits)); }

// Two vectors of a row of a left operand.
ACCEL_INLINE void store_operand(float* p, Vec first, Vec second) {
  store(p, first, Full{});
  store(p + kLanes, second, Full{});
}

ACCEL_INLINE void store_operand(BFloat16* p, Vec first, Vec second) {
  store_bits(p, to_bf16(first, second));
}

// A vector in each of two rows of an operand: as a left one, and as a right one, where they are a pair.
ACCEL_INLINE void store_rows_of_operand(float* p, int64_t stride, float*, Vec even, Vec odd) {
  store(p, even, Full{});
  store(p + stride, odd, Full{});
}

ACCEL_INLINE void store_rows_of_operand(
    BFloat16* p, int64_t stride, BFloat16* paired, Vec even, Vec odd) {
  const VecU32 words = to_bf16(even, odd);
#if ACCEL_LANES == 16
  _mm256_storeu_si256((__m256i*)p, _mm512_castsi512_si256((__m512i)words));
  _mm256_storeu_si256((__m256i*)(p + stride), _mm512_extracti64x4_epi64((__m512i)words, 1));
  if (paired == nullptr) return;
  typedef uint16_t Index __attribute__((vector_size(64)));
  Index index;
  for (int i = 0; i < 2 * kLanes; ++i) index[i] = i / 2 + i % 2 * kLanes;
  store_bits(paired, (VecU32)_mm512_permutexvar_epi16((__m512i)index, (__m512i)words));
#else
  BFloat16 rows[2 * kLanes];
  store_bits(rows, words);
  for (int i = 0; i < kLanes; ++i) {
    p[i] = rows[i];
    p[i + stride] = rows[i + kLanes];
    if (paired == nullptr) continue;
    paired[2 * i] = rows[i];
    paired[2 * i + 1] = rows[i + kLanes];
  }
#endif
}

// Zeroes what a block of [rows][cols] leaves empty in [out_rows][out_cols].
template <typename E>
ACCEL_INLINE void pad(
    int64_t rows, int64_t cols, E* out, int64_t out_rows, int64_t out_cols) {
  if (rows == out_rows && cols == out_cols) return;
  std::memset(static_cast<void*>(out), 0, out_rows * out_cols * sizeof(E));
}

template <typename T, typename E>
void pack_rows(
    const T* in, int64_t stride, int64_t rows, int64_t cols, E* out, int64_t out_rows,
    int64_t out_cols) {
  pad(rows, cols, out, out_rows, out_cols);
  for (int64_t row = 0; row < rows; ++row) {
    if constexpr (std::is_same_v<T, E>) {
      std::memcpy(static_cast<void*>(out + row * out_cols), in + row * stride, cols * sizeof(T));
    } else {
      for_each_vec<1>(cols, [&](int64_t col, int, auto span) {
        store(out + row * out_cols + col, load(in + row * stride + col, span), span);
      });
    }
  }
}

template <typename T, typename E>
void pack_paired(
    const T* in, int64_t stride, int64_t rows, int64_t cols, E* out, int64_t out_rows,
    int64_t out_cols) {
  if constexpr (kPair<E> == 1) {
    pack_rows(in, stride, rows, cols, out, out_rows, out_cols);
  } else {
    static_assert(std::is_same_v<T, E>);
    pad(rows, cols, out, out_rows, out_cols);
    for (int64_t row = 0; row < rows; row += 2) {
      const T* even = in + row * stride;
      for_each_vec<1>(cols, [&](int64_t col, int, auto span) {
        const Vec odd = row + 1 < rows ? load(even + stride + col, span) : Vec{};
        // A bf16 number is the upper half of its lane.
        const VecU32 lanes =
            (bit_cast<VecU32>(load(even + col, span)) >> 16) | bit_cast<VecU32>(odd);
        store(reinterpret_cast<float*>(out + row * out_cols) + col, bit_cast<Vec>(lanes), span);
      });
    }
  }
}

// 4 x 4 lanes of 32 bits, rows to columns.
template <typename E>
ACCEL_INLINE void transpose_4x4(const E* in, int64_t stride, E* out, int64_t out_stride) {
  typedef uint32_t Lanes __attribute__((vector_size(16)));
  Lanes rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = load_bits<Lanes>(in + i * stride);
  // Interleaving row i with row i + 2, twice over, is the transpose.
  for (int round = 0; round < 2; ++round) {
    Lanes next[4];
    for (int i = 0; i < 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + 2], Lanes{0, 4, 1, 5});
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 2], Lanes{2, 6, 3, 7});
    }
    for (int i = 0; i < 4; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < 4; ++i) {
    std::memcpy(static_cast<void*>(out + i * out_stride), &rows[i], sizeof(Lanes));
  }
}

// The transpose of [rows][cols] as rows (kPaired false) or paired: out_rows >= cols.
template <bool kPaired, typename T, typename E>
void pack_transposed(
    const T* in, int64_t stride, int64_t rows, int64_t cols, E* out, int64_t out_rows,
    int64_t out_cols) {
  constexpr int64_t kTogether = kPaired ? kPair<E> : 1;
  constexpr int64_t kStrip = 16;  // rows whose cache lines stay in L1 while their columns are read
  pad(cols, rows, out, out_rows, out_cols);
  for (int64_t begin = 0; begin < rows; begin += kStrip) {
    const int64_t end = begin + kStrip < rows ? begin + kStrip : rows;
    int64_t col = 0;
    if constexpr (kTogether == 2 && std::is_same_v<T, E>) {  // two columns are 32 bits on either side
      for (; end - begin == kStrip && col + 8 <= cols; col += 8) {
        for (int64_t row = begin; row < end; row += 4) {
          transpose_4x4(
              in + row * stride + col, stride, out + col * out_cols + 2 * row, 2 * out_cols);
        }
      }
    }
    for (; col < cols; ++col) {
      E* to = out + (col / kTogether) * out_cols * kTogether + col % kTogether;
      for (int64_t row = begin; row < end; ++row) {
        if constexpr (std::is_same_v<T, E>) {
          to[row * kTogether] = in[row * stride + col];
        } else {
          to[row * kTogether] = static_cast<E>(static_cast<float>(in[row * stride + col]));
        }
      }
    }
  }
}

// [rows][cols] = scale * the transpose of [cols][in_stride].
template <typename T>
void unpack_transposed(
    const float* in, int64_t in_stride, float scale, int64_t rows, int64_t cols, T* out,
    int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      out[row * stride + col] = static_cast<T>(in[col * in_stride + row] * scale);
    }
  }
}

template <typename T>
void unpack_rows(
    const float* in, int64_t in_stride, float scale, int64_t rows, int64_t cols, T* out,
    int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    for_each_vec<1>(cols, [&](int64_t col, int, auto span) {
      store(out + row * stride + col, load(in + row * in_stride + col, span) * scale, span);
    });
  }
}

// delta[row] = sum of a * b over the row.
template <typename T>
void row_dots(
    const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t rows, int64_t cols,
    float* delta) {
  for (int64_t row = 0; row < rows; ++row) {
    Vec dots[4] = {};
    for_each_vec<4>(cols, [&](int64_t col, int k, auto span) {
      dots[k] += load(a + row * a_stride + col, span) * load(b + row * b_stride + col, span);
    });
    delta[row] = sum(tree_sum(dots));
  }
}

// 2^v for an operand of type E.
template <typename E>
ACCEL_INLINE Vec exp2_for(Vec v) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    return exp2_for_bf16(v);
  } else {
    return exp2(v);
  }
}

// The online softmax: a row's maximum so far, the sum of exponentials under it (in kLanes parts), and the
// output under it. As many rows at a time as there are lanes: what is one number of a row is then a
// vector, and no row waits for its own. Tiles are taken by value: what is stored could otherwise change
// them.
template <typename E, bool kDropout>
void softmax_tile(const SoftmaxTile<E> tile) {
  constexpr int kVecs = kGranule / kLanes;
  const Vec lowest = broadcast(-__builtin_inff());
  for (int64_t group = 0; group < tile.num_queries; group += kLanes) {
    float shifts[kLanes], rescales[kLanes];
    for (int64_t row = 0; row < kLanes; ++row) {
      const float* scores = tile.scores + (group + row) * tile.stride;
      Vec largest[4] = {lowest, lowest, lowest, lowest};
      for_each_vec<4>(tile.num_keys, [&](int64_t col, int k, auto) {
        largest[k] = max(load(scores + col, Full{}), largest[k]);
      });
      shifts[row] = max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
    }
    const Vec old = load(tile.max + group, Full{});
    const Vec next = max(load(shifts, Full{}) * tile.scale, old);
    const Vec shift = next == lowest ? Vec{} : next;  // rows with no key so far
    store(tile.max + group, next, Full{});
    store(shifts, shift, Full{});
    store(rescales, exp2(old - shift), Full{});

    for (int64_t row = 0; row < kLanes; ++row) {
      const int64_t begin_row = (group + row) * tile.stride;
      Vec sums[kVecs] = {};
      for (int64_t begin = 0; begin < tile.num_keys; begin += kGranule) {
#pragma GCC unroll 8
        for (int k = 0; k < kVecs; k += 2) {
          const int64_t at = begin_row + begin + k * kLanes;
          Vec p[2];
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            const Vec score = load(tile.scores + at + i * kLanes, Full{});
            p[i] = exp2_for<E>(score * tile.scale - shifts[row]);
            sums[k + i] += p[i];
            if constexpr (kDropout) p[i] = p[i] * load(tile.keep + at + i * kLanes, Full{});
          }
          store_operand(tile.probs + at, p[0], p[1]);
        }
      }
      float* sum = tile.sums + (group + row) * kLanes;
      store(sum, load(sum, Full{}) * rescales[row] + tree_sum(sums), Full{});
      if (tile.out == nullptr || rescales[row] == 1.0f) continue;
      float* out = tile.out + (group + row) * tile.out_cols;
      for_each_vec<4>(tile.out_cols, [&](int64_t col, int, auto) {
        store(out + col, load(out + col, Full{}) * rescales[row], Full{});
      });
    }
  }
}

// The sums of softmax_tile, whole.
void add_up(const float* sums, int64_t rows, float* totals) {
  for (int64_t row = 0; row < rows; ++row) totals[row] = sum(load(sums + row * kLanes, Full{}));
}

// p = e^(scale s - lse),  ds = p (dp - delta); the factor `scale` of ds is left to the end.
template <typename E, bool kDropout>
void gradient_tile(const GradientTile<E> tile) {
  for (int64_t key = 0; key < tile.num_keys; key += 2) {
    for (int64_t query = 0; query < tile.num_queries; query += kLanes) {
      const Vec lse = load(tile.lse + query, Full{});
      const Vec delta = load(tile.delta + query, Full{});
      const int64_t first = key * tile.num_queries + query;
      Vec probs[2], dscores[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const int64_t at = first + i * tile.num_queries;
        const Vec p = exp2_for<E>(load(tile.scores + at, Full{}) * tile.scale - lse);
        Vec dprob = load(tile.dprobs + at, Full{});
        probs[i] = p;
        if constexpr (kDropout) {
          const Vec keep = load(tile.keep + at, Full{});
          dprob = dprob * keep;
          probs[i] = p * keep;
        }
        dscores[i] = p * (dprob - delta);
      }
      E* const no_pairs = nullptr;
      store_rows_of_operand(tile.probs + first, tile.num_queries, no_pairs, probs[0], probs[1]);
      store_rows_of_operand(
          tile.dscores + first, tile.num_queries, tile.dscores_paired + first + query, dscores[0],
          dscores[1]);
    }
  }
}

struct Products {
  VecU32 high, low;
};

// The 64 bits of a * factor in two halves.
ACCEL_INLINE Products multiply_wide(VecU32 a, uint32_t factor) {
  typedef uint64_t VecU64 __attribute__((vector_size(4 * kLanes)));
  const VecU64 wide = bit_cast<VecU64>(a);
#if ACCEL_LANES == 16
  const __m512i f = _mm512_set1_epi64(factor);
  const VecU64 even = (VecU64)_mm512_mul_epu32((__m512i)wide, f);
  const VecU64 odd = (VecU64)_mm512_mul_epu32((__m512i)(wide >> 32), f);
#elif ACCEL_LANES == 8
  const __m256i f = _mm256_set1_epi64x(factor);
  const VecU64 even = (VecU64)_mm256_mul_epu32((__m256i)wide, f);
  const VecU64 odd = (VecU64)_mm256_mul_epu32((__m256i)(wide >> 32), f);
#else
  const VecU64 even = (wide & 0xffffffffu) * factor;
  const VecU64 odd = (wide >> 32) * factor;
#endif
  const VecU64 upper = 0xffffffff00000000u - VecU64{};
  return {
      bit_cast<VecU32>((even >> 32) | (odd & upper)),
      bit_cast<VecU32>((even & ~upper) | (odd << 32))};
}

// What dropout multiplies with, 0 or its scale, for 4 words of random bits at each counter.
ACCEL_INLINE void philox(
    const Dropout& dropout, VecU32 c0, VecU32 c1, uint32_t head, uint32_t sequence,
    Vec (&keep)[4]) {
  VecU32 c[4] = {c0, c1, head - VecU32{}, sequence - VecU32{}};
  uint32_t key[2] = {dropout.key[0], dropout.key[1]};
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Products first = multiply_wide(c[0], 0xD2511F53u);
    const Products second = multiply_wide(c[2], 0xCD9E8D57u);
    c[0] = second.high ^ c[1] ^ key[0];
    c[1] = second.low;
    c[2] = first.high ^ c[3] ^ key[1];
    c[3] = first.low;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word) {
    keep[word] = c[word] < dropout.threshold ? Vec{} : broadcast(dropout.scale);
  }
}

ACCEL_INLINE VecU32 count_from(uint32_t first) {
  VecU32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = first + i;
  return v;
}

// Random bits of 64 queries and one key come from 16 counters, of 4 words each: word w of counter r
// belongs to query 16 w + r. So both [queries][keys] and [keys][queries] are filled by vectors.
void keep_by_query(
    const Dropout& dropout, int64_t head, int64_t sequence, int64_t first_query,
    int64_t num_queries, int64_t first_key, int64_t num_keys, float* keep, int64_t stride) {
  Vec words[4];
  for (int64_t group = 0; group < num_queries; group += 64) {
    for (int64_t r = 0; r < 16; ++r) {
      const VecU32 c1 = static_cast<uint32_t>((first_query + group) / 4 + r) - VecU32{};
      for (int64_t key = 0; key < num_keys; key += kLanes) {
        philox(dropout, count_from(first_key + key), c1, head, sequence, words);
        for (int64_t word = 0; word < 4 && group + 16 * word < num_queries; ++word) {
          store(keep + (group + 16 * word + r) * stride + key, words[word], Full{});
        }
      }
    }
  }
}

void keep_by_key(
    const Dropout& dropout, int64_t head, int64_t sequence, int64_t first_query,
    int64_t num_queries, int64_t first_key, int64_t num_keys, float* keep, int64_t stride) {
  Vec words[4];
  for (int64_t key = 0; key < num_keys; ++key) {
    const VecU32 c0 = static_cast<uint32_t>(first_key + key) - VecU32{};
    for (int64_t group = 0; group < num_queries; group += 64) {
      for (int64_t r = 0; r < 16; r += kLanes) {
        philox(
            dropout, c0, count_from((first_query + group) / 4 + r), head, sequence, words);
        for (int64_t word = 0; word < 4 && group + 16 * word < num_queries; ++word) {
          store(keep + key * stride + group + 16 * word + r, words[word], Full{});
        }
      }
    }
  }
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::BFloat16;
using at::Tensor;

// Sides of a block: at most these, less for short sequences. Measured on 2 threads of an AMD Zen 4 (1
// MiB of L2 each; bf16, causal, 8 heads of 4096 x 128; ms): forward with 64 x 512 98, 64 x 256 100, 128
// x 512 99, 128 x 256 101; forward and backward with 64 x 128 339, 64 x 64 346, 64 x 192 344, 128 x 128
// 358. On 2 threads of an Intel Xeon with AMX (2 MiB): forward with 128 x 512 24, 64 x 512 24, 128 x 256
// 25, 64 x 256 26; forward and backward with 128 x 128 91, 64 x 128 108, 256 x 128 96, 128 x 256 91.
// Multiples of 64: dropout's random bits come by 64 queries.
constexpr int64_t kMaxQueries = 64;
constexpr int64_t kMaxQueriesAmx = 128;
constexpr int64_t kMaxKeysForward = 512;
constexpr int64_t kMaxKeysBackward = 128;

// Packed keys that are held at once, in tokens of one head, if that keeps all threads busy. 32768 leave
// L3 before they are used again: 113 instead of 106 ms forward, 407 instead of 376 with backward. 8192
// are as fast as 4096 at six shapes on one thread and two, and take twice the memory: 3.5 MiB more of
// the peak of a rank with two heads of 4096 x 64 in its backward.
constexpr int64_t kTokensPerWave = 4096;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

int64_t round_up(int64_t size, int64_t multiple) { return at::divup(size, multiple) * multiple; }

// c (+)= a b
void multiply(
    int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
    const BFloat16* a, const BFloat16* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, /*is_vnni=*/true);
}

void multiply(
    int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
    const float* a, const float* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, /*is_vnni=*/false);
}

// Whether brgemm takes bf16 here, and to_bf16 may be used: brgemm wants AVX-512 with bf16, or AMX, and
// throws without.
bool multiplies_bf16() {
  static const bool works = [] {
    if (!cpu_has_avx512_bf16()) return false;
    const std::vector<BFloat16> zeros(kGranule * kGranule);
    std::vector<float> product(kGranule * kGranule);
    try {
      multiply(
          kGranule, kGranule, kGranule, kGranule, kGranule, kGranule, false, zeros.data(),
          zeros.data(), product.data());
    } catch (const std::exception&) {
      return false;
    }
    at::native::cpublas::brgemm_release(/*is_vnni=*/true);
    return true;
  }();
  return isa() == Isa::avx512 && at::globalContext().userEnabledMkldnn() && works;
}

bool multiplies_with_amx(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && multiplies_bf16() && cpu_has_amx();
}

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// For dropout: its seed, and where a part of a larger attention begins.
struct Place {
  int64_t seed = 0, sequence = 0, head = 0, query = 0, key = 0;
};
constexpr int64_t kSeedAndPlace = 5;

struct Sequence {
  int64_t index;  // in the batch, or in the pack
  int64_t batch;  // in the batch; 0 in a pack
  int64_t first_query, first_key;
  int64_t num_queries, num_keys;
  Place place = {};
};

// Where the rows of one tensor are, in elements.
template <typename T>
struct Rows {
  T* data;
  int64_t token, batch, head;

  T* at(const Sequence& sequence, int64_t head_index, int64_t first, int64_t row) const {
    return data + sequence.batch * batch + (first + row) * token + head_index * head;
  }
};

struct Problem {
  int64_t num_heads, num_kv_heads;
  int64_t width, value_width;  // of a row of q and k, of v and out
  int64_t tokens;              // of q in each batch entry: lse is [batch, heads, tokens]
  int64_t left, right;         // -1: no limit
  int64_t max_queries;         // in a block
  float scale;
  std::optional<Dropout> dropout;
  std::vector<Sequence> sequences;
  bool all_visited;  // every token is in a sequence that has queries and keys

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t padded_width() const { return round_up(width, kGranule); }
  int64_t padded_value_width() const { return round_up(value_width, kGranule); }

  // The keys that a query sees. Both ends grow with the query.
  Range keys_of(const Sequence& s, int64_t query) const {
    const int64_t same = query + s.num_keys - s.num_queries;
    const int64_t begin = left < 0 ? 0 : std::max<int64_t>(0, same - left);
    const int64_t end = right < 0 ? s.num_keys : std::min(s.num_keys, same + right + 1);
    return {begin, std::max<int64_t>(0, end)};
  }
  // The queries that see a key.
  Range queries_of(const Sequence& s, int64_t key) const {
    const int64_t same = key - s.num_keys + s.num_queries;
    const int64_t begin = right < 0 ? 0 : std::max<int64_t>(0, same - right);
    const int64_t end = left < 0 ? s.num_queries : std::min(s.num_queries, same + left + 1);
    return {begin, std::max<int64_t>(0, end)};
  }
  int64_t lse_at(const Sequence& s, int64_t head) const {
    return (s.batch * num_heads + head) * tokens + s.first_query;
  }
};

// One key-value head of one sequence, and where it starts in the scratch of its wave.
struct KvHead {
  const Sequence* sequence;
  int64_t index;
  int64_t query_side, key_side;  // of a block
  int64_t num_query_blocks, num_key_blocks;
  int64_t first_token, first_block;  // in the wave's packed keys

  Range queries(int64_t block) const {
    return {block * query_side, std::min((block + 1) * query_side, sequence->num_queries)};
  }
  Range keys(int64_t block) const {
    return {block * key_side, std::min((block + 1) * key_side, sequence->num_keys)};
  }
  int64_t token(int64_t key_block) const { return first_token + key_block * key_side; }
};

// Heads that are worked on together: as many as keep the threads busy and the scratch small.
struct Wave {
  std::vector<KvHead> heads;
  int64_t tokens = 0;
  int64_t blocks = 0;

  void add(const Sequence& sequence, int64_t index, int64_t max_queries, int64_t max_keys) {
    const int64_t query_side = std::min(max_queries, round_up(sequence.num_queries, kGranule));
    const int64_t key_side = std::min(max_keys, round_up(sequence.num_keys, kGranule));
    const int64_t num_key_blocks = at::divup(sequence.num_keys, key_side);
    heads.push_back(
        {&sequence, index, query_side, key_side, at::divup(sequence.num_queries, query_side),
         num_key_blocks, tokens, blocks});
    tokens += num_key_blocks * key_side;
    blocks += num_key_blocks;
  }
};

template <typename F>
void for_each_wave(const Problem& problem, int64_t max_keys, F f) {
  Wave wave;
  for (const Sequence& sequence : problem.sequences) {
    if (sequence.num_queries == 0 || sequence.num_keys == 0) continue;
    for (int64_t index = 0; index < problem.num_kv_heads; ++index) {
      wave.add(sequence, index, problem.max_queries, max_keys);
      const auto count = static_cast<int64_t>(wave.heads.size());
      if (count >= at::get_num_threads() && wave.tokens >= kTokensPerWave) {
        f(wave);
        wave = {};
      }
    }
  }
  if (!wave.heads.empty()) f(wave);
}

// Calls f(task, worker) for every task. A thread that is free takes the next one, so tasks start in
// order; f must not let the result depend on who runs it. Each thread ends with `done`.
template <typename F, typename Done>
void for_each_task(int64_t count, F f, Done done) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    for (int64_t task; (task = next.fetch_add(1)) < count;) f(task, worker);
    done();
  });
}

// AMX: gives the tile registers back.
template <typename E>
void release() {
  at::native::cpublas::brgemm_release(/*is_vnni=*/kPair<E> == 2);
}

// Calls f(head, block of keys) for all of a wave.
template <typename F>
void for_each_key_block(const Wave& wave, F f) {
  std::vector<std::pair<const KvHead*, int64_t>> blocks;
  for (const KvHead& head : wave.heads) {
    for (int64_t block = 0; block < head.num_key_blocks; ++block) blocks.emplace_back(&head, block);
  }
  for_each_task(
      blocks.size(), [&](int64_t task, int64_t) { f(*blocks[task].first, blocks[task].second); },
      [] {});
}

// One block of queries of one head.
struct QueryBlock {
  const KvHead* kv_head;
  int64_t slot;         // of the key-value head in its wave
  int64_t group_index;  // which of the heads that share it
  int64_t block;

  Range rows() const { return kv_head->queries(block); }
};

// Heads take turns, so that threads do not queue for the same keys' gradients; a head's blocks come
// last first, because with a causal mask the last have the most to do.
std::vector<QueryBlock> query_blocks(const Problem& problem, const Wave& wave) {
  std::vector<QueryBlock> blocks;
  int64_t most = 0;
  for (const KvHead& head : wave.heads) most = std::max(most, head.num_query_blocks);
  for (int64_t step = 0; step < problem.group() * most; ++step) {
    for (size_t slot = 0; slot < wave.heads.size(); ++slot) {
      const KvHead& head = wave.heads[slot];
      if (step >= problem.group() * head.num_query_blocks) continue;
      blocks.push_back(
          {&head, static_cast<int64_t>(slot), step / head.num_query_blocks,
           head.num_query_blocks - 1 - step % head.num_query_blocks});
    }
  }
  return blocks;
}

// The blocks of keys that a block of queries sees any of.
Range key_blocks(const Problem& problem, const KvHead& head, Range queries) {
  const int64_t begin = problem.keys_of(*head.sequence, queries.begin).begin;
  const int64_t end = problem.keys_of(*head.sequence, queries.end - 1).end;
  if (begin >= end) return {0, 0};
  return {begin / head.key_side, at::divup(end, head.key_side)};
}

// How many keys of a block are multiplied: those that any of the queries sees, rounded up.
int64_t keys_in_use(const Problem& problem, const KvHead& head, Range queries, Range keys) {
  const int64_t end = problem.keys_of(*head.sequence, queries.end - 1).end;
  return round_up(std::min(end, keys.end) - keys.begin, kGranule);
}

// Minus infinity outside of `seen` in rows of `size` scores whose first is number `first`.
void mask_row(float* scores, Range seen, int64_t first, int64_t size) {
  const int64_t begin = std::clamp<int64_t>(seen.begin - first, 0, size);
  const int64_t end = std::clamp<int64_t>(seen.end - first, begin, size);
  std::fill(scores, scores + begin, -kInfinity);
  std::fill(scores + end, scores + size, -kInfinity);
}

// Scratch of one thread.
class Arena {
 public:
  explicit Arena(float* begin) : next_(begin) {}

  template <typename E>
  E* take(int64_t count) {
    used_ += floats<E>(count);
    float* taken = next_;
    if (next_ != nullptr) next_ += floats<E>(count);
    return reinterpret_cast<E*>(taken);
  }
  int64_t used() const { return used_; }

 private:
  template <typename E>
  static int64_t floats(int64_t count) {
    return round_up(count * sizeof(E), 64) / sizeof(float);
  }
  float* next_;
  int64_t used_ = 0;
};

// Scratch for as many threads as there are; `Scratch` takes its parts from an Arena.
template <typename Scratch>
class PerThread {
 public:
  explicit PerThread(const Problem& problem) {
    Arena size(nullptr);
    Scratch(problem, size);
    const int64_t threads = at::get_num_threads();
    memory_ = at::empty({threads, size.used()}, at::kFloat);
    for (int64_t thread = 0; thread < threads; ++thread) {
      Arena arena(memory_.mutable_data_ptr<float>() + thread * size.used());
      scratch_.emplace_back(problem, arena);
    }
  }
  const Scratch& operator[](int64_t worker) const { return scratch_[worker]; }

 private:
  Tensor memory_;
  std::vector<Scratch> scratch_;
};

template <typename E>
Tensor scratch_tensor(int64_t count) {
  return at::empty({count}, c10::CppTypeToScalarType<E>::value);
}

template <typename E>
struct ForwardScratch {
  E* query;
  E* probs;
  float* scores;
  float* keep;
  float* out;
  float* max;
  float* sums;
  float* sum;

  ForwardScratch(const Problem& problem, Arena& arena)
      : query(arena.take<E>(problem.max_queries * problem.padded_width())),
        probs(arena.take<E>(problem.max_queries * kMaxKeysForward)),
        scores(arena.take<float>(problem.max_queries * kMaxKeysForward)),
        keep(problem.dropout ? arena.take<float>(problem.max_queries * kMaxKeysForward) : nullptr),
        out(arena.take<float>(problem.max_queries * problem.padded_value_width())),
        max(arena.take<float>(problem.max_queries)),
        sums(arena.take<float>(problem.max_queries * kMaxLanes)),
        sum(arena.take<float>(problem.max_queries)) {}
};

template <typename T, typename E>
class Forward {
 public:
  Forward(const Problem& problem, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out,
          float* lse)
      : problem_(problem), q_(q), k_(k), v_(v), out_(out), lse_(lse) {}

  void run() {
    const PerThread<ForwardScratch<E>> scratch(problem_);
    for_each_wave(problem_, kMaxKeysForward, [&](const Wave& wave) {
      const Tensor keys = scratch_tensor<E>(wave.tokens * problem_.padded_width());
      const Tensor values = scratch_tensor<E>(wave.tokens * problem_.padded_value_width());
      keys_ = keys.mutable_data_ptr<E>();
      values_ = values.mutable_data_ptr<E>();
      pack(wave);
      const std::vector<QueryBlock> blocks = query_blocks(problem_, wave);
      for_each_task(
          blocks.size(),
          [&](int64_t task, int64_t worker) { attend(blocks[task], scratch[worker]); },
          release<E>);
    });
  }

 private:
  void pack(const Wave& wave) {
    auto* pack_keys = ACCEL_FOR_THIS_CPU(pack_transposed<true, T, E>);
    auto* pack_values = ACCEL_FOR_THIS_CPU(pack_paired<T, E>);
    const int64_t width = problem_.padded_width();
    const int64_t value_width = problem_.padded_value_width();
    for_each_key_block(wave, [&](const KvHead& head, int64_t block) {
      const Sequence& s = *head.sequence;
      const Range keys = head.keys(block);
      const int64_t count = keys.end - keys.begin;
      pack_keys(
          k_.at(s, head.index, s.first_key, keys.begin), k_.token, count, problem_.width,
          keys_ + head.token(block) * width, width, head.key_side);
      pack_values(
          v_.at(s, head.index, s.first_key, keys.begin), v_.token, count, problem_.value_width,
          values_ + head.token(block) * value_width, head.key_side, value_width);
    });
  }

  void attend(const QueryBlock& block, const ForwardScratch<E>& scratch) const {
    const KvHead& head = *block.kv_head;
    const Sequence& s = *head.sequence;
    const Range queries = block.rows();
    const int64_t index = head.index * problem_.group() + block.group_index;
    const int64_t count = queries.end - queries.begin;
    const int64_t value_width = problem_.padded_value_width();
    ACCEL_FOR_THIS_CPU(pack_rows<T, E>)
    (q_.at(s, index, s.first_query, queries.begin), q_.token, count, problem_.width, scratch.query,
     head.query_side, problem_.padded_width());
    std::fill_n(scratch.max, problem_.max_queries, -kInfinity);
    std::fill_n(scratch.sums, problem_.max_queries * kMaxLanes, 0.0f);

    const Range blocks = key_blocks(problem_, head, queries);
    for (int64_t kb = blocks.begin; kb < blocks.end; ++kb) {
      const bool first = kb == blocks.begin;
      const Range keys = head.keys(kb);
      const int64_t num_keys = keys_in_use(problem_, head, queries, keys);
      multiply(
          head.query_side, num_keys, problem_.padded_width(), problem_.padded_width(),
          head.key_side, head.key_side, false, scratch.query,
          keys_ + head.token(kb) * problem_.padded_width(), scratch.scores);
      mask(head, queries, keys, num_keys, scratch.scores);
      if (problem_.dropout) {
        ACCEL_FOR_THIS_CPU(keep_by_query)
        (problem_.dropout->of(s.place.seed), index + s.place.head, s.index + s.place.sequence,
         queries.begin + s.place.query, head.query_side, keys.begin + s.place.key, num_keys,
         scratch.keep, head.key_side);
      }
      auto* softmax = problem_.dropout ? ACCEL_FOR_THIS_CPU(softmax_tile<E, true>)
                                       : ACCEL_FOR_THIS_CPU(softmax_tile<E, false>);
      softmax({.scores = scratch.scores,
        .keep = scratch.keep,
        .num_queries = count,
        .num_keys = num_keys,
        .stride = head.key_side,
        .scale = problem_.scale * kLog2E,
        .max = scratch.max,
        .sums = scratch.sums,
        .out = first ? nullptr : scratch.out,
        .out_cols = value_width,
        .probs = scratch.probs});
      multiply(
          head.query_side, value_width, num_keys, head.key_side, value_width, value_width, !first,
          scratch.probs, values_ + head.token(kb) * value_width, scratch.out);
    }
    if (blocks.empty()) std::fill_n(scratch.out, head.query_side * value_width, 0.0f);
    finish(s, index, queries, scratch);
  }

  void mask(
      const KvHead& head, Range queries, Range keys, int64_t num_keys, float* scores) const {
    const Sequence& s = *head.sequence;
    const bool all = problem_.keys_of(s, queries.end - 1).begin <= keys.begin &&
        problem_.keys_of(s, queries.begin).end >= keys.begin + num_keys;
    for (int64_t query = queries.begin; !all && query < queries.end; ++query) {
      mask_row(
          scores + (query - queries.begin) * head.key_side, problem_.keys_of(s, query), keys.begin,
          num_keys);
    }
  }

  void finish(
      const Sequence& s, int64_t head, Range queries, const ForwardScratch<E>& scratch) const {
    auto* unpack = ACCEL_FOR_THIS_CPU(unpack_rows<T>);
    float* lse = lse_ + problem_.lse_at(s, head) + queries.begin;
    ACCEL_FOR_THIS_CPU(add_up)(scratch.sums, queries.end - queries.begin, scratch.sum);
    for (int64_t row = 0; row < queries.end - queries.begin; ++row) {
      const float sum = scratch.sum[row];
      lse[row] = scratch.max[row] / kLog2E + std::log(sum);  // minus infinity where no key is seen
      const float* in = scratch.out + row * problem_.padded_value_width();
      unpack(
          in, 0, sum == 0.0f ? 0.0f : 1.0f / sum, 1, problem_.value_width,
          out_.at(s, head, s.first_query, queries.begin + row), 0);
    }
  }

  const Problem& problem_;
  Rows<const T> q_, k_, v_;
  Rows<T> out_;
  float* lse_;
  E* keys_ = nullptr;    // [blocks], each [width][keys], paired
  E* values_ = nullptr;  // [blocks], each [keys][value width], paired
};

template <typename E>
struct BackwardScratch {
  // Of the block of queries: transposed and paired, or paired.
  E *query_t, *query, *dout_t, *dout;
  float *lse, *delta, *dquery_t;
  // Of a block of scores.
  float *scores, *dprobs, *keep;
  E *probs, *dscores, *dscores_paired;

  BackwardScratch(const Problem& problem, Arena& arena) {
    const int64_t tile = problem.max_queries * kMaxKeysBackward;
    const int64_t query_size = problem.max_queries * problem.padded_width();
    const int64_t out_size = problem.max_queries * problem.padded_value_width();
    query_t = arena.take<E>(query_size);
    query = arena.take<E>(query_size);
    dout_t = arena.take<E>(out_size);
    dout = arena.take<E>(out_size);
    lse = arena.take<float>(problem.max_queries);
    delta = arena.take<float>(problem.max_queries);
    dquery_t = arena.take<float>(query_size);
    scores = arena.take<float>(tile);
    dprobs = arena.take<float>(tile);
    keep = problem.dropout ? arena.take<float>(tile) : nullptr;
    probs = arena.take<E>(tile);
    dscores = arena.take<E>(tile);
    dscores_paired = kPair<E> == 1 ? dscores : arena.take<E>(tile);
  }
};

// Who may add to the gradient of a block of keys, and when: the blocks of queries that see it, in the
// order in which they are started. So the sum has one order, whatever the number of threads.
class Turns {
 public:
  Turns(const Problem& problem, const Wave& wave)
      : seen_(wave.blocks, Range{-1, 0}), turn_(wave.blocks) {
    for (const KvHead& head : wave.heads) {
      for (int64_t block = 0; block < head.num_query_blocks; ++block) {
        const Range keys = key_blocks(problem, head, head.queries(block));
        for (int64_t kb = keys.begin; kb < keys.end; ++kb) {
          Range& seen = seen_[head.first_block + kb];
          if (seen.begin < 0) seen.begin = block;
          seen.end = block + 1;  // contiguous: both ends of `keys` grow with the block
        }
      }
    }
  }

  void wait(const QueryBlock& block, int64_t key_block) const {
    const int64_t at = block.kv_head->first_block + key_block;
    const Range seen = seen_[at];
    const int64_t rank =
        block.group_index * (seen.end - seen.begin) + seen.end - 1 - block.block;
    while (turn_[at].load(std::memory_order_acquire) != rank) {
      ACCEL_CHECK(!failed_.load(std::memory_order_relaxed), "attention: another thread failed");
      std::this_thread::yield();
    }
  }
  void pass_on(const QueryBlock& block, int64_t key_block) {
    turn_[block.kv_head->first_block + key_block].fetch_add(1, std::memory_order_release);
  }
  // Nobody may wait for a thread that threw.
  void fail() { failed_ = true; }

 private:
  std::vector<Range> seen_;  // the blocks of queries that see each block of keys
  std::vector<std::atomic<int64_t>> turn_;
  std::atomic<bool> failed_{false};
};

template <typename T>
struct Gradients {
  Rows<const T> dout, q, k, v, out;
  const float* lse;
  Rows<T> dq, dk, dv;
};

template <typename T, typename E>
class Backward {
 public:
  Backward(const Problem& problem, const Gradients<T>& tensors) : problem_(problem), t_(tensors) {}

  void run() {
    const PerThread<BackwardScratch<E>> scratch(problem_);
    for_each_wave(problem_, kMaxKeysBackward, [&](const Wave& wave) {
      const int64_t size = wave.tokens * problem_.padded_width();
      const int64_t value_size = wave.tokens * problem_.padded_value_width();
      const Tensor packed = scratch_tensor<E>(2 * size + value_size);
      const Tensor sums = at::zeros({size + value_size}, at::kFloat);
      keys_ = packed.mutable_data_ptr<E>();
      keys_t_ = keys_ + size;
      values_ = keys_t_ + size;
      dkeys_ = sums.mutable_data_ptr<float>();
      dvalues_ = dkeys_ + size;

      for_each_key_block(wave, [&](const KvHead& head, int64_t block) { pack(head, block); });
      const std::vector<QueryBlock> blocks = query_blocks(problem_, wave);
      Turns turns(problem_, wave);
      for_each_task(
          blocks.size(),
          [&](int64_t task, int64_t worker) {
            try {
              attend(blocks[task], scratch[worker], turns);
            } catch (...) {
              turns.fail();
              throw;
            }
          },
          release<E>);
      for_each_key_block(wave, [&](const KvHead& head, int64_t block) { finish(head, block); });
    });
  }

 private:
  void pack(const KvHead& head, int64_t block) const {
    auto* rows = ACCEL_FOR_THIS_CPU(pack_rows<T, E>);
    auto* transposed = ACCEL_FOR_THIS_CPU(pack_transposed<false, T, E>);
    const Sequence& s = *head.sequence;
    const Range keys = head.keys(block);
    const int64_t count = keys.end - keys.begin;
    const int64_t width = problem_.padded_width();
    const int64_t value_width = problem_.padded_value_width();
    const T* k = t_.k.at(s, head.index, s.first_key, keys.begin);
    const T* v = t_.v.at(s, head.index, s.first_key, keys.begin);
    const int64_t token = head.token(block);
    rows(k, t_.k.token, count, problem_.width, keys_ + token * width, head.key_side, width);
    transposed(k, t_.k.token, count, problem_.width, keys_t_ + token * width, width, head.key_side);
    rows(
        v, t_.v.token, count, problem_.value_width, values_ + token * value_width, head.key_side,
        value_width);
  }

  void load_queries(const QueryBlock& block, int64_t index, const BackwardScratch<E>& to) const {
    auto* paired = ACCEL_FOR_THIS_CPU(pack_paired<T, E>);
    auto* transposed = ACCEL_FOR_THIS_CPU(pack_transposed<true, T, E>);
    const Sequence& s = *block.kv_head->sequence;
    const Range queries = block.rows();
    const int64_t count = queries.end - queries.begin;
    const int64_t side = block.kv_head->query_side;
    const int64_t width = problem_.padded_width();
    const int64_t value_width = problem_.padded_value_width();
    const T* q = t_.q.at(s, index, s.first_query, queries.begin);
    const T* dout = t_.dout.at(s, index, s.first_query, queries.begin);
    paired(q, t_.q.token, count, problem_.width, to.query, side, width);
    transposed(q, t_.q.token, count, problem_.width, to.query_t, width, side);
    paired(dout, t_.dout.token, count, problem_.value_width, to.dout, side, value_width);
    transposed(dout, t_.dout.token, count, problem_.value_width, to.dout_t, value_width, side);

    std::fill_n(to.delta, side, 0.0f);
    std::fill_n(to.lse, side, kInfinity);  // probability 0: rows that are not there, or see no key
    ACCEL_FOR_THIS_CPU(row_dots<T>)
    (dout, t_.dout.token, t_.out.at(s, index, s.first_query, queries.begin), t_.out.token, count,
     problem_.value_width, to.delta);
    const float* lse = t_.lse + problem_.lse_at(s, index) + queries.begin;
    for (int64_t row = 0; row < count; ++row) {
      if (lse[row] != -kInfinity) to.lse[row] = lse[row] * kLog2E;
    }
  }

  void attend(const QueryBlock& block, const BackwardScratch<E>& scratch, Turns& turns) const {
    const KvHead& head = *block.kv_head;
    const Sequence& s = *head.sequence;
    const Range queries = block.rows();
    const Range blocks = key_blocks(problem_, head, queries);
    const int64_t index = head.index * problem_.group() + block.group_index;
    const int64_t side = head.query_side;
    const int64_t width = problem_.padded_width();
    const int64_t value_width = problem_.padded_value_width();
    load_queries(block, index, scratch);
    if (blocks.empty()) std::fill_n(scratch.dquery_t, width * side, 0.0f);

    for (int64_t kb = blocks.begin; kb < blocks.end; ++kb) {
      const Range keys = head.keys(kb);
      const int64_t num_keys = keys_in_use(problem_, head, queries, keys);
      const int64_t token = head.token(kb);
      multiply(
          num_keys, side, width, width, side, side, false, keys_ + token * width, scratch.query_t,
          scratch.scores);
      multiply(
          num_keys, side, value_width, value_width, side, side, false,
          values_ + token * value_width, scratch.dout_t, scratch.dprobs);
      mask(head, queries, keys, num_keys, scratch.scores);
      if (problem_.dropout) {
        ACCEL_FOR_THIS_CPU(keep_by_key)
        (problem_.dropout->of(s.place.seed), index + s.place.head, s.index + s.place.sequence,
         queries.begin + s.place.query, side, keys.begin + s.place.key, num_keys,
         scratch.keep, side);
      }
      auto* gradient = problem_.dropout ? ACCEL_FOR_THIS_CPU(gradient_tile<E, true>)
                                        : ACCEL_FOR_THIS_CPU(gradient_tile<E, false>);
      gradient({.scores = scratch.scores,
        .dprobs = scratch.dprobs,
        .keep = scratch.keep,
        .lse = scratch.lse,
        .delta = scratch.delta,
        .num_keys = num_keys,
        .num_queries = side,
        .scale = problem_.scale * kLog2E,
        .probs = scratch.probs,
        .dscores = scratch.dscores,
        .dscores_paired = scratch.dscores_paired});
      multiply(
          width, side, num_keys, head.key_side, side, side, kb != blocks.begin,
          keys_t_ + token * width, scratch.dscores_paired, scratch.dquery_t);
      turns.wait(block, kb);
      multiply(
          num_keys, value_width, side, side, value_width, value_width, true, scratch.probs,
          scratch.dout, dvalues_ + token * value_width);
      multiply(
          num_keys, width, side, side, width, width, true, scratch.dscores, scratch.query,
          dkeys_ + token * width);
      turns.pass_on(block, kb);
    }
    ACCEL_FOR_THIS_CPU(unpack_transposed<T>)
    (scratch.dquery_t, side, problem_.scale, queries.end - queries.begin, problem_.width,
     t_.dq.at(s, index, s.first_query, queries.begin), t_.dq.token);
  }

  void mask(
      const KvHead& head, Range queries, Range keys, int64_t num_keys, float* scores) const {
    const Sequence& s = *head.sequence;
    const bool all = keys.begin + num_keys <= keys.end &&
        problem_.keys_of(s, queries.end - 1).begin <= keys.begin &&
        problem_.keys_of(s, queries.begin).end >= keys.begin + num_keys;
    for (int64_t row = 0; !all && row < num_keys; ++row) {
      const int64_t key = keys.begin + row;
      const Range seen = key < keys.end ? problem_.queries_of(s, key) : Range{0, 0};
      mask_row(scores + row * head.query_side, seen, queries.begin, head.query_side);
    }
  }

  void finish(const KvHead& head, int64_t block) const {
    auto* unpack = ACCEL_FOR_THIS_CPU(unpack_rows<T>);
    const Sequence& s = *head.sequence;
    const Range keys = head.keys(block);
    const int64_t count = keys.end - keys.begin;
    const int64_t width = problem_.padded_width();
    const int64_t value_width = problem_.padded_value_width();
    unpack(
        dkeys_ + head.token(block) * width, width, problem_.scale, count, problem_.width,
        t_.dk.at(s, head.index, s.first_key, keys.begin), t_.dk.token);
    unpack(
        dvalues_ + head.token(block) * value_width, value_width, 1.0f, count, problem_.value_width,
        t_.dv.at(s, head.index, s.first_key, keys.begin), t_.dv.token);
  }

  const Problem& problem_;
  const Gradients<T>& t_;
  E* keys_ = nullptr;    // [blocks], each [keys][width]
  E* keys_t_ = nullptr;  // [blocks], each [width][keys]
  E* values_ = nullptr;  // [blocks], each [keys][value width]
  float* dkeys_ = nullptr;
  float* dvalues_ = nullptr;
};

// [S, B, H, D], or a pack [T, H, D].
template <typename T>
Rows<T> rows_of(const Tensor& t) {
  T* data = nullptr;
  if constexpr (std::is_const_v<T>) {
    data = static_cast<T*>(t.const_data_ptr());
  } else {
    data = static_cast<T*>(t.mutable_data_ptr());
  }
  const bool batched = t.dim() == 4;
  return {data, t.stride(0), batched ? t.stride(1) : 0, t.stride(batched ? 2 : 1)};
}

// Rows must be contiguous; all else may have any strides.
Tensor with_contiguous_rows(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, bool packed) {
  const int64_t dims = packed ? 3 : 4;
  for (const Tensor* t : {&q, &k, &v}) {
    ACCEL_CHECK_VALUE(
        t->dim() == dims, "attention: q, k and v must have ", dims, " dimensions, got ", q.sizes(),
        ", ", k.sizes(), ", ", v.sizes());
    ACCEL_CHECK_VALUE(
        t->scalar_type() == q.scalar_type(), "attention: q, k and v must have one dtype, got ",
        q.scalar_type(), ", ", k.scalar_type(), ", ", v.scalar_type());
  }
  bool fits = q.size(-1) == k.size(-1) && k.size(0) == v.size(0) && k.size(-2) == v.size(-2) &&
      k.size(-2) > 0 && q.size(-2) % k.size(-2) == 0 && q.size(-1) > 0;
  if (!packed) fits = fits && q.size(1) == k.size(1) && k.size(1) == v.size(1);
  ACCEL_CHECK_VALUE(
      fits, "attention: q, k and v do not fit together: ", q.sizes(), ", ", k.sizes(), ", ",
      v.sizes());
}

std::vector<int64_t> offsets_of(const Tensor& cu_seqlens, int64_t tokens, const char* name) {
  ACCEL_CHECK_VALUE(
      cu_seqlens.dim() == 1 && cu_seqlens.size(0) > 0, "attention: ", name,
      " must have shape [sequences + 1], got ", cu_seqlens.sizes());
  const Tensor wide = cu_seqlens.to(at::kLong).contiguous();
  const int64_t* data = wide.const_data_ptr<int64_t>();
  std::vector<int64_t> offsets(data, data + wide.numel());
  ACCEL_CHECK_VALUE(
      offsets.front() == 0 && offsets.back() <= tokens &&
          std::is_sorted(offsets.begin(), offsets.end()),
      "attention: ", name, " must rise from 0 to at most ", tokens, ", got ", offsets);
  return offsets;
}

std::vector<Sequence> sequences_of(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k) {
  std::vector<Sequence> sequences;
  if (!cu_q.has_value()) {
    for (int64_t b = 0; b < q.size(1); ++b) sequences.push_back({b, b, 0, 0, q.size(0), k.size(0)});
    return sequences;
  }
  const std::vector<int64_t> queries = offsets_of(*cu_q, q.size(0), "cu_seqlens_q");
  const std::vector<int64_t> keys = offsets_of(*cu_k, k.size(0), "cu_seqlens_k");
  ACCEL_CHECK_VALUE(
      queries.size() == keys.size(), "attention: cu_seqlens_q and cu_seqlens_k must be as long, got ",
      queries.size(), " and ", keys.size());
  for (int64_t i = 0; i + 1 < static_cast<int64_t>(queries.size()); ++i) {
    sequences.push_back(
        {i, 0, queries[i], keys[i], queries[i + 1] - queries[i], keys[i + 1] - keys[i]});
  }
  return sequences;
}

struct Options {
  double scale;
  int64_t left, right;
  double dropout;
};

// dropout * 2^32, rounded; what rounds to 2^32 is taken as one less, which is as good as all.
uint32_t threshold_of(double dropout) {
  const double threshold = std::nearbyint(std::ldexp(dropout, 32));
  return static_cast<uint32_t>(std::min(threshold, 0x1p32 - 1.0));
}

// From a seed `[1]`, `[5]` for all sequences, or `[sequences, 5]`.
void set_places(const Tensor& seed, std::vector<Sequence>& sequences) {
  const bool alone = seed.numel() == 1, for_each = seed.dim() == 2;
  ACCEL_CHECK_VALUE(
      alone || (seed.size(-1) == kSeedAndPlace &&
                (seed.dim() == 1 || (for_each && seed.size(0) == std::ssize(sequences)))),
      "attention: dropout needs a seed of 1 number, or of ", kSeedAndPlace,
      " for all or for each of the ", sequences.size(), " sequences, got ", seed.sizes());
  const int64_t* number = seed.const_data_ptr<int64_t>();
  for (Sequence& s : sequences) {
    if (alone) {
      s.place = {.seed = *number};
      continue;
    }
    const int64_t* row = number + (for_each ? s.index * kSeedAndPlace : 0);
    s.place = {row[0], row[1], row[2], row[3], row[4]};
    ACCEL_CHECK_VALUE(
        s.place.query % 64 == 0,
        "attention: dropout needs a first query that is a multiple of 64, got ", s.place.query);
  }
}

Problem problem_of(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, const std::optional<Tensor>& seed, const Options& options) {
  ACCEL_CHECK_VALUE(
      cu_q.has_value() == cu_k.has_value(), "attention: cu_seqlens_q and cu_seqlens_k go together");
  check_inputs(q, k, v, cu_q.has_value());
  ACCEL_CHECK_VALUE(
      static_cast<float>(options.scale) > 0.0f, "attention: scale must be positive in fp32, got ",
      options.scale);
  ACCEL_CHECK_VALUE(
      options.left >= -1 && options.right >= -1, "attention: the window must be >= -1 (no limit), got ",
      options.left, " and ", options.right);
  constexpr int64_t kFar = int64_t{1} << 40;  // further than any key
  Problem problem{
      .num_heads = q.size(-2),
      .num_kv_heads = k.size(-2),
      .width = q.size(-1),
      .value_width = v.size(-1),
      .tokens = q.size(0),
      .left = std::min(options.left, kFar),
      .right = std::min(options.right, kFar),
      .max_queries = multiplies_with_amx(q.scalar_type()) ? kMaxQueriesAmx : kMaxQueries,
      .scale = static_cast<float>(options.scale),
      .dropout = std::nullopt,
      .sequences = sequences_of(q, k, cu_q, cu_k),
      .all_visited = !cu_q.has_value() && q.size(0) > 0 && k.size(0) > 0};
  if (options.dropout > 0.0) {
    ACCEL_CHECK_VALUE(
        options.dropout < 1.0, "attention: dropout must be below 1, got ", options.dropout);
    ACCEL_CHECK_VALUE(
        seed.has_value() && seed->scalar_type() == at::kLong,
        "attention: dropout needs a seed, int64");
    set_places(seed->contiguous(), problem.sequences);
    problem.dropout = Dropout{
        .key = {},
        .threshold = threshold_of(options.dropout),
        .scale = static_cast<float>(1.0 / (1.0 - options.dropout))};
  }
  return problem;
}

// Tokens of no sequence, and sequences without queries or keys, are not visited: they are 0.
Tensor new_output(const Problem& problem, at::IntArrayRef shape, const at::TensorOptions& options) {
  return problem.all_visited ? at::empty(shape, options) : at::zeros(shape, options);
}

// Calls f<T, E>: what is in memory, and what is multiplied.
template <typename F>
void dispatch(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kFloat: return f.template operator()<float, float>();
    case at::kHalf: return f.template operator()<at::Half, float>();
    case at::kBFloat16:
      return multiplies_bf16() ? f.template operator()<BFloat16, BFloat16>()
                               : f.template operator()<BFloat16, float>();
    default:
      ACCEL_CHECK_VALUE(false, "attention on CPU takes float32, bfloat16 or float16, got ", dtype);
  }
}

// [Q, B, H, E], or [T, H, E] of a pack.
std::vector<int64_t> out_shape(const Tensor& q, const Tensor& v) {
  std::vector<int64_t> shape = q.sizes().vec();
  shape.back() = v.size(-1);
  return shape;
}

// [B, H, Q], or [H, T] of a pack.
std::vector<int64_t> lse_shape(const Tensor& q) {
  return q.dim() == 3 ? std::vector{q.size(1), q.size(0)}
                      : std::vector{q.size(1), q.size(2), q.size(0)};
}

std::tuple<Tensor, Tensor> attention_fwd_cpu(
    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, const std::optional<Tensor>& seed, double scale,
    int64_t left, int64_t right, double dropout) {
  const Problem problem =
      problem_of(q_in, k_in, v_in, cu_q, cu_k, seed, {scale, left, right, dropout});
  const Tensor q = with_contiguous_rows(q_in);
  const Tensor k = with_contiguous_rows(k_in);
  const Tensor v = with_contiguous_rows(v_in);
  Tensor out = new_output(problem, out_shape(q, v), q.options());
  Tensor lse = at::full(lse_shape(q), -kInfinity, q.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse};
  dispatch(q.scalar_type(), [&]<typename T, typename E> {
    Forward<T, E>(
        problem, rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v), rows_of<T>(out),
        lse.mutable_data_ptr<float>())
        .run();
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_bwd_cpu(
    const Tensor& dout_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const Tensor& out_in, const Tensor& lse_in, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, const std::optional<Tensor>& seed, double scale,
    int64_t left, int64_t right, double dropout) {
  const Problem problem =
      problem_of(q_in, k_in, v_in, cu_q, cu_k, seed, {scale, left, right, dropout});
  ACCEL_CHECK_VALUE(
      out_in.sizes() == out_shape(q_in, v_in) && dout_in.sizes() == out_in.sizes() &&
          lse_in.sizes() == lse_shape(q_in) && dout_in.scalar_type() == q_in.scalar_type() &&
          out_in.scalar_type() == q_in.scalar_type() && lse_in.scalar_type() == at::kFloat,
      "attention backward: dout ", dout_in.sizes(), ", out ", out_in.sizes(), " and lse ",
      lse_in.sizes(), " do not fit q ", q_in.sizes());
  const Tensor q = with_contiguous_rows(q_in);
  const Tensor k = with_contiguous_rows(k_in);
  const Tensor v = with_contiguous_rows(v_in);
  const Tensor dout = with_contiguous_rows(dout_in);
  const Tensor out = with_contiguous_rows(out_in);
  const Tensor lse = lse_in.contiguous();
  Tensor dq = new_output(problem, q.sizes(), q.options());
  Tensor dk = new_output(problem, k.sizes(), k.options());
  Tensor dv = new_output(problem, v.sizes(), v.options());
  if (out.numel() == 0) return {dq.zero_(), dk.zero_(), dv.zero_()};
  dispatch(q.scalar_type(), [&]<typename T, typename E> {
    const Gradients<T> tensors{
        .dout = rows_of<const T>(dout),
        .q = rows_of<const T>(q),
        .k = rows_of<const T>(k),
        .v = rows_of<const T>(v),
        .out = rows_of<const T>(out),
        .lse = lse.const_data_ptr<float>(),
        .dq = rows_of<T>(dq),
        .dk = rows_of<T>(dk),
        .dv = rows_of<T>(dv)};
    Backward<T, E>(problem, tensors).run();
  });
  return {dq, dk, dv};
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("attention_fwd", &attention_fwd_cpu);
  m.impl("attention_bwd", &attention_bwd_cpu);
}

}  // namespace
}  // namespace accel
#endif
