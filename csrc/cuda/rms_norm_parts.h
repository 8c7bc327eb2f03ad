// What all kernels of RMSNorm's rows are made of.
#pragma once

#include "norm_rows.h"
#include "rms_norm.h"

namespace accel::cuda {
namespace {

// Of a row, in registers, in each thread. Backward there are x, dy (and dtotal) at once, and dweight in
// fp32: 4 packs take some 110 registers, of which a block of 512 threads may have 128 each.
constexpr int kPacks = 4;

struct ForwardCall {
  RmsNormForward op;
  NormRows rows;
};

struct BackwardCall {
  RmsNormBackward op;
  NormRows rows;
};

// Of even and of odd elements: two chains of additions.
struct Sums {
  float even = 0.0f, odd = 0.0f;

  ACCEL_DEVICE void add(int i, float a, float b) { (i % 2 ? odd : even) = fmaf(a, b, i % 2 ? odd : even); }
  ACCEL_DEVICE float total() const { return even + odd; }
};

// dx = rstd (g - h mean(g h)) = g rstd + x slope, with h = x rstd.
struct RowGradient {
  float rstd, slope;
  ACCEL_DEVICE RowGradient(float dot, float num_cols, float rstd)
      : rstd(rstd), slope(-(dot * rstd / num_cols) * rstd * rstd) {}
};

// dx of one element, to which dtotal is added after rounding; adds dy h to dweight. Contractions are by hand:
// the same bits in every kernel.
template <typename T, bool kAdd>
ACCEL_DEVICE float dx_of(const RowGradient& row, float x, float dy, float scale, float dtotal,
                         float& dweight) {
  const float d = dy * row.rstd;
  float dx = fmaf(d, scale, x * row.slope);
  if (kAdd) dx = __fadd_rn(rounded<T>(dx), dtotal);
  dweight = fmaf(d, x, dweight);
  return dx;
}

}  // namespace
}  // namespace accel::cuda
