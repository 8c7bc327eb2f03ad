// Vec: kLanes fp32 numbers in one register, loaded from and stored to float, bfloat16 or half.
//
// Arithmetic is the compiler's own (GCC vector extensions: a * b + c), so there is nothing to wrap.
// Stores round to nearest even and keep NaN a NaN (with its sign). `Full` is a whole vector, `Tail`
// the ragged end of a row: a tail load fills the missing lanes with 0, a tail store leaves memory
// beyond alone.
//
// No include guard: for_each_isa.h includes this once per instruction set.

#define ACCEL_INLINE __attribute__((always_inline)) inline

namespace accel::ACCEL_ISA {

using c10::BFloat16;
using c10::Half;

constexpr int kLanes = ACCEL_LANES;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecI32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecU16 __attribute__((vector_size(2 * kLanes)));

struct Full {};
struct Tail {
  int64_t lanes;  // 0 < lanes < kLanes
};

template <typename To, typename From>
ACCEL_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename To>
ACCEL_INLINE To load_bits(const void* p) {
  To to;
  std::memcpy(&to, p, sizeof(to));
  return to;
}

// Between 16 and 32 bits. Spelled out because GCC 12's __builtin_convertvector takes 4 instructions
// where the CPU has 1 or 2.
ACCEL_INLINE VecU32 widen(VecU16 v) {
#if ACCEL_LANES == 16
  return (VecU32)_mm512_cvtepu16_epi32((__m256i)v);
#elif ACCEL_LANES == 8
  return (VecU32)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, VecU32);
#endif
}

ACCEL_INLINE VecU16 narrow(VecU32 v) {
#if ACCEL_LANES == 16
  return (VecU16)_mm512_cvtepi32_epi16((__m512i)v);
#elif ACCEL_LANES == 8
  const __m128i high = _mm256_extracti128_si256((__m256i)v, 1);
  return (VecU16)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), high);
#else
  return __builtin_convertvector(v, VecU16);
#endif
}

#if ACCEL_LANES == 16
// For 32 words: word i at 2 i + 1, the upper half of lane i.
ACCEL_INLINE __m512i upper_words() {
  typedef uint16_t Words __attribute__((vector_size(64)));
  Words index;
  for (int i = 0; i < 32; ++i) index[i] = i / 2;
  return (__m512i)index;
}

// The words 2 i + 1, the upper halves of the lanes, of two vectors.
ACCEL_INLINE __m512i upper_halves(__m512i low, __m512i high) {
  typedef uint16_t Words __attribute__((vector_size(64)));
  Words index;
  for (int i = 0; i < 32; ++i) index[i] = 2 * i + 1;
  return _mm512_permutex2var_epi16(low, (__m512i)index, high);
}

// fp32 -> bf16 in the upper half of each lane: round to nearest, ties to even. Not for NaN.
ACCEL_INLINE __m512i round_number_to_bf16(Vec v) {
  const __m512i bits = (__m512i)v;
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(rounded, odd, bits, _mm512_set1_epi32(0x8000));
}

// Rounding could carry a NaN into infinity or zero: keep its sign and top bits, and quieten it.
ACCEL_INLINE __m512i round_to_bf16(Vec v) {
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(
      round_number_to_bf16(v), is_nan, (__m512i)v, _mm512_set1_epi32(0x400000));
}

// Two vectors -> 32 words of bf16. One comparison finds a NaN in either; they are rare.
ACCEL_INLINE __m512i to_bf16_line(Vec low, Vec high) {
  if (__builtin_expect(_mm512_cmp_ps_mask((__m512)low, (__m512)high, _CMP_UNORD_Q) != 0, 0)) {
    return upper_halves(round_to_bf16(low), round_to_bf16(high));
  }
  return upper_halves(round_number_to_bf16(low), round_number_to_bf16(high));
}

// Two vectors -> 32 words of bf16: those of `even` at 2 i, those of `odd` at 2 i + 1.
ACCEL_INLINE __m512i to_bf16_pairs(Vec even, Vec odd) {
  constexpr __mmask32 kOdd = 0xaaaaaaaau;
  if (__builtin_expect(_mm512_cmp_ps_mask((__m512)even, (__m512)odd, _CMP_UNORD_Q) != 0, 0)) {
    return _mm512_mask_blend_epi16(
        kOdd, _mm512_srli_epi32(round_to_bf16(even), 16), round_to_bf16(odd));
  }
  return _mm512_mask_blend_epi16(
      kOdd, _mm512_srli_epi32(round_number_to_bf16(even), 16), round_number_to_bf16(odd));
}
#endif

ACCEL_INLINE Vec load(const float* p, Full) { return load_bits<Vec>(p); }

ACCEL_INLINE Vec load(const BFloat16* p, Full) {
#if ACCEL_LANES == 16
  // One instruction that puts each word into the upper half of its lane, in place of two.
  const __m512i words = _mm512_castsi256_si512(load_bits<__m256i>(p));
  return (Vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, upper_words(), words);
#else
  return bit_cast<Vec>(widen(load_bits<VecU16>(p)) << 16);
#endif
}

ACCEL_INLINE Vec load(const Half* p, Full) {
#if ACCEL_LANES == 16
  return (Vec)_mm512_cvtph_ps(load_bits<__m256i>(p));
#elif ACCEL_LANES == 8
  return (Vec)_mm256_cvtph_ps(load_bits<__m128i>(p));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}

// fp32 -> the bits that memory holds: round to nearest, ties to even.
ACCEL_INLINE Vec to_bits(Vec v, const float*) { return v; }

// The upper 16 bits of each lane are the bfloat16; the lower ones are noise.
ACCEL_INLINE VecU32 round_to_bfloat16(Vec v) {
#if ACCEL_LANES == 16
  return (VecU32)round_to_bf16(v);
#else
  const VecU32 bits = bit_cast<VecU32>(v);
  const VecU32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  // Rounding could carry a NaN into infinity or zero: keep its sign and top bits, and quieten it.
  const VecU32 quiet = bits | 0x400000u;
  const VecI32 is_nan = v != v;
  return is_nan ? quiet : rounded;
#endif
}

ACCEL_INLINE VecU16 to_bits(Vec v, const BFloat16*) { return narrow(round_to_bfloat16(v) >> 16); }

ACCEL_INLINE VecU16 to_bits(Vec v, const Half*) {
#if ACCEL_LANES == 16
  return (VecU16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif ACCEL_LANES == 8
  return (VecU16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  VecU16 bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = Half(v[i]).x;
  return bits;
#endif
}

// v as it would come back from memory of T: no product in it is fused with a later sum.
ACCEL_INLINE Vec rounded(Vec v, const float*) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(v);
#else
  return v;  // clang fuses within one expression only
#endif
}

template <typename T>
ACCEL_INLINE Vec rounded(Vec v, const T* type) {
  const auto bits = to_bits(v, type);
  T lanes[kLanes];
  std::memcpy(static_cast<void*>(lanes), &bits, sizeof(bits));
  return load(lanes, Full{});
}

template <typename T>
ACCEL_INLINE void store(T* p, Vec v, Full) {
  const auto bits = to_bits(v, p);
  std::memcpy(static_cast<void*>(p), &bits, sizeof(bits));
}

template <typename T>
ACCEL_INLINE Vec load(const T* p, Tail tail) {
  T lanes[kLanes] = {};
  std::memcpy(static_cast<void*>(lanes), p, tail.lanes * sizeof(T));
  return load(lanes, Full{});
}

template <typename T>
ACCEL_INLINE void store(T* p, Vec v, Tail tail) {
  T lanes[kLanes];
  store(lanes, v, Full{});
  std::memcpy(static_cast<void*>(p), lanes, tail.lanes * sizeof(T));
}

// Past the caches, straight to memory. `p` must be aligned to the bytes of one vector of T.
// Finish with stream_fence() before another thread may look.
template <typename Bits>
ACCEL_INLINE void stream_bits(void* p, Bits bits) {
#if ACCEL_LANES > 4
  if constexpr (sizeof(bits) == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bit_cast<__m512i>(bits));
  } else if constexpr (sizeof(bits) == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bit_cast<__m256i>(bits));
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), bit_cast<__m128i>(bits));
  }
#else
  std::memcpy(p, &bits, sizeof(bits));
#endif
}

template <typename T>
ACCEL_INLINE void stream(T* p, Vec v) {
  stream_bits(p, to_bits(v, p));
}

// One vector, past the caches where kStream says so and the span is whole.
template <bool kStream, typename T, typename Span>
ACCEL_INLINE void store_one(T* p, Vec v, Span span) {
  if constexpr (kStream && std::is_same_v<Span, Full>) {
    stream(p, v);
  } else {
    store(p, v, span);
  }
}

// Two vectors side by side. With AVX-512 that is a whole cache line of 16-bit elements: written at
// once, and bf16 is rounded and packed in 11 instructions instead of 19.
template <bool kStream, typename T>
ACCEL_INLINE void store(T* p, Vec low, Vec high) {
#if ACCEL_LANES == 16
  if constexpr (sizeof(T) == 2) {
    __m512i bits;
    if constexpr (std::is_same_v<T, BFloat16>) {
      bits = to_bf16_line(low, high);
    } else {
      bits = _mm512_castsi256_si512((__m256i)to_bits(low, p));
      bits = _mm512_inserti64x4(bits, (__m256i)to_bits(high, p), 1);
    }
    if constexpr (kStream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bits);
    } else {
      _mm512_storeu_si512(p, bits);
    }
    return;
  }
#endif
  if constexpr (kStream) {
    stream(p, low);
    stream(p + kLanes, high);
  } else {
    store(p, low, Full{});
    store(p + kLanes, high, Full{});
  }
}

// In a loop over the columns of a row: fetches the line of row[col] into L2 for a later read, once.
// Any address will do, even one that is not ours.
template <typename T>
ACCEL_INLINE void prefetch(const T* row, int64_t col) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (col % kLine == 0) __builtin_prefetch(row + col, 0, 2);
}

ACCEL_INLINE void stream_fence() {
#if ACCEL_LANES > 4
  _mm_sfence();
#endif
}

// Zeroes the lanes that a tail does not have.
ACCEL_INLINE Vec keep(Vec v, Full) { return v; }

ACCEL_INLINE Vec keep(Vec v, Tail tail) {
  for (int i = 0; i < kLanes; ++i) v[i] = i < tail.lanes ? v[i] : 0.0f;
  return v;
}

ACCEL_INLINE VecI32 lane_numbers() {
  VecI32 lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// Lane i of the result is lane i + step of v, around the end.
template <typename V>
ACCEL_INLINE V rotated(V v, int step) {
  return __builtin_shuffle(v, (lane_numbers() + step) & (kLanes - 1));
}

ACCEL_INLINE float sum(Vec v) {
#pragma GCC unroll 4
  for (int step = kLanes / 2; step > 0; step /= 2) v += rotated(v, step);
  return v[0];
}

// Adds up neighbours, then sums of neighbours: fewer roundings in a row than one after the other.
template <int kCount>
ACCEL_INLINE Vec tree_sum(const Vec (&terms)[kCount]) {
  static_assert((kCount & (kCount - 1)) == 0);
  Vec sums[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) sums[i] = terms[i];
#pragma GCC unroll 8
  for (int step = 1; step < kCount; step *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

// Calls f(column, k, span) over [0, num_cols): k counts 0..kUnroll-1 so that f can keep kUnroll
// independent accumulators, span is Full or the Tail.
template <int kUnroll, typename F>
ACCEL_INLINE void for_each_vec(int64_t num_cols, F f) {
  int64_t col = 0;
  for (; col + kUnroll * kLanes <= num_cols; col += kUnroll * kLanes) {
#pragma GCC unroll 8
    for (int k = 0; k < kUnroll; ++k) f(col + k * kLanes, k, Full{});
  }
  for (; col + kLanes <= num_cols; col += kLanes) f(col, 0, Full{});
  if (col < num_cols) f(col, 0, Tail{num_cols - col});
}

template <int kRows>
struct Rows {
  Vec vec[kRows];
};

// Stores f(column, k, span), a Rows<kRows>, to kRows rows of num_cols each: two vectors at a time, so
// that kStream writes whole lines. The columns must then be whole lines too. Columns, k and spans are
// those of for_each_vec<2>.
template <bool kStream, int kRows, typename T, typename F>
ACCEL_INLINE void store_rows(T* out, int64_t num_cols, F f) {
  int64_t col = 0;
  const auto store_one = [&](auto span) {
    const Rows<kRows> v = f(col, 0, span);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) store(out + row * num_cols + col, v.vec[row], span);
  };
  for (; col + 2 * kLanes <= num_cols; col += 2 * kLanes) {
    const Rows<kRows> low = f(col, 0, Full{}), high = f(col + kLanes, 1, Full{});
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      store<kStream>(out + row * num_cols + col, low.vec[row], high.vec[row]);
    }
  }
  for (; col + kLanes <= num_cols; col += kLanes) store_one(Full{});
  if (col < num_cols) store_one(Tail{num_cols - col});
}

template <bool kStream, typename T, typename F>
ACCEL_INLINE void store_row(T* out, int64_t num_cols, F f) {
  store_rows<kStream, 1>(
      out, num_cols, [&](int64_t col, int k, auto span) { return Rows<1>{f(col, k, span)}; });
}

// 2 kLanes numbers of a row in two registers, for work that treats every column alike. Which number
// is in which lane is up to T: bfloat16 pairs stay as they lie in memory, the even columns in v[0]
// and the odd ones in v[1]. That takes 4 instructions to load and store, widen() and narrow() 14, and
// a store fills a whole cache line with AVX-512.
struct Pair {
  Vec v[2];
};
struct FullPair {};
struct TailPair {
  int64_t count;  // 0 < count < 2 kLanes
};

template <typename T>
ACCEL_INLINE Pair load(const T* p, FullPair) {
  return {load(p, Full{}), load(p + kLanes, Full{})};
}

ACCEL_INLINE Pair load(const BFloat16* p, FullPair) {
  const VecU32 bits = load_bits<VecU32>(p);
  return {bit_cast<Vec>(bits << 16), bit_cast<Vec>(bits & 0xffff0000u)};
}

template <bool kStream, typename T>
ACCEL_INLINE void store(T* p, Pair pair, FullPair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
#if ACCEL_LANES == 16
    const VecU32 bits = (VecU32)to_bf16_pairs(pair.v[0], pair.v[1]);
#else
    const VecU32 bits =
        (round_to_bfloat16(pair.v[0]) >> 16) | (round_to_bfloat16(pair.v[1]) & 0xffff0000u);
#endif
    if constexpr (kStream) {
      stream_bits(p, bits);
    } else {
      std::memcpy(static_cast<void*>(p), &bits, sizeof(bits));
    }
  } else {
    store<kStream>(p, pair.v[0], pair.v[1]);
  }
}

template <typename T>
ACCEL_INLINE Pair load(const T* p, TailPair tail) {
  T numbers[2 * kLanes] = {};
  std::memcpy(static_cast<void*>(numbers), p, tail.count * sizeof(T));
  return load(numbers, FullPair{});
}

template <bool kStream, typename T>
ACCEL_INLINE void store(T* p, Pair pair, TailPair tail) {
  T numbers[2 * kLanes];
  store<false>(numbers, pair, FullPair{});
  std::memcpy(static_cast<void*>(p), numbers, tail.count * sizeof(T));
}

ACCEL_INLINE Pair plus(Pair a, Pair b) { return {a.v[0] + b.v[0], a.v[1] + b.v[1]}; }

// fp32 numbers that go with those of a Pair of T: number by number, in the same lanes.
template <typename T>
ACCEL_INLINE Pair load_beside(const float* p, FullPair span) {
  const Pair in = load(p, span);
  if constexpr (!std::is_same_v<T, BFloat16>) return in;
  const VecI32 even = 2 * lane_numbers();
  return {__builtin_shuffle(in.v[0], in.v[1], even), __builtin_shuffle(in.v[0], in.v[1], even + 1)};
}

template <typename T>
ACCEL_INLINE Pair load_beside(const float* p, TailPair tail) {
  float numbers[2 * kLanes] = {};
  std::memcpy(numbers, p, tail.count * sizeof(float));
  return load_beside<T>(numbers, FullPair{});
}

// v as it would come back from memory of T.
template <typename T>
ACCEL_INLINE Pair rounded(Pair pair, const T* type) {
  return {rounded(pair.v[0], type), rounded(pair.v[1], type)};
}

// In a loop over the pairs of a row: fetches the lines of a Pair at row[col] into L2 for a later read, once.
// Any address will do, even one that is not ours.
template <typename T>
ACCEL_INLINE void prefetch_later(const T* row, int64_t col) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t at = 0; at < 2 * kLanes; at += kLine) prefetch(row + at, col);
}

// Asks for the memory of a Pair to be brought to the L1 cache; any address will do.
template <typename T>
ACCEL_INLINE void prefetch_pair(const T* p) {
  constexpr int kLine = 64;
  for (size_t byte = 0; byte < 2 * kLanes * sizeof(T); byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + byte);
  }
}

// Calls f(column, span) over [0, num_cols); span is FullPair or TailPair.
template <typename F>
ACCEL_INLINE void for_each_pair(int64_t num_cols, F f) {
  int64_t col = 0;
  for (; col + 2 * kLanes <= num_cols; col += 2 * kLanes) f(col, FullPair{});
  if (col < num_cols) f(col, TailPair{num_cols - col});
}

ACCEL_INLINE void add_to(float* totals, const float* terms, int64_t count) {
  for_each_vec<1>(count, [&](int64_t i, int, auto span) {
    store(totals + i, load(totals + i, span) + load(terms + i, span), span);
  });
}

}  // namespace accel::ACCEL_ISA

