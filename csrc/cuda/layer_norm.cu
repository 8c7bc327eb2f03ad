#include "layer_norm.h"

#include "norm_rows.h"
#include "row_ring.h"
#include "sum_partials.h"

// The variance is the mean square about the mean, which keeps the digits that E[x^2] - E[x]^2 loses.
//
// A row that its threads can hold in registers is read from memory once; a longer one is read three times
// forward and twice backward, but once from memory: then from a cache. Backward, P programs take rows in turn
// and sum dweight and dbias over theirs. Rows that fit a ring go by row_ring.h: of 64 Mi elements on an H200
// they took 127 us (of 4096) and 114 (of 8192), and straight from memory 215 and 235.

namespace accel::cuda {
namespace {

// Of a row, in registers, in each thread. Backward there are x and dy at once, and two sums in fp32: 3 packs
// take some 110 registers, of which a block of 512 threads may have 128 each. So rows of 12288 are whole.
constexpr int kPacks = 4;
constexpr int kPacksBackward = 3;

struct ForwardCall {
  LayerNormForward op;
  NormRows rows;
};

// Whether a pack's element i is one of `count`; whole packs are there or not.
template <bool kWhole>
ACCEL_DEVICE bool is_within(int i, int64_t count) {
  return (kWhole ? 0 : i) < count;
}

template <typename T>
ACCEL_DEVICE float sum_of_elements(const Pack<T>& x, float sum) {
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum += x[i];
  return sum;
}

template <bool kWhole, typename T>
ACCEL_DEVICE float sum_of_squares(const Pack<T>& x, float mean, int64_t count, float sum) {
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    const float centred = is_within<kWhole>(i, count) ? x[i] - mean : 0.0f;
    sum += centred * centred;
  }
  return sum;
}

template <bool kWhole, typename T>
ACCEL_DEVICE void write_norm(const LayerNormForward& op, const Pack<T>& x, float mean, float rstd, int64_t at,
                             int64_t col, int64_t count) {
  float y[kPack<T>], bias[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, y);
  load_columns<kWhole, T>(op.bias, op.bias_is_float, col, count, bias);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) y[i] = fmaf((x[i] - mean) * rstd, y[i], bias[i]);
  store<kWhole>(static_cast<T*>(op.y) + at, pack_of<T>(y), count);
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads) layer_norm_forward_whole_rows(const ForwardCall call) {
  const LayerNormForward& op = call.op;
  const NormRows& rows = call.rows;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows.teams.teams_per_block() + rows.teams.team();
  // Few enough for an int; of rows beyond the last, none.
  const int num_cols = row < rows.num_rows ? static_cast<int>(rows.num_cols) : 0;
  const auto col_of = [&](int k) { return static_cast<int>(rows.template col<T>(k)); };
  const int64_t start = row * rows.num_cols;
  const auto length = static_cast<float>(rows.num_cols);
  Pack<T> x[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if constexpr (!kWhole) one_after_the_other();
    x[k] = load<kWhole>(static_cast<const T*>(op.x) + start + col_of(k), num_cols - col_of(k));
  }
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) sum = sum_of_elements(x[k], sum);
  const float mean = row_sum(sum, rows.teams, 0) / length;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    x[k].stay_packed();
    squares = sum_of_squares<kWhole>(x[k], mean, num_cols - col_of(k), squares);
  }
  const float rstd = rsqrtf(row_sum(squares, rows.teams, 1) / length + op.eps);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if constexpr (!kWhole) one_after_the_other();
    x[k].stay_packed();
    const int col = col_of(k), count = num_cols - col;
    if (count > 0) write_norm<kWhole>(op, x[k], mean, rstd, start + col, col, count);
  }
  if (rows.teams.lane() == 0 && num_cols) {
    op.mean[row] = mean;
    op.rstd[row] = rstd;
  }
}

// One row for each block.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads) layer_norm_forward_long_rows(const ForwardCall call) {
  const LayerNormForward& op = call.op;
  const NormRows& rows = call.rows;
  const int64_t row = blockIdx.x, start = row * rows.num_cols;
  const T* x_N = static_cast<const T*>(op.x) + start;
  const auto length = static_cast<float>(rows.num_cols);
  const int64_t first = rows.template first<T>(), step = rows.template step<T>();
  float sum = 0.0f, squares = 0.0f;
  for (int64_t col = first; col < rows.num_cols; col += step) {
    sum = sum_of_elements(load<kWhole>(x_N + col, rows.num_cols - col), sum);
  }
  const float mean = row_sum(sum, rows.teams, 0) / length;
  for (int64_t col = first; col < rows.num_cols; col += step) {
    const int64_t count = rows.num_cols - col;
    squares = sum_of_squares<kWhole>(load<kWhole>(x_N + col, count), mean, count, squares);
  }
  const float rstd = rsqrtf(row_sum(squares, rows.teams, 1) / length + op.eps);
  for (int64_t col = first; col < rows.num_cols; col += step) {
    const int64_t count = rows.num_cols - col;
    write_norm<kWhole>(op, load<kWhole>(x_N + col, count), mean, rstd, start + col, col, count);
  }
  if (threadIdx.x == 0) {
    op.mean[row] = mean;
    op.rstd[row] = rstd;
  }
}

struct BackwardCall {
  LayerNormBackward op;
  NormRows rows;
};

// What the gradient of a row needs; with h = (x - mean) rstd and g = dy scale.
struct RowGradient {
  float mean, rstd, mean_g, mean_gh;
};

// Adds the sums of g and of g h over this pack. Beyond the row, dy is 0.
template <bool kWhole, typename T>
ACCEL_DEVICE void add_dots(const LayerNormBackward& op, const Pack<T>& x, const Pack<T>& dy, int64_t col,
                           int64_t count, RowGradient& row) {
  float scale[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, scale);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    const float g = dy[i] * scale[i];
    row.mean_g += g;
    row.mean_gh += g * ((x[i] - row.mean) * row.rstd);
  }
}

ACCEL_DEVICE void finish_means(RowGradient& row, const NormRows& rows, int& turn) {
  row.mean_g = row_sum(row.mean_g, rows.teams, turn++) / static_cast<float>(rows.num_cols);
  row.mean_gh = row_sum(row.mean_gh, rows.teams, turn++) / static_cast<float>(rows.num_cols);
}

// Writes dx = rstd (g - mean_g - h mean_gh), and adds dy h to dweight and dy to dbias.
template <bool kWhole, typename T>
ACCEL_DEVICE void write_dx(const LayerNormBackward& op, const Pack<T>& x, const Pack<T>& dy, int64_t at,
                           int64_t col, int64_t count, const RowGradient& row, float (&dweight)[kPack<T>],
                           float (&dbias)[kPack<T>]) {
  float dx[kPack<T>];
  load_scale<T, kWhole>(op.weight, op.weight_is_float, op.weight_offset, col, count, dx);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    const float dy_i = dy[i], h = (x[i] - row.mean) * row.rstd;
    dx[i] = (fmaf(dy_i, dx[i], -row.mean_g) - h * row.mean_gh) * row.rstd;
    dweight[i] += dy_i * h;
    dbias[i] += dy_i;
  }
  store<kWhole>(static_cast<T*>(op.dx) + at, pack_of<T>(dx), count);
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kMaxThreadsBackward)
    layer_norm_backward_whole_rows(const BackwardCall call) {
  const LayerNormBackward& op = call.op;
  const NormRows& rows = call.rows;
  const RowTeams teams = rows.teams;
  float dweight[kPacksBackward][kPack<T>] = {}, dbias[kPacksBackward][kPack<T>] = {};
  int turn = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * teams.teams_per_block(); first < rows.num_rows;
       first += static_cast<int64_t>(gridDim.x) * teams.teams_per_block()) {
    const int64_t row = first + teams.team();
    const int64_t num_cols = row < rows.num_rows ? rows.num_cols : 0;
    const int64_t start = row * rows.num_cols;
    RowGradient gradient{num_cols ? op.mean[row] : 0.0f, num_cols ? op.rstd[row] : 0.0f, 0.0f, 0.0f};
    Pack<T> x[kPacksBackward], dy[kPacksBackward];
#pragma unroll
    for (int k = 0; k < kPacksBackward; ++k) {
      const int64_t col = rows.template col<T>(k), at = start + col, count = num_cols - col;
      x[k] = load<kWhole>(static_cast<const T*>(op.x) + at, count);
      dy[k] = load<kWhole>(static_cast<const T*>(op.dy) + at, count);
    }
#pragma unroll
    for (int k = 0; k < kPacksBackward; ++k) {
      if constexpr (!kWhole) one_after_the_other();
      const int64_t col = rows.template col<T>(k);
      add_dots<kWhole>(op, x[k], dy[k], col, num_cols - col, gradient);
    }
    finish_means(gradient, rows, turn);
#pragma unroll
    for (int k = 0; k < kPacksBackward; ++k) {
      if constexpr (!kWhole) one_after_the_other();
      x[k].stay_packed(), dy[k].stay_packed();
      const int64_t col = rows.template col<T>(k);
      write_dx<kWhole>(op, x[k], dy[k], start + col, col, num_cols - col, gradient, dweight[k], dbias[k]);
    }
  }
  store_partial<T>(rows, dweight, op.dweight_PN + blockIdx.x * rows.num_cols);
  store_partial<T>(rows, dbias, op.dbias_PN + blockIdx.x * rows.num_cols);
}

// One row at a time. Sums over rows are in memory, where each column is one thread's own.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kMaxThreadsBackward, 1)
    layer_norm_backward_long_rows(const BackwardCall call) {
  const LayerNormBackward& op = call.op;
  const NormRows& rows = call.rows;
  float* partials[2] = {op.dweight_PN + blockIdx.x * rows.num_cols, op.dbias_PN + blockIdx.x * rows.num_cols};
  const int64_t first_col = rows.template first<T>(), step = rows.template step<T>();
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows.num_rows; row += gridDim.x) {
    const T* x_N = static_cast<const T*>(op.x) + row * rows.num_cols;
    const T* dy_N = static_cast<const T*>(op.dy) + row * rows.num_cols;
    RowGradient gradient{op.mean[row], op.rstd[row], 0.0f, 0.0f};
    for (int64_t col = first_col; col < rows.num_cols; col += step) {
      const int64_t count = rows.num_cols - col;
      add_dots<kWhole>(op, load<kWhole>(x_N + col, count), load<kWhole>(dy_N + col, count), col, count,
                       gradient);
    }
    finish_means(gradient, rows, turn);
    for (int64_t col = first_col; col < rows.num_cols; col += step) {
      const int64_t count = rows.num_cols - col;
      const Pack<T> x = load<kWhole>(x_N + col, count), dy = load<kWhole>(dy_N + col, count);
      float sums[2][kPack<T>] = {};
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if (row < gridDim.x || i >= count) continue;  // a program's first row
        sums[0][i] = partials[0][col + i];
        sums[1][i] = partials[1][col + i];
      }
      write_dx<kWhole>(op, x, dy, row * rows.num_cols + col, col, count, gradient, sums[0], sums[1]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if (i >= count) continue;
        partials[0][col + i] = sums[0][i];
        partials[1][col + i] = sums[1][i];
      }
    }
  }
}

template <typename T, int kLog2Threads>
using LayerNormRing = RowRing<T, 2, 2, kLog2Threads>;

// The weight is of type W and has no offset.
template <typename T, typename W, int kLog2Threads>
__global__ void __launch_bounds__(kRingThreads, 1) layer_norm_backward_ring(const BackwardCall call) {
#if ACCEL_BULK_COPIES
  const LayerNormBackward& op = call.op;
  using Ring = LayerNormRing<T, kLog2Threads>;
  Ring ring(op.num_rows, op.x, op.dy);
  const W* weight_of_lane = static_cast<const W*>(op.weight) + ring.first_col();
  float dweight[kRingPacks][kPack<T>] = {}, dbias[kRingPacks][kPack<T>] = {};
  WeightPack<T, W> weight[kRingPacks];
#pragma unroll
  for (int k = 0; k < kRingPacks; ++k) weight[k].load(weight_of_lane + k * Ring::kStep);
  for (; ring.has_row(); ring.next()) {
    const float mean = op.mean[ring.row()], rstd = op.rstd[ring.row()];
    ring.wait();
    Pack<T> x[kRingPacks], dy[kRingPacks];
#pragma unroll
    for (int k = 0; k < kRingPacks; ++k) x[k] = ring.pack(0, k), dy[k] = ring.pack(1, k);
    float g_sums[2] = {}, gx_sums[2] = {};  // of g and of g (x - mean), of even and of odd elements
#pragma unroll
    for (int k = 0; k < kRingPacks; ++k) {
      weight[k].stay_packed();
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const float g = dy[k][i] * weight[k][i];
        g_sums[i % 2] += g;
        gx_sums[i % 2] = fmaf(g, x[k][i] - mean, gx_sums[i % 2]);
      }
    }
    float sums[] = {g_sums[0] + g_sums[1], gx_sums[0] + gx_sums[1]};
    ring.sum(sums);
    const float offset = -sums[0] / Ring::kCols * rstd, slope = -sums[1] / Ring::kCols * rstd * rstd * rstd;
#pragma unroll
    for (int k = 0; k < kRingPacks; ++k) {
      x[k].stay_packed(), dy[k].stay_packed(), weight[k].stay_packed();
      float dx[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const float dy_i = dy[k].again(i), centred = x[k].again(i) - mean, d = dy_i * rstd;
        dx[i] = fmaf(d, weight[k].again(i), fmaf(centred, slope, offset));
        dweight[k][i] = fmaf(d, centred, dweight[k][i]);
        dbias[k][i] += dy_i;
      }
      store<true>(static_cast<T*>(op.dx) + ring.start() + k * Ring::kStep, pack_of<T>(dx), kPack<T>);
    }
  }
  ring.store(dweight, op.dweight_PN);
  ring.store(dbias, op.dbias_PN);
  ring.end();
#endif
}

template <bool kWhole>
void launch_forward(const LayerNormForward& op, Queue queue) {
  const RowBlock block(op.num_cols, op.dtype, kPacks, kMaxThreads);
  const bool whole = fits(block, kPacks, op.num_cols, op.dtype);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    return whole ? &layer_norm_forward_whole_rows<T, kWhole> : &layer_norm_forward_long_rows<T, kWhole>;
  });
  const ForwardCall call{op, {op.num_rows, op.num_cols, {block.log2_threads}}};
  const auto num_blocks = static_cast<unsigned>(ceil_div(op.num_rows, block.rows_per_block));
  launch(kernel, num_blocks, block.threads_per_block, queue, call);
}

void launch_backward_in_ring(const LayerNormBackward& op, int64_t num_programs, Queue queue) {
  with_log2_threads(op.num_cols, op.dtype, [&]<int kLog2Threads> {
    for_dtype(op.dtype, [&]<typename T> {
      auto* kernel = op.weight_is_float ? &layer_norm_backward_ring<T, float, kLog2Threads>
                                        : &layer_norm_backward_ring<T, T, kLog2Threads>;
      const BackwardCall call{op, {op.num_rows, op.num_cols, {kLog2Threads}}};
      launch_ring<LayerNormRing<T, kLog2Threads>>(kernel, num_programs, queue, call);
    });
  });
}

template <bool kWhole>
void launch_backward(const LayerNormBackward& op, int64_t num_programs, Queue queue) {
  if (kWhole && goes_by_ring(op.num_cols, op.dtype, op.weight_offset)) {
    return launch_backward_in_ring(op, num_programs, queue);
  }
  const RowBlock block(op.num_cols, op.dtype, kPacksBackward, kMaxThreadsBackward);
  const bool whole = fits(block, kPacksBackward, op.num_cols, op.dtype);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    return whole ? &layer_norm_backward_whole_rows<T, kWhole> : &layer_norm_backward_long_rows<T, kWhole>;
  });
  const BackwardCall call{op, {op.num_rows, op.num_cols, {block.log2_threads}}};
  launch(kernel, static_cast<unsigned>(num_programs), block.threads_per_block, queue, call);
}

}  // namespace

int64_t layer_norm_programs(int64_t num_rows, int64_t num_cols, Dtype dtype, float weight_offset,
                            int num_processors) {
  if (goes_by_ring(num_cols, dtype, weight_offset)) {
    return RingRows(num_cols, dtype).num_programs(num_rows, num_processors);
  }
  const RowBlock block(num_cols, dtype, kPacksBackward, kMaxThreadsBackward);
  return norm_programs(block, num_rows, num_processors);
}

bool layer_norm_needs_whole_packs(int64_t num_cols, Dtype dtype, float weight_offset) {
  return goes_by_ring(num_cols, dtype, weight_offset);
}

void layer_norm_forward(const LayerNormForward& op, Queue queue) {
  whole_packs(op.num_cols, op.dtype, op.x, op.weight, op.bias, op.y) ? launch_forward<true>(op, queue)
                                                                     : launch_forward<false>(op, queue);
}

void layer_norm_backward(const LayerNormBackward& op, int64_t num_programs, Queue queue) {
  whole_packs(op.num_cols, op.dtype, op.dy, op.x, op.weight, op.dx)
      ? launch_backward<true>(op, num_programs, queue)
      : launch_backward<false>(op, num_programs, queue);
  sum_partials({.partials_PN = op.dweight_PN,
                .sum = op.dweight,
                .num_partials = num_programs,
                .num_cols = op.num_cols,
                .is_float = op.weight_is_float,
                .more_partials_PN = op.dbias_PN,
                .more_sum = op.dbias},
               op.dtype, queue);
}

}  // namespace accel::cuda
