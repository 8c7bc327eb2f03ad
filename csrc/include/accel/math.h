// Elementary functions of a Vec. No include guard: for_each_isa.h includes this after vec.h.

namespace accel::ACCEL_ISA {

// b where either is NaN. GCC 12 makes a comparison and a masked move of `a > b ? a : b` in AVX-512:
// the forward of cross_entropy (1024 x 32000 bf16, 2 threads of an AMD Zen 4) took 5.0 ms, not 3.6.
ACCEL_INLINE Vec max(Vec a, Vec b) {
#if ACCEL_LANES == 16
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif ACCEL_LANES == 8
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

ACCEL_INLINE Vec min(Vec a, Vec b) {
#if ACCEL_LANES == 16
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif ACCEL_LANES == 8
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

ACCEL_INLINE Vec broadcast(float value) { return value - Vec{}; }

// Every lane holds the largest of all.
ACCEL_INLINE Vec max_everywhere(Vec v) {
#pragma GCC unroll 4
  for (int step = kLanes / 2; step > 0; step /= 2) v = max(v, rotated(v, step));
  return v;
}

ACCEL_INLINE float max(Vec v) { return max_everywhere(v)[0]; }

// Correctly rounded; NaN below 0.
ACCEL_INLINE Vec sqrt(Vec v) {
#if ACCEL_LANES == 16
  return (Vec)_mm512_sqrt_ps((__m512)v);
#elif ACCEL_LANES == 8
  return (Vec)_mm256_sqrt_ps((__m256)v);
#elif defined(__SSE__)
  return (Vec)_mm_sqrt_ps((__m128)v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

// 2^n v for whole n. Two steps, so that neither overflows before the product does.
ACCEL_INLINE Vec scale_by_power_of_2(Vec v, Vec n) {
#if ACCEL_LANES == 16
  return (Vec)_mm512_scalef_ps((__m512)v, (__m512)n);
#else
  const VecI32 whole = __builtin_convertvector(n, VecI32);
  const VecI32 half = whole >> 1;
  const Vec first = bit_cast<Vec>((half + 127) << 23);
  const Vec second = bit_cast<Vec>((whole - half + 127) << 23);
  return v * first * second;
#endif
}

// e^v, or e^-v, at most 1 ulp off where the result is normal; 0 where the exponent is below -104, inf
// where it is above 89, NaN for NaN. e^v = 2^n e^r with n = round(v / ln 2) and |r| <= ln(2) / 2; ln 2
// is split so that n ln 2 is exact to its last digits. The polynomial is the closest to e^r that
// begins with 1 + r + r^2 / 2, up to r^6 and in relative error: 0.03 ulp.
template <bool kNegate = false>
ACCEL_INLINE Vec exp(Vec v) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves no bit below 1
  v = max(broadcast(kNegate ? -89.0f : -104.0f), v);
  v = min(broadcast(kNegate ? 104.0f : 89.0f), v);
  const Vec n = (v * (kNegate ? -0x1.715476p+0f : 0x1.715476p+0f) + kRound) - kRound;
  const Vec r = (kNegate ? -v - n * 0x1.62ep-1f : v - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f;
  Vec p = broadcast(1.3863781e-3f);
  p = p * r + 8.367483e-3f;
  p = p * r + 4.1667238e-2f;
  p = p * r + 1.6666535e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return scale_by_power_of_2(p, n);
}

// 2^v, at most 1 ulp off where the result is normal; 0 below -150, inf above 129, NaN for NaN. The
// polynomial is the least-squares fit of (2^r - 1) / r, reweighted until the relative error of 2^r on
// |r| <= 1/2 is even: 2e-9 before rounding.
ACCEL_INLINE Vec exp2(Vec v) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves no bit below 1
  v = min(broadcast(129.0f), max(broadcast(-150.0f), v));
  const Vec n = (v + kRound) - kRound;
  const Vec r = v - n;
  Vec p = broadcast(0x1.41fbbep-13f);
  p = p * r + 0x1.5f3e52p-10f;
  p = p * r + 0x1.3b2d4cp-7f;
  p = p * r + 0x1.c6aee8p-5f;
  p = p * r + 0x1.ebfbdcp-3f;
  p = p * r + 0x1.62e43p-1f;
  p = p * r + 1.0f;
  return scale_by_power_of_2(p, n);
}

// 2^v for what is rounded to bf16 next: relative error at most 1.6e-7 where the result is normal; 0 for
// -inf, NaN for NaN. AVX-512 takes floor(v) and the rest by one instruction each, at any v.
ACCEL_INLINE Vec exp2_for_bf16(Vec v) {
#if ACCEL_LANES == 16
  constexpr int kFloor = 0x9;  // and no exceptions
  const Vec r = (Vec)_mm512_reduce_ps((__m512)v, kFloor);
  Vec p = broadcast(0x1.e97506p-10f);
  p = p * r + 0x1.277852p-7f;
  p = p * r + 0x1.c91ce6p-5f;
  p = p * r + 0x1.ebdb56p-3f;
  p = p * r + 0x1.62e4bap-1f;
  p = p * r + 1.0f;
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)v);
#else
  return exp2(v);
#endif
}

// a / (1 + e^-v), which is a sigmoid(v) with one rounding less.
ACCEL_INLINE Vec times_sigmoid(Vec a, Vec v) { return a / (1.0f + exp<true>(v)); }

ACCEL_INLINE Vec sigmoid(Vec v) { return times_sigmoid(broadcast(1.0f), v); }

}  // namespace accel::ACCEL_ISA
