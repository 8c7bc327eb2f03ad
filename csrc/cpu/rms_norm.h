// The rows of RMSNorm, for the norm alone (rms_norm.cpp) and behind a residual addition
// (add_rms_norm.cpp): the two must give the same bits.
//
// No include guard: each of them includes this once per instruction set, below for_each_isa.h.

namespace accel::ACCEL_ISA {

// A row is read twice, for a sum over it and for its output. The second reading goes with the first one of
// what comes next, and fetches what comes after that into L2: memory is then busy all the time. bf16
// 4096 x 4096, 2 threads of an AMD Zen 4, ms, for one reading after the other: forward 1.11 for 1.31,
// backward 3.05 for 3.48.
//
// The forward takes its columns in pairs, which is fewer instructions for bf16. The same size, 2 threads of an
// AMD Zen 5, ms, for one vector at a time: AVX2 1.34 for 1.80, AVX-512 1.04 for 1.18 to 1.22. The backward gained
// 1.0 to 1.1 times there, and lost with 1024 columns.

// Rows that the backward finishes together: their dscale is read and written once. The same run: bf16 with
// 1, 2 and 4 rows 3.03, 3.06 and 3.6; fp32 4.87, 4.52 and 5.3.
constexpr int kRowsAtOnce = 2;

ACCEL_INLINE float inverse_rms(Pair squares, int64_t num_cols, float eps) {
  const float mean_square = sum(squares.v[0] + squares.v[1]) / num_cols;
  return 1.0f / std::sqrt(mean_square + eps);
}

ACCEL_INLINE void add_squares(Pair& squares, Pair pair) {
  for (int k = 0; k < 2; ++k) squares.v[k] += pair.v[k] * pair.v[k];
}

// 1 / sqrt(mean(v^2) + eps) of one row; `value(col, span)` gives v, and is called once per pair of columns.
template <typename F>
ACCEL_INLINE float inverse_rms(int64_t num_cols, float eps, F value) {
  Pair squares{};
  for_each_pair(num_cols, [&](int64_t col, auto span) { add_squares(squares, value(col, span)); });
  return inverse_rms(squares, num_cols, eps);
}

// y = x * rstd * scale of one row. Returns the next row's inverse_rms of `next_value(col, span)`.
template <bool kStream, typename T, typename F>
ACCEL_INLINE float scale_row(
    const T* x, float rstd, const float* scale, T* y, int64_t num_cols, float eps, F next_value) {
  Pair squares{};
  for_each_pair(num_cols, [&](int64_t col, auto span) {
    add_squares(squares, next_value(col, span));
    Pair out = load(x + col, span);
    const Pair scales = load_beside<T>(scale + col, span);
    for (int k = 0; k < 2; ++k) out.v[k] = out.v[k] * rstd * scales.v[k];
    store<kStream>(y + col, out, span);
  });
  return inverse_rms(squares, num_cols, eps);
}

// Rows [begin, end): `value(row)` gives the function of (col, span) with a row's numbers, which calls
// `finish(row, rstd, next_value)` for its output once they have been read; that returns scale_row's result.
template <typename F, typename G>
ACCEL_INLINE void rms_norm_forward_run(
    int64_t num_cols, float eps, int64_t begin, int64_t end, F value, G finish) {
  if (begin == end) return;
  float rstd = inverse_rms(num_cols, eps, value(begin));
  for (int64_t row = begin; row + 1 < end; ++row) rstd = finish(row, rstd, value(row + 1));
  finish(end - 1, rstd, [](int64_t, auto) { return Pair{}; });
}

// mean(g * h) of one row, with g = dy * scale and h = x * rstd, from sums of g * x.
ACCEL_INLINE float mean_gh(const Vec (&dots)[2], float rstd, int64_t num_cols) {
  return sum(tree_sum(dots)) * rstd / num_cols;
}

// kRows rows of the backward, with their means of g * h:
//   dx = rstd * (g - h * mean(g * h)),  dscale += sum of dy * h over the rows.
// `finish(row, col, dx, span)` gives what is written to dx. The means of the kNext rows behind replace theirs.
template <bool kStream, int kRows, int kNext, typename T, typename F>
ACCEL_INLINE void rms_norm_backward_rows(
    const T* dy, const T* x, const float* scale, const float* rstd, T* dx, int64_t num_cols,
    float (&means)[kRowsAtOnce], float* dscale, F finish) {
  float x_factor[kRows];
  for (int row = 0; row < kRows; ++row) x_factor[row] = rstd[row] * means[row] * rstd[row];
  Vec dots[kRowsAtOnce][2] = {};
  store_rows<kStream, kRows>(dx, num_cols, [&](int64_t col, int k, auto span) {
    const Vec scale_v = load(scale + col, span);
    Vec dscale_v = load(dscale + col, span);
    Rows<kRows> out;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const int64_t at = row * num_cols + col;
      const Vec x_v = load(x + at, span);
      const Vec scaled_dy = load(dy + at, span) * rstd[row];
      out.vec[row] = finish(row, col, scaled_dy * scale_v - x_v * x_factor[row], span);
      dscale_v += scaled_dy * x_v;
    }
#pragma GCC unroll 8
    for (int row = 0; row < kNext; ++row) {
      const int64_t at = (kRows + row) * num_cols + col;
      dots[row][k] += load(dy + at, span) * scale_v * load(x + at, span);
    }
#pragma GCC unroll 8
    for (int row = kRows + kNext; row < kRows + kNext + kRowsAtOnce; ++row) {
      prefetch(dy + row * num_cols, col);
      prefetch(x + row * num_cols, col);
    }
    store(dscale + col, dscale_v, span);
    return out;
  });
  for (int row = 0; row < kNext; ++row) means[row] = mean_gh(dots[row], rstd[kRows + row], num_cols);
}

// Rows [begin, end), their dscale summed into one partial; `block_N` is scratch.
// `finish(row, col, dx, span)` gives what is written to dx.
template <bool kStream, typename T, typename F>
ACCEL_INLINE void rms_norm_backward_run(
    const T* dy, const T* x, const float* scale, const float* rstd, T* dx, int64_t num_cols,
    int64_t begin, int64_t end, float* block_N, float* dscale, F finish) {
  static_assert(kRowsAtOnce == 2 && kRowsPerBlock % kRowsAtOnce == 0);
  std::memset(dscale, 0, num_cols * sizeof(float));
  float means[kRowsAtOnce] = {};
  for (int64_t row = begin; row < end && row < begin + kRowsAtOnce; ++row) {
    Vec dots[2] = {};
    for_each_vec<2>(num_cols, [&](int64_t col, int k, auto span) {
      const int64_t at = row * num_cols + col;
      dots[k] += load(dy + at, span) * load(scale + col, span) * load(x + at, span);
    });
    means[row - begin] = mean_gh(dots, rstd[row], num_cols);
  }
  int64_t row = begin;
  const auto next_rows = [&]<int kRows, int kNext> {
    const int64_t at = row * num_cols;
    rms_norm_backward_rows<kStream, kRows, kNext>(
        dy + at, x + at, scale, rstd + row, dx + at, num_cols, means, block_N,
        [&](int i, int64_t col, Vec v, auto span) { return finish(row + i, col, v, span); });
    row += kRows;
  };
  while (row < end) {
    const int64_t block_end = row + kRowsPerBlock < end ? row + kRowsPerBlock : end;
    std::memset(block_N, 0, num_cols * sizeof(float));
    while (row < block_end) {
      switch (end - row) {
        case 1: next_rows.template operator()<1, 0>(); break;
        case 2: next_rows.template operator()<2, 0>(); break;
        case 3: next_rows.template operator()<2, 1>(); break;
        default: next_rows.template operator()<2, 2>();
      }
    }
    add_to(dscale, block_N, num_cols);
  }
  if constexpr (kStream) stream_fence();
}

}  // namespace accel::ACCEL_ISA
