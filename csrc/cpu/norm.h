// What RMSNorm and LayerNorm on CPU have in common: the [N] vectors on their way in (to fp32) and
// their gradients on the way out, how rows are shared among threads, and when output goes past the
// caches. T rows, N columns, P partial sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

namespace accel {

// [N] of any float dtype -> contiguous fp32, plus `offset`. The tensor itself where that is no
// change.
at::Tensor to_fp32(const at::Tensor& vector_N, float offset);

// [P, N] fp32 -> [N] of `dtype`: the sum over P, in an order that only P decides.
at::Tensor sum_partials(const at::Tensor& partials_PN, at::ScalarType dtype);

void check_norm_inputs(const char* op, const at::Tensor& x, const at::Tensor& weight);
void check_norm_grad(
    const char* op, const at::Tensor& dy, const at::Tensor& x, at::TensorList per_row);

// Fewest rows that are worth a thread of their own: one thread reads 32K elements in some 10 us,
// which is what waking another one costs.
inline int64_t rows_per_task(int64_t num_cols) {
  return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, num_cols));
}

constexpr int64_t kRowsPerBlock = 8;

// Gradients of the [N] vectors are summed in three steps: within blocks of rows, over the blocks of
// a run, over the runs. All three depend on the number of rows alone, so the bits do not depend on
// the number of threads, and no sum is a long chain of roundings: in fp32 at 4096 x 4096, without
// blocks and with the runs one after the other, dweight was 3.5 times as far off as PyTorch's own.
struct RowRuns {
  static constexpr int64_t kEnoughRuns = 128;  // work for that many cores
  static constexpr int64_t kMinRows = 16;      // keeps the partial sums small against the rows
  static constexpr int64_t kMaxRows = 128;

  int64_t num_rows;
  int64_t length;  // rows in each run, a multiple of kRowsPerBlock; the last run may be shorter
  int64_t count;

  explicit RowRuns(int64_t num_rows)
      : num_rows(num_rows),
        length(at::divup(std::clamp(at::divup(num_rows, kEnoughRuns), kMinRows, kMaxRows),
                         kRowsPerBlock) *
               kRowsPerBlock),
        count(at::divup(num_rows, length)) {}

  // Calls f(run, first row, last row + 1) for every run, in parallel.
  template <typename F>
  void parallel(int64_t num_cols, F f) const {
    const int64_t runs_per_task = at::divup(rows_per_task(num_cols), length);
    at::parallel_for(0, count, runs_per_task, [&](int64_t begin, int64_t end) {
      for (int64_t run = begin; run < end; ++run) {
        f(run, run * length, std::min(num_rows, (run + 1) * length));
      }
    });
  }
};

// Whether to write `output`, rows of num_cols, past the caches.
// Measured with RMSNorm, N = 4096, median ms with / without, 2 threads:
//                 AMD Zen 4, AVX-512, 32 MiB L3          AMD Zen 3, AVX2, 32 MiB L3
//                 forward          backward              forward         backward
//   fp32 64 MiB   3.8  / 4.8       6.6  / 7.9            5.4 / 7.0       9.0 / 10.6
//   bf16 32 MiB   1.8  / 2.3       3.5  / 3.9            4.0 / 4.0       7.4 / 6.5
//   bf16 16 MiB   0.89 / 1.11      1.49 / 1.77
//   bf16  8 MiB   0.46 / 0.46      0.81 / 0.82           1.0 / 1.0       2.2 / 1.7
// On Zen 3 the stores of bf16 filled a quarter of a line each; since then they fill a whole one on
// AVX-512 and half of one on AVX2. Below 16 MiB the next reader would rather find it in the cache.
bool should_stream(const at::Tensor& output, int64_t num_cols);

}  // namespace accel
