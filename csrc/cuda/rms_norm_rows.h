// The rows of RMSNorm, for the norm alone (rms_norm.cu) and behind a residual addition (add_rms_norm.cu):
// the two must give the same bits, so the order of every sum hangs on N and T alone, not on how the
// tensors lie in memory.
//
// A row that its threads can hold in registers is read from memory once; a longer one is read twice, the
// second time from a cache. Backward, P programs take rows in turn and sum dweight over theirs.
#pragma once

#include "norm_rows.h"
#include "rms_norm.h"
#include "sum_partials.h"

namespace accel::cuda {
namespace {

// Of a row, in registers, in each thread. Backward there are x, dy (and dtotal) at once, and dweight in
// fp32: 4 packs take some 110 registers, of which a block of 512 threads may have 128 each.
constexpr int kPacks = 4;

struct ForwardCall {
  RmsNormForward op;
  NormRows rows;
};

template <typename T>
ACCEL_DEVICE Pack<T> sum_of(const Pack<T>& a, const Pack<T>& b) {
  float sum[kPack<T>];
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum[i] = a[i] + b[i];
  return pack_of<T>(sum);
}

// What the norm is of, at [row, col): x, or residual + (x + bias), each sum rounded; written to total too.
template <typename T, bool kAdd, bool kWhole>
ACCEL_DEVICE Pack<T> norm_input(const RmsNormForward& op, int64_t at, int64_t col, int64_t count) {
  Pack<T> x = load<kWhole>(static_cast<const T*>(op.x) + at, count);
  if constexpr (kAdd) {
    const Pack<T> residual = load<kWhole>(static_cast<const T*>(op.residual) + at, count);
    if (op.bias) {
      const Pack<T> bias = load<kWhole>(static_cast<const T*>(op.bias) + col, count);
      x = sum_of(x, bias);
    }
    x = sum_of(residual, x);
  }
  return x;
}

template <typename T>
ACCEL_DEVICE float sum_of_squares(const Pack<T>& x, float sum) {
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum += x[i] * x[i];
  return sum;
}

template <typename T, bool kWhole>
ACCEL_DEVICE void write_norm(const RmsNormForward& op, const Pack<T>& x, float rstd, int64_t at,
                             int64_t col, int64_t count) {
  float y[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, y);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) y[i] *= x[i] * rstd;
  store<kWhole>(static_cast<T*>(op.y) + at, pack_of<T>(y), count);
}

template <typename T, bool kAdd, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_forward_whole_rows(const ForwardCall call) {
  const RmsNormForward& op = call.op;
  const NormRows& rows = call.rows;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows.teams.teams_per_block() + rows.teams.team();
  const int64_t num_cols = row < rows.num_rows ? rows.num_cols : 0;  // of those beyond, nothing
  const int64_t start = row * rows.num_cols;
  Pack<T> x[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int64_t col = rows.template col<T>(k);
    x[k] = norm_input<T, kAdd, kWhole>(op, start + col, col, num_cols - col);
    // Written at once where elements come one by one, all packs of which are too many to have under way.
    if constexpr (kAdd && !kWhole) {
      store<false>(static_cast<T*>(op.total) + start + col, x[k], num_cols - col);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) squares = sum_of_squares(x[k], squares);
  squares = row_sum(squares, rows.teams, 0);
  const float rstd = rsqrtf(squares / static_cast<float>(rows.num_cols) + op.eps);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    x[k].stay_packed();
    const int64_t col = rows.template col<T>(k), count = num_cols - col;
    if (count <= 0) continue;
    if constexpr (kAdd && kWhole) store<true>(static_cast<T*>(op.total) + start + col, x[k], count);
    write_norm<T, kWhole>(op, x[k], rstd, start + col, col, count);
  }
  if (rows.teams.lane() == 0 && num_cols) op.rstd[row] = rstd;
}

// One row for each block. With kAdd, what is read again is total, by the thread that wrote it.
template <typename T, bool kAdd, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_forward_long_rows(const ForwardCall call) {
  const RmsNormForward& op = call.op;
  const NormRows& rows = call.rows;
  const int64_t row = blockIdx.x, start = row * rows.num_cols;
  float squares = 0.0f;
  for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
    const int64_t count = rows.num_cols - col;
    const Pack<T> x = norm_input<T, kAdd, kWhole>(op, start + col, col, count);
    if constexpr (kAdd) store<kWhole>(static_cast<T*>(op.total) + start + col, x, count);
    squares = sum_of_squares(x, squares);
  }
  squares = row_sum(squares, rows.teams, 0);
  const float rstd = rsqrtf(squares / static_cast<float>(rows.num_cols) + op.eps);
  for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
    const int64_t count = rows.num_cols - col;
    const T* x = static_cast<const T*>(kAdd ? op.total : op.x) + start + col;
    write_norm<T, kWhole>(op, load<kWhole>(x, count), rstd, start + col, col, count);
  }
  if (threadIdx.x == 0) op.rstd[row] = rstd;
}

struct BackwardCall {
  RmsNormBackward op;
  NormRows rows;
};

// With h = x rstd and g = dy scale: the sum of g h over this pack.
template <typename T, bool kWhole>
ACCEL_DEVICE float dot(const RmsNormBackward& op, const Pack<T>& x, const Pack<T>& dy, int64_t col,
                       int64_t count, float rstd, float sum) {
  float scale[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, scale);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    sum += dy[i] * scale[i] * (x[i] * rstd);
  }
  return sum;
}

// Writes dx = rstd (g - h mean), to which dtotal is added after rounding, and adds dy h to dweight.
template <typename T, bool kAdd, bool kWhole>
ACCEL_DEVICE void write_dx(const RmsNormBackward& op, const Pack<T>& x, const Pack<T>& dy,
                           const Pack<T>& dtotal, int64_t at, int64_t col, int64_t count, float rstd,
                           float mean, float (&dweight)[kPack<T>]) {
  float dx[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, dx);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    const float dy_i = dy[i], h = x[i] * rstd;
    dx[i] = fmaf(dy_i, dx[i], -(h * mean)) * rstd;  // one contraction, the same with and without addition
    if constexpr (kAdd) {
      // no multiply-add with the product above: the two steps round it
      if (op.dtotal) dx[i] = __fadd_rn(rounded<T>(dx[i]), dtotal[i]);
    }
    dweight[i] += dy_i * h;
  }
  store<kWhole>(static_cast<T*>(op.dx) + at, pack_of<T>(dx), count);
}

template <typename T, bool kAdd, bool kWhole>
__global__ void __launch_bounds__(kMaxThreadsBackward)
    rms_norm_backward_whole_rows(const BackwardCall call) {
  const RmsNormBackward& op = call.op;
  const NormRows& rows = call.rows;
  const RowTeams teams = rows.teams;
  float dweight[kPacks][kPack<T>] = {};
  int turn = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * teams.teams_per_block(); first < rows.num_rows;
       first += static_cast<int64_t>(gridDim.x) * teams.teams_per_block()) {
    const int64_t row = first + teams.team();
    const int64_t num_cols = row < rows.num_rows ? rows.num_cols : 0;
    const int64_t start = row * rows.num_cols;
    const float rstd = num_cols ? op.rstd[row] : 0.0f;
    Pack<T> x[kPacks], dy[kPacks], dtotal[kAdd && kWhole ? kPacks : 1];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int64_t col = rows.template col<T>(k), at = start + col, count = num_cols - col;
      x[k] = load<kWhole>(static_cast<const T*>(op.x) + at, count);
      dy[k] = load<kWhole>(static_cast<const T*>(op.dy) + at, count);
      if constexpr (kAdd && kWhole) {
        if (op.dtotal) dtotal[k] = load<true>(static_cast<const T*>(op.dtotal) + at, count);
      }
    }
    float mean = 0.0f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (!kWhole) one_after_the_other();
      const int64_t col = rows.template col<T>(k);
      mean = dot<T, kWhole>(op, x[k], dy[k], col, num_cols - col, rstd, mean);
    }
    mean = row_sum(mean, teams, turn++) / static_cast<float>(rows.num_cols);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (!kWhole) one_after_the_other();
      x[k].stay_packed(), dy[k].stay_packed();
      const int64_t col = rows.template col<T>(k), at = start + col, count = num_cols - col;
      if constexpr (kAdd && !kWhole) {  // late: elements one by one take twice the registers
        if (op.dtotal) dtotal[0] = load<false>(static_cast<const T*>(op.dtotal) + at, count);
      }
      write_dx<T, kAdd, kWhole>(op, x[k], dy[k], dtotal[kAdd && kWhole ? k : 0], at, col, count, rstd,
                                mean, dweight[k]);
    }
  }
  store_partial<T>(rows, dweight, op.dweight_PN + blockIdx.x * rows.num_cols);
}

// One row at a time. dweight is summed in memory, where each column is one thread's own.
template <typename T, bool kAdd, bool kWhole>
__global__ void __launch_bounds__(kMaxThreadsBackward, 1)
    rms_norm_backward_long_rows(const BackwardCall call) {
  const RmsNormBackward& op = call.op;
  const NormRows& rows = call.rows;
  float* partial = op.dweight_PN + blockIdx.x * rows.num_cols;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows.num_rows; row += gridDim.x) {
    const int64_t start = row * rows.num_cols;
    const float rstd = op.rstd[row];
    float mean = 0.0f;
    for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
      const int64_t at = start + col, count = rows.num_cols - col;
      const Pack<T> x = load<kWhole>(static_cast<const T*>(op.x) + at, count);
      const Pack<T> dy = load<kWhole>(static_cast<const T*>(op.dy) + at, count);
      mean = dot<T, kWhole>(op, x, dy, col, count, rstd, mean);
    }
    mean = row_sum(mean, rows.teams, turn++) / static_cast<float>(rows.num_cols);
    for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
      const int64_t at = start + col, count = rows.num_cols - col;
      const Pack<T> x = load<kWhole>(static_cast<const T*>(op.x) + at, count);
      const Pack<T> dy = load<kWhole>(static_cast<const T*>(op.dy) + at, count);
      Pack<T> dtotal;
      if constexpr (kAdd) {
        if (op.dtotal) dtotal = load<kWhole>(static_cast<const T*>(op.dtotal) + at, count);
      }
      float dweight[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        dweight[i] = row >= gridDim.x && i < count ? partial[col + i] : 0.0f;
      }
      write_dx<T, kAdd, kWhole>(op, x, dy, dtotal, at, col, count, rstd, mean, dweight);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if (i < count) partial[col + i] = dweight[i];
      }
    }
  }
}

template <bool kAdd, bool kWhole>
void launch_forward(const RmsNormForward& op, Queue queue) {
  const RowBlock block(op.num_cols, op.dtype, kPacks, kMaxThreads);
  const bool whole = fits(block, kPacks, op.num_cols, op.dtype);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    return whole ? &rms_norm_forward_whole_rows<T, kAdd, kWhole>
                 : &rms_norm_forward_long_rows<T, kAdd, kWhole>;
  });
  const ForwardCall call{op, {op.num_rows, op.num_cols, {block.log2_threads}}};
  const auto num_blocks = static_cast<unsigned>(ceil_div(op.num_rows, block.rows_per_block));
  launch(kernel, num_blocks, block.threads_per_block, queue, call);
}

template <bool kAdd, bool kWhole>
void launch_backward(const RmsNormBackward& op, int64_t num_programs, Queue queue) {
  const RowBlock block(op.num_cols, op.dtype, kPacks, kMaxThreadsBackward);
  const bool whole = fits(block, kPacks, op.num_cols, op.dtype);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    return whole ? &rms_norm_backward_whole_rows<T, kAdd, kWhole>
                 : &rms_norm_backward_long_rows<T, kAdd, kWhole>;
  });
  const BackwardCall call{op, {op.num_rows, op.num_cols, {block.log2_threads}}};
  launch(kernel, static_cast<unsigned>(num_programs), block.threads_per_block, queue, call);
  sum_partials({op.dweight_PN, op.dweight, num_programs, op.num_cols, op.weight_is_float}, op.dtype,
               queue);
}

}  // namespace
}  // namespace accel::cuda
