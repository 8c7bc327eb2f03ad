// LayerNorm on CPU. The maths and what is saved: accel/ops/layer_norm.py.
//
// Three passes over a row forward (mean, then the variance about it, which keeps the digits that
// E[x^2] - E[x]^2 loses, then y) and two backward; the row stays in L1 or L2, so memory is read
// once.

#ifndef ACCEL_ISA  // the first time through this file
#include <cmath>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "accel/dtype.h"
#include "norm.h"

namespace accel {

struct LayerNormForward {
  const void* x;
  const float* scale;
  const float* bias;
  void* y;
  float* mean;
  float* rstd;
  int64_t num_cols;
  float eps;
};

struct LayerNormBackward {
  const void* dy;
  const void* x;
  const float* scale;
  const float* mean;
  const float* rstd;
  void* dx;
  int64_t num_cols;
};

}  // namespace accel

#define ACCEL_KERNEL_FILE "cpu/layer_norm.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// y = (x - mean) * rstd * scale + bias with rstd = 1 / sqrt(var + eps), rows [begin, end).
template <typename T, bool kStream>
void layer_norm_forward(const LayerNormForward& args, int64_t begin, int64_t end) {
  const int64_t num_cols = args.num_cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * num_cols;
    T* y = static_cast<T*>(args.y) + row * num_cols;

    Vec sums[4] = {};
    for_each_vec<4>(num_cols, [&](int64_t col, int k, auto span) {
      sums[k] += load(x + col, span);
    });
    const float mean = sum(tree_sum(sums)) / num_cols;

    Vec squares[4] = {};
    for_each_vec<4>(num_cols, [&](int64_t col, int k, auto span) {
      const Vec d = keep(load(x + col, span) - mean, span);
      squares[k] += d * d;
    });
    const float variance = sum(tree_sum(squares)) / num_cols;
    const float rstd = 1.0f / std::sqrt(variance + args.eps);
    args.mean[row] = mean;
    args.rstd[row] = rstd;

    store_row<kStream>(y, num_cols, [&](int64_t col, int, auto span) {
      prefetch(x + num_cols, col);  // the next row
      const Vec h = (load(x + col, span) - mean) * rstd;
      return h * load(args.scale + col, span) + load(args.bias + col, span);
    });
  }
  if constexpr (kStream) stream_fence();
}

// With g = dy * scale and h = (x - mean) * rstd:
//   dx = rstd * (g - mean(g) - h * mean(g * h)),
//   dscale = sum of dy * h,  dbias = sum of dy over rows.
// One row; its dscale and dbias are added to what is there.
template <typename T, bool kStream>
ACCEL_INLINE void layer_norm_backward_row(
    const LayerNormBackward& args, int64_t row, float* dscale, float* dbias) {
  const int64_t num_cols = args.num_cols;
  const T* dy = static_cast<const T*>(args.dy) + row * num_cols;
  const T* x = static_cast<const T*>(args.x) + row * num_cols;
  T* dx = static_cast<T*>(args.dx) + row * num_cols;
  const float mean = args.mean[row];
  const float rstd = args.rstd[row];

  Vec sums[4] = {};
  Vec dots[4] = {};
  for_each_vec<4>(num_cols, [&](int64_t col, int k, auto span) {
    const Vec g = load(dy + col, span) * load(args.scale + col, span);  // 0 beyond a tail
    sums[k] += g;
    dots[k] += g * (load(x + col, span) - mean);
  });
  const float mean_g = sum(tree_sum(sums)) / num_cols;
  const float mean_gh = sum(tree_sum(dots)) * rstd / num_cols;

  store_row<kStream>(dx, num_cols, [&](int64_t col, int, auto span) {
    prefetch(dy + num_cols, col);  // the next row
    prefetch(x + num_cols, col);
    const Vec dy_v = load(dy + col, span);
    const Vec h = (load(x + col, span) - mean) * rstd;
    const Vec g = dy_v * load(args.scale + col, span);
    store(dscale + col, load(dscale + col, span) + dy_v * h, span);
    store(dbias + col, load(dbias + col, span) + dy_v, span);
    return rstd * (g - mean_g - h * mean_gh);
  });
}

// Rows [begin, end), their dscale and dbias summed into one partial each. `block_2N` is scratch.
template <typename T, bool kStream>
void layer_norm_backward(
    const LayerNormBackward& args, int64_t begin, int64_t end, float* block_2N, float* dscale,
    float* dbias) {
  const int64_t num_cols = args.num_cols;
  std::memset(dscale, 0, num_cols * sizeof(float));
  std::memset(dbias, 0, num_cols * sizeof(float));
  for (int64_t row = begin; row < end;) {
    const int64_t block_end = row + kRowsPerBlock < end ? row + kRowsPerBlock : end;
    std::memset(block_2N, 0, 2 * num_cols * sizeof(float));
    for (; row < block_end; ++row) {
      layer_norm_backward_row<T, kStream>(args, row, block_2N, block_2N + num_cols);
    }
    add_to(dscale, block_2N, num_cols);
    add_to(dbias, block_2N + num_cols, num_cols);
  }
  if constexpr (kStream) stream_fence();
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd_cpu(
    const Tensor& x_in, const Tensor& weight, const Tensor& bias_in, double eps,
    bool zero_centered) {
  check_norm_inputs("layer_norm", x_in, weight);
  check_norm_inputs("layer_norm", x_in, bias_in);
  const Tensor x = x_in.contiguous();
  const Tensor scale = to_fp32(weight, zero_centered ? 1.0f : 0.0f);
  const Tensor bias = to_fp32(bias_in, 0.0f);
  Tensor y = at::empty(x.sizes(), x.options());
  const auto per_row = x.sizes().slice(0, x.dim() - 1);
  Tensor mean = at::empty(per_row, x.options().dtype(at::kFloat));
  Tensor rstd = at::empty(per_row, x.options().dtype(at::kFloat));
  if (x.numel() == 0) return {y, mean.zero_(), rstd.fill_(1.0 / std::sqrt(eps))};

  const int64_t num_cols = x.size(-1);
  const LayerNormForward args{
      .x = x.const_data_ptr(),
      .scale = scale.const_data_ptr<float>(),
      .bias = bias.const_data_ptr<float>(),
      .y = y.mutable_data_ptr(),
      .mean = mean.mutable_data_ptr<float>(),
      .rstd = rstd.mutable_data_ptr<float>(),
      .num_cols = num_cols,
      .eps = static_cast<float>(eps)};
  const bool stream = should_stream(y, num_cols);
  auto* kernel = float_kernel(x.scalar_type(), "layer_norm", [&]<typename T> {
    return stream ? ACCEL_FOR_THIS_CPU(layer_norm_forward<T, true>)
                  : ACCEL_FOR_THIS_CPU(layer_norm_forward<T, false>);
  });
  at::parallel_for(0, rstd.numel(), rows_per_task(num_cols), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd_cpu(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight, const Tensor& mean,
    const Tensor& rstd, bool zero_centered) {
  check_norm_inputs("layer_norm backward", x_in, weight);
  check_norm_grad("layer_norm backward", dy_in, x_in, {mean, rstd});
  const Tensor x = x_in.contiguous();
  const Tensor dy = dy_in.contiguous();
  const Tensor scale = to_fp32(weight, zero_centered ? 1.0f : 0.0f);
  Tensor dx = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return {dx, at::zeros_like(weight), at::zeros_like(weight)};

  const int64_t num_cols = x.size(-1);
  const LayerNormBackward args{
      .dy = dy.const_data_ptr(),
      .x = x.const_data_ptr(),
      .scale = scale.const_data_ptr<float>(),
      .mean = mean.const_data_ptr<float>(),
      .rstd = rstd.const_data_ptr<float>(),
      .dx = dx.mutable_data_ptr(),
      .num_cols = num_cols};
  const bool stream = should_stream(dx, num_cols);
  auto* kernel = float_kernel(x.scalar_type(), "layer_norm backward", [&]<typename T> {
    return stream ? ACCEL_FOR_THIS_CPU(layer_norm_backward<T, true>)
                  : ACCEL_FOR_THIS_CPU(layer_norm_backward<T, false>);
  });
  const RowRuns runs(rstd.numel());
  const auto fp32 = x.options().dtype(at::kFloat);
  Tensor dscale_PN = at::empty({runs.count, num_cols}, fp32);
  Tensor dbias_PN = at::empty({runs.count, num_cols}, fp32);
  float* dscale = dscale_PN.mutable_data_ptr<float>();
  float* dbias = dbias_PN.mutable_data_ptr<float>();
  runs.parallel(num_cols, [&](int64_t run, int64_t begin, int64_t end) {
    std::vector<float> block_2N(2 * num_cols);
    kernel(args, begin, end, block_2N.data(), dscale + run * num_cols, dbias + run * num_cols);
  });
  return {dx, sum_partials(dscale_PN, weight.scalar_type()),
          sum_partials(dbias_PN, weight.scalar_type())};
}

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("layer_norm_fwd", &layer_norm_fwd_cpu);
  m.impl("layer_norm_bwd", &layer_norm_bwd_cpu);
}

}  // namespace
}  // namespace accel
#endif
