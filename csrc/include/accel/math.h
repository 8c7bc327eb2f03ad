// Elementary functions of a Vec. No include guard: for_each_isa.h includes this after vec.h.

namespace accel::ACCEL_ISA {

ACCEL_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN
ACCEL_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

ACCEL_INLINE Vec broadcast(float value) { return value - Vec{}; }

ACCEL_INLINE float max(Vec v) {
  float largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

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

// e^v, at most 1 ulp off where the result is normal; 0 below -104, inf above 89, NaN for NaN.
// e^v = 2^n e^r with n = round(v / ln 2) and |r| <= ln(2) / 2; ln 2 is split so that n ln 2 is exact
// to its last digits. The polynomial is that of Cephes' expf.
ACCEL_INLINE Vec exp(Vec v) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves no bit below 1
  const Vec lowest = broadcast(-104.0f);
  const Vec highest = broadcast(89.0f);
  v = v < lowest ? lowest : v;
  v = v > highest ? highest : v;
  const Vec n = (v * 0x1.715476p+0f + kRound) - kRound;
  const Vec r = (v - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return scale_by_power_of_2(p, n);
}

// 1 / (1 + e^-v)
ACCEL_INLINE Vec sigmoid(Vec v) { return 1.0f / (1.0f + exp(-v)); }

}  // namespace accel::ACCEL_ISA
