// The rows of RMSNorm, for the norm alone (rms_norm.cu) and behind a residual addition (add_rms_norm.cu):
// the two must give the same bits, so the order of every sum hangs on N and T alone, not on how the
// tensors lie in memory.
//
// A row that its threads can hold in registers is read from memory once; a longer one is read twice, the
// second time from a cache. Backward, P programs take rows in turn and sum dweight over theirs.
//
// What these kernels wait for is instructions. So rows that fill their threads exactly, those of most models,
// have kernels of their own, which know N and the weight's dtype and keep it in registers. Of 64 Mi elements
// on an H200, backward, they took 107 to 110 us, and 127 to 150 with bounds and weights of either dtype; from
// sm_90 on, rms_norm_ring.h is faster still.
#pragma once

#include "rms_norm_parts.h"
#include "rms_norm_ring.h"
#include "sum_partials.h"

namespace accel::cuda {
namespace {

constexpr int kMaxExactThreads = 512;
// Of a block forward, at least, and no less than two rows where they fit: 16384 rows of 128 threads took
// 67.6 us of an H200, one to a block 71.7; 8192 of 256 threads 67.3 and 67.8. (Loads and stores that ask not
// to be kept in the caches changed little there, and took 72 us beside other kernels' buffers.)
constexpr int kMinExactThreads = 256;

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
ACCEL_DEVICE void add_squares(const Pack<T>& x, Sums& squares) {
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) squares.add(i, x[i], x[i]);
}

ACCEL_DEVICE float rstd_of(float squares, float num_cols, float eps) {
  return rsqrtf(__fadd_rn(squares / num_cols, eps));
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
  Sums squares;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) add_squares(x[k], squares);
  const float sum = row_sum(squares.total(), rows.teams, 0);
  const float rstd = rstd_of(sum, static_cast<float>(rows.num_cols), op.eps);
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

// Rows of whole packs that fill threads exactly; the weight is of type W and has no offset.
template <typename T, typename W, int kLog2Threads>
__global__ void __launch_bounds__(kMaxExactThreads, 2) rms_norm_forward_exact_rows(const ForwardCall call) {
  const RmsNormForward& op = call.op;
  constexpr FixedTeams<kLog2Threads> teams;
  constexpr int kStep = teams.threads() * kPack<T>, kCols = kPacks * kStep;
  const int first_col = teams.lane() * kPack<T>;
  const int64_t row = int64_t{blockIdx.x} * teams.teams_per_block() + teams.team();
  if (row >= call.rows.num_rows) return;
  const int64_t start = row * kCols + first_col;
  Pack<T> x[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    x[k] = load<true>(static_cast<const T*>(op.x) + start + k * kStep, kPack<T>);
  }
  constexpr bool kLoadsEarly = sizeof(W) == sizeof(T);  // fp32 beside packs of 16 bits: too many registers
  const W* weight_of_lane = static_cast<const W*>(op.weight) + first_col;
  WeightPack<T, W> weight[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) weight[k].load(weight_of_lane + k * kStep);
  Sums squares;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) add_squares(x[k], squares);
  const float rstd = rstd_of(row_sum(squares.total(), teams, 0), kCols, op.eps);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    x[k].stay_packed();
    kLoadsEarly ? weight[k].stay_packed() : weight[k].load(weight_of_lane + k * kStep);
    float y[kPack<T>];
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) y[i] = weight[k][i] * (x[k][i] * rstd);
    store<true>(static_cast<T*>(op.y) + start + k * kStep, pack_of<T>(y), kPack<T>);
  }
  if (teams.lane() == 0) op.rstd[row] = rstd;
}

// One row for each block. With kAdd, what is read again is total, by the thread that wrote it.
template <typename T, bool kAdd, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_forward_long_rows(const ForwardCall call) {
  const RmsNormForward& op = call.op;
  const NormRows& rows = call.rows;
  const int64_t row = blockIdx.x, start = row * rows.num_cols;
  Sums squares;
  for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
    const int64_t count = rows.num_cols - col;
    const Pack<T> x = norm_input<T, kAdd, kWhole>(op, start + col, col, count);
    if constexpr (kAdd) store<kWhole>(static_cast<T*>(op.total) + start + col, x, count);
    add_squares(x, squares);
  }
  const float sum = row_sum(squares.total(), rows.teams, 0);
  const float rstd = rstd_of(sum, static_cast<float>(rows.num_cols), op.eps);
  for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
    const int64_t count = rows.num_cols - col;
    const T* x = static_cast<const T*>(kAdd ? op.total : op.x) + start + col;
    write_norm<T, kWhole>(op, load<kWhole>(x, count), rstd, start + col, col, count);
  }
  if (threadIdx.x == 0) op.rstd[row] = rstd;
}

// With g = dy scale: adds g x over this pack. (rstd is a factor of the whole sum.)
template <typename T, bool kWhole>
ACCEL_DEVICE void add_dots(const RmsNormBackward& op, const Pack<T>& x, const Pack<T>& dy, int64_t col,
                           int64_t count, Sums& dots) {
  float scale[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, scale);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) dots.add(i, dy[i] * scale[i], x[i]);
}

template <typename T, bool kAdd, bool kWhole>
ACCEL_DEVICE void write_dx(const RmsNormBackward& op, const Pack<T>& x, const Pack<T>& dy,
                           const Pack<T>& dtotal, int64_t at, int64_t col, int64_t count,
                           const RowGradient& row, float (&dweight)[kPack<T>]) {
  float dx[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, dx);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    dx[i] = dx_of<T, kAdd>(row, x[i], dy[i], dx[i], kAdd ? dtotal[i] : 0.0f, dweight[i]);
  }
  store<kWhole>(static_cast<T*>(op.dx) + at, pack_of<T>(dx), count);
}

template <typename T, bool kAdd, bool kWhole>
__global__ void __launch_bounds__(kMaxThreadsBackward)
    rms_norm_backward_whole_rows(const BackwardCall call) {
  const RmsNormBackward& op = call.op;
  const NormRows& rows = call.rows;
  const ManyTeams teams{rows.teams};
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
        dtotal[k] = load<true>(static_cast<const T*>(op.dtotal) + at, count);
      }
    }
    Sums dots;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (!kWhole) one_after_the_other();
      const int64_t col = rows.template col<T>(k);
      add_dots<T, kWhole>(op, x[k], dy[k], col, num_cols - col, dots);
    }
    const float dot = row_sum(dots.total(), teams, turn++);
    const RowGradient gradient(dot, static_cast<float>(rows.num_cols), rstd);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (!kWhole) one_after_the_other();
      x[k].stay_packed(), dy[k].stay_packed();
      const int64_t col = rows.template col<T>(k), at = start + col, count = num_cols - col;
      if constexpr (kAdd && !kWhole) {  // late: elements one by one take twice the registers
        dtotal[0] = load<false>(static_cast<const T*>(op.dtotal) + at, count);
      }
      write_dx<T, kAdd, kWhole>(op, x[k], dy[k], dtotal[kAdd && kWhole ? k : 0], at, col, count, gradient,
                                dweight[k]);
    }
  }
  float* partial = op.dweight_PN + blockIdx.x * rows.num_cols;
  if (teams.threads() > kWarp && teams.teams_per_block() > 1) {
    store_partial_of_teams<ManyTeams, T>(teams, rows.num_cols, dweight, partial);
  } else {
    store_partial<T>(rows, dweight, partial);
  }
}

// Rows of whole packs that fill threads exactly, for GPUs without bulk copies; the weight is of type W and
// has no offset. Rows go to the teams as above.
template <typename T, typename W, bool kAdd, int kLog2Threads>
__global__ void __launch_bounds__(kMaxExactThreads, 1) rms_norm_backward_exact_rows(const BackwardCall call) {
  const RmsNormBackward& op = call.op;
  constexpr FixedTeams<kLog2Threads> teams;
  constexpr int kStep = teams.threads() * kPack<T>, kCols = kPacks * kStep;
  const int first_col = teams.lane() * kPack<T>;
  const int num_rows = static_cast<int>(call.rows.num_rows), step = gridDim.x * teams.teams_per_block();
  float dweight[kPacks][kPack<T>] = {};
  // fp32 beside packs of 16 bits and dtotal would be too many registers: then from a cache, at each use.
  constexpr bool kKeepsWeight = !kAdd || sizeof(W) == sizeof(T);
  const W* weight_of_lane = static_cast<const W*>(op.weight) + first_col;
  WeightPack<T, W> weight[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) weight[k].load(weight_of_lane + k * kStep);
  int turn = 0;
  for (int row = blockIdx.x * teams.teams_per_block() + teams.team(); row < num_rows; row += step) {
    const int64_t start = int64_t{row} * kCols + first_col;
    const float rstd = op.rstd[row];
    Pack<T> x[kPacks], dy[kPacks], dtotal[kAdd ? kPacks : 1];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int64_t at = start + k * kStep;
      x[k] = load<true>(static_cast<const T*>(op.x) + at, kPack<T>);
      dy[k] = load<true>(static_cast<const T*>(op.dy) + at, kPack<T>);
      if constexpr (kAdd) dtotal[k] = load<true>(static_cast<const T*>(op.dtotal) + at, kPack<T>);
    }
    Sums dots;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      kKeepsWeight ? weight[k].stay_packed() : weight[k].load(weight_of_lane + k * kStep);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) dots.add(i, dy[k][i] * weight[k][i], x[k][i]);
    }
    const RowGradient gradient(row_sum(dots.total(), teams, turn++), kCols, rstd);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      x[k].stay_packed(), dy[k].stay_packed();
      kKeepsWeight ? weight[k].stay_packed() : weight[k].load(weight_of_lane + k * kStep);
      float dx[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        dx[i] = dx_of<T, kAdd>(gradient, x[k].again(i), dy[k].again(i), weight[k].again(i),
                               kAdd ? dtotal[k][i] : 0.0f, dweight[k][i]);
      }
      store<true>(static_cast<T*>(op.dx) + start + k * kStep, pack_of<T>(dx), kPack<T>);
    }
  }
  float* partial = op.dweight_PN + int64_t{blockIdx.x} * kCols;
  store_partial_of_teams<FixedTeams<kLog2Threads>, T>(teams, kCols, dweight, partial);
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
    Sums dots;
    for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
      const int64_t at = start + col, count = rows.num_cols - col;
      const Pack<T> x = load<kWhole>(static_cast<const T*>(op.x) + at, count);
      const Pack<T> dy = load<kWhole>(static_cast<const T*>(op.dy) + at, count);
      add_dots<T, kWhole>(op, x, dy, col, count, dots);
    }
    const float dot = row_sum(dots.total(), rows.teams, turn++);
    const RowGradient gradient(dot, static_cast<float>(rows.num_cols), rstd);
    for (int64_t col = rows.template first<T>(); col < rows.num_cols; col += rows.template step<T>()) {
      const int64_t at = start + col, count = rows.num_cols - col;
      const Pack<T> x = load<kWhole>(static_cast<const T*>(op.x) + at, count);
      const Pack<T> dy = load<kWhole>(static_cast<const T*>(op.dy) + at, count);
      Pack<T> dtotal;
      if constexpr (kAdd) {
        dtotal = load<kWhole>(static_cast<const T*>(op.dtotal) + at, count);
      }
      float dweight[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        dweight[i] = row >= gridDim.x && i < count ? partial[col + i] : 0.0f;
      }
      write_dx<T, kAdd, kWhole>(op, x, dy, dtotal, at, col, count, gradient, dweight);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if (i < count) partial[col + i] = dweight[i];
      }
    }
  }
}

// Whether rows of whole packs have kernels that know N.
bool is_exact(const RowBlock& block, int64_t num_cols, Dtype dtype, float weight_offset) {
  const int threads = 1 << block.log2_threads;
  return kWarp < threads && threads <= kMaxExactThreads && weight_offset == 0.0f &&
      num_cols * size_of(dtype) == int64_t{threads} * kPacks * kPackBytes;
}

template <typename T, typename W>
auto exact_forward_kernel(int log2_threads) {
  switch (log2_threads) {
    case 6: return &rms_norm_forward_exact_rows<T, W, 6>;
    case 7: return &rms_norm_forward_exact_rows<T, W, 7>;
    case 8: return &rms_norm_forward_exact_rows<T, W, 8>;
    default: return &rms_norm_forward_exact_rows<T, W, 9>;
  }
}

template <bool kAdd, bool kWhole>
void launch_forward(const RmsNormForward& op, Queue queue) {
  RowBlock block(op.num_cols, op.dtype, kPacks, kMaxThreads);
  const bool whole = fits(block, kPacks, op.num_cols, op.dtype);
  const bool exact = !kAdd && kWhole && is_exact(block, op.num_cols, op.dtype, op.weight_offset);
  if (exact) {
    const int two_rows = std::min(2 << block.log2_threads, kMaxExactThreads);
    block.threads_per_block = std::max(kMinExactThreads, two_rows);
    block.rows_per_block = block.threads_per_block >> block.log2_threads;
  }
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    if constexpr (!kAdd) {
      if (exact) {
        return op.weight_is_float ? exact_forward_kernel<T, float>(block.log2_threads)
                                  : exact_forward_kernel<T, T>(block.log2_threads);
      }
    }
    return whole ? &rms_norm_forward_whole_rows<T, kAdd, kWhole>
                 : &rms_norm_forward_long_rows<T, kAdd, kWhole>;
  });
  const ForwardCall call{op, {op.num_rows, op.num_cols, {block.log2_threads}}};
  const auto num_blocks = static_cast<unsigned>(ceil_div(op.num_rows, block.rows_per_block));
  launch(kernel, num_blocks, block.threads_per_block, queue, call);
}

// The threads of a row are those of a block of 512, or of 128 where rows share a warp.
RowBlock backward_block(int64_t num_cols, Dtype dtype) {
  RowBlock block(num_cols, dtype, kPacks, kMaxThreadsBackward);
  if ((1 << block.log2_threads) > kWarp) {
    block.threads_per_block = kMaxThreadsBackward;
    block.rows_per_block = kMaxThreadsBackward >> block.log2_threads;
  }
  return block;
}

template <typename T, typename W, bool kAdd>
auto exact_backward_kernel(int log2_threads) {
  switch (log2_threads) {
    case 6: return &rms_norm_backward_exact_rows<T, W, kAdd, 6>;
    case 7: return &rms_norm_backward_exact_rows<T, W, kAdd, 7>;
    case 8: return &rms_norm_backward_exact_rows<T, W, kAdd, 8>;
    default: return &rms_norm_backward_exact_rows<T, W, kAdd, 9>;
  }
}

template <bool kAdd, bool kWhole>
void launch_backward(const RmsNormBackward& op, int64_t num_programs, Queue queue) {
  const RowBlock block = backward_block(op.num_cols, op.dtype);
  const BackwardCall call{op, {op.num_rows, op.num_cols, {block.log2_threads}}};
  if (kWhole && goes_by_ring(op.num_cols, op.dtype, op.weight_offset)) {
    launch_ring_of<kAdd>(call, num_programs, queue);
  } else {
    const bool whole = fits(block, kPacks, op.num_cols, op.dtype);
    const bool exact = kWhole && is_exact(block, op.num_cols, op.dtype, op.weight_offset);
    auto* kernel = for_dtype(op.dtype, [&]<typename T> {
      if (exact) {
        return op.weight_is_float ? exact_backward_kernel<T, float, kAdd>(block.log2_threads)
                                  : exact_backward_kernel<T, T, kAdd>(block.log2_threads);
      }
      return whole ? &rms_norm_backward_whole_rows<T, kAdd, kWhole>
                   : &rms_norm_backward_long_rows<T, kAdd, kWhole>;
    });
    launch(kernel, static_cast<unsigned>(num_programs), block.threads_per_block, queue, call);
  }
  sum_partials({op.dweight_PN, op.dweight, num_programs, op.num_cols, op.weight_is_float}, op.dtype,
               queue);
}

}  // namespace
}  // namespace accel::cuda
