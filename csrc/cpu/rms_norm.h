// The rows of RMSNorm, for the norm alone (rms_norm.cpp) and behind a residual addition
// (add_rms_norm.cpp): the two must give the same bits.
//
// No include guard: each of them includes this once per instruction set, below for_each_isa.h.

namespace accel::ACCEL_ISA {

// Rows that the backward finishes together: their dscale is read and written once, while the next
// ones are fetched into L2. bf16 4096 x 4096, 2 threads of an AMD Zen 4, share of a streaming copy's
// bandwidth, medians of 5 runs: 1 row 0.65, 2 rows 0.68, 4 rows 0.60; into L1 or not fetched 0.5.
constexpr int kRowsAtOnce = 2;

// 1 / sqrt(mean(v^2) + eps) of one row; `value(col, span)` gives v, and is called once per column.
template <typename F>
ACCEL_INLINE float inverse_rms(int64_t num_cols, float eps, F value) {
  Vec squares[4] = {};
  for_each_vec<4>(num_cols, [&](int64_t col, int k, auto span) {
    const Vec v = value(col, span);
    squares[k] += v * v;
  });
  const float mean_square = sum(tree_sum(squares)) / num_cols;
  return 1.0f / std::sqrt(mean_square + eps);
}

// y = x * rstd * scale. `fetch(col)` prefetches what the next row reads first.
template <bool kStream, typename T, typename F>
ACCEL_INLINE void scale_row(
    const T* x, float rstd, const float* scale, T* y, int64_t num_cols, F fetch) {
  store_row<kStream>(y, num_cols, [&](int64_t col, auto span) {
    fetch(col);
    return load(x + col, span) * rstd * load(scale + col, span);
  });
}

// Some rows of the backward. With g = dy * scale and h = x * rstd:
//   dx = rstd * (g - h * mean(g * h)),  dscale += sum of dy * h over the rows.
// `finish(row, col, dx, span)` gives what is written to dx.
template <bool kStream, int kRows, typename T, typename F>
ACCEL_INLINE void rms_norm_backward_rows(
    const T* dy, const T* x, const float* scale, const float* rstd, T* dx, int64_t num_cols,
    float* dscale, F finish) {
  float mean_gh[kRows];
  for (int row = 0; row < kRows; ++row) {
    Vec dots[4] = {};
    for_each_vec<4>(num_cols, [&](int64_t col, int k, auto span) {
      const Vec g = load(dy + row * num_cols + col, span) * load(scale + col, span);
      dots[k] += g * load(x + row * num_cols + col, span);
    });
    mean_gh[row] = sum(tree_sum(dots)) * rstd[row] / num_cols;
  }
  store_rows<kStream, kRows>(dx, num_cols, [&](int64_t col, auto span) {
    const Vec scale_v = load(scale + col, span);
    Vec dscale_v = load(dscale + col, span);
    Rows<kRows> out;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const int64_t at = row * num_cols + col;
      prefetch(dy + (kRows + row) * num_cols, col);
      prefetch(x + (kRows + row) * num_cols, col);
      const Vec dy_v = load(dy + at, span);
      const Vec h = load(x + at, span) * rstd[row];
      const Vec g = dy_v * scale_v;
      out.vec[row] = finish(row, col, rstd[row] * (g - h * mean_gh[row]), span);
      dscale_v += dy_v * h;
    }
    store(dscale + col, dscale_v, span);
    return out;
  });
}

// Rows [begin, end), their dscale summed into one partial; `block_N` is scratch.
// `finish(row, col, dx, span)` gives what is written to dx.
template <bool kStream, typename T, typename F>
ACCEL_INLINE void rms_norm_backward_run(
    const T* dy, const T* x, const float* scale, const float* rstd, T* dx, int64_t num_cols,
    int64_t begin, int64_t end, float* block_N, float* dscale, F finish) {
  std::memset(dscale, 0, num_cols * sizeof(float));
  int64_t row = begin;
  const auto next_rows = [&]<int kRows> {
    const int64_t at = row * num_cols;
    rms_norm_backward_rows<kStream, kRows>(
        dy + at, x + at, scale, rstd + row, dx + at, num_cols, block_N,
        [&](int i, int64_t col, Vec v, auto span) { return finish(row + i, col, v, span); });
    row += kRows;
  };
  while (row < end) {
    const int64_t block_end = row + kRowsPerBlock < end ? row + kRowsPerBlock : end;
    std::memset(block_N, 0, num_cols * sizeof(float));
    while (row + kRowsAtOnce <= block_end) next_rows.template operator()<kRowsAtOnce>();
    while (row < block_end) next_rows.template operator()<1>();
    add_to(dscale, block_N, num_cols);
  }
  if constexpr (kStream) stream_fence();
}

}  // namespace accel::ACCEL_ISA
