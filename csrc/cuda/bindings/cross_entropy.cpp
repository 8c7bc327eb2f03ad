#include "cross_entropy.h"

#include <limits>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "accel/cuda/op.h"

namespace accel::cuda {
namespace {

using at::Tensor;

int check_logits(const char* op, const Tensor& logits, const Tensor& target) {
  ACCEL_CHECK_VALUE(logits.dim() >= 1 && logits.size(-1) >= 1, op,
                    ": logits must have shape [..., V] with V >= 1, got ", logits.sizes());
  ACCEL_CHECK_VALUE(logits.size(-1) <= std::numeric_limits<int>::max() / 2, op,
                    " on CUDA takes rows of up to 2^30 tokens, got ", logits.size(-1));
  ACCEL_CHECK_VALUE(target.scalar_type() == at::kLong, op, ": target must be int64, got ",
                    target.scalar_type());
  ACCEL_CHECK_VALUE(target.sizes() == logits.sizes().slice(0, logits.dim() - 1), op,
                    ": target must have the shape of logits ", logits.sizes(),
                    " without its last dimension, got ", target.sizes());
  ACCEL_CHECK_VALUE(target.device() == logits.device(), op, ": target must be on ", logits.device(),
                    " like the logits, got ", target.device());
  return static_cast<int>(logits.size(-1));
}

Tensor stats(
    const Tensor& logits_in, const Tensor& target_in, int64_t vocab_start, int64_t vocab_size,
    std::optional<int64_t> ignore_index, bool with_sum) {
  const OnDeviceOf device(logits_in);
  const int num_cols = check_logits("cross_entropy", logits_in, target_in);
  const Tensor logits = logits_in.contiguous(), target = target_in.contiguous();
  auto sizes = target.sizes().vec();
  sizes.insert(sizes.begin(), with_sum ? 4 : 3);
  const auto fp32 = logits.options().dtype(at::kFloat);
  Tensor stats = at::empty(sizes, fp32), parts;
  const int64_t num_rows = target.numel();
  if (num_rows == 0) return stats;
  const Dtype dtype = dtype_of(logits.scalar_type(), "cross_entropy");
  const Queue queue = device.queue();
  const int num_parts = cross_entropy_parts(num_rows, num_cols, dtype, queue.num_processors);
  if (num_parts > 1) parts = at::empty({num_rows, with_sum ? 3 : 2, num_parts}, fp32);
  cross_entropy_forward(
      {.x = logits.const_data_ptr(),
       .target = target.const_data_ptr<int64_t>(),
       .stats = stats.mutable_data_ptr<float>(),
       .parts = parts.defined() ? parts.mutable_data_ptr<float>() : nullptr,
       .num_rows = num_rows,
       .num_cols = num_cols,
       .vocab_start = vocab_start,
       .vocab_size = vocab_size,
       .ignore_index = ignore_index.value_or(0),
       .has_ignore_index = ignore_index.has_value(),
       .with_sum = with_sum,
       .dtype = dtype},
      num_parts, queue);
  device.check_launch();
  return stats;
}

// `dlogits` may be `logits`; both are contiguous.
void backward_into(
    const Tensor& dlogits, const Tensor& logits, const Tensor& target_in, const Tensor& stats,
    const Tensor& dloss_in, int64_t vocab_start, int64_t vocab_size, double smoothing,
    const OnDeviceOf& device) {
  const char* op = "cross_entropy backward";
  const int num_cols = check_logits(op, logits, target_in);
  ACCEL_CHECK_VALUE(stats.dim() == target_in.dim() + 1 && stats.size(0) >= 2 &&
                        stats.sizes().slice(1) == target_in.sizes() && stats.is_contiguous() &&
                        stats.scalar_type() == at::kFloat && stats.device() == logits.device(),
                    op, ": needs the contiguous fp32 stats of the forward, got ",
                    stats.scalar_type(), stats.sizes(), " on ", stats.device());
  ACCEL_CHECK_VALUE(dloss_in.sizes() == target_in.sizes() && dloss_in.scalar_type() == at::kFloat &&
                        dloss_in.device() == logits.device(),
                    op, ": dloss must be float32 ", target_in.sizes(), " like the loss, got ",
                    dloss_in.scalar_type(), dloss_in.sizes(), " on ", dloss_in.device());
  ACCEL_CHECK_VALUE(vocab_size >= 1, op, ": vocab_size must be >= 1, got ", vocab_size);
  if (target_in.numel() == 0) return;
  const Tensor target = target_in.contiguous(), dloss = dloss_in.contiguous();
  cross_entropy_backward(
      {.x = logits.const_data_ptr(),
       .target = target.const_data_ptr<int64_t>(),
       .stats = stats.const_data_ptr<float>(),
       .dloss = dloss.const_data_ptr<float>(),
       .dx = dlogits.mutable_data_ptr(),
       .num_rows = target.numel(),
       .num_cols = num_cols,
       .vocab_start = vocab_start,
       .on_target = static_cast<float>(1.0 - smoothing),
       .on_each_token = static_cast<float>(smoothing / static_cast<double>(vocab_size)),
       .dtype = dtype_of(logits.scalar_type(), op)},
      device.queue());
  device.check_launch();
}

Tensor backward(
    const Tensor& logits_in, const Tensor& target, const Tensor& stats, const Tensor& dloss,
    int64_t vocab_start, int64_t vocab_size, double smoothing) {
  const OnDeviceOf device(logits_in);
  const Tensor logits = logits_in.contiguous();
  Tensor dlogits = at::empty_like(logits, at::MemoryFormat::Contiguous);
  backward_into(dlogits, logits, target, stats, dloss, vocab_start, vocab_size, smoothing, device);
  return dlogits;
}

void backward_inplace(
    const Tensor& logits, const Tensor& target, const Tensor& stats, const Tensor& dloss,
    int64_t vocab_start, int64_t vocab_size, double smoothing) {
  ACCEL_CHECK_VALUE(logits.is_contiguous(),
                    "cross_entropy backward in place: logits must be contiguous, got strides ",
                    logits.strides());
  const OnDeviceOf device(logits);
  backward_into(logits, logits, target, stats, dloss, vocab_start, vocab_size, smoothing, device);
}

}  // namespace

void register_cross_entropy(torch::Library& library) {
  library.impl("cross_entropy_stats", &stats);
  library.impl("cross_entropy_bwd", &backward);
  library.impl("cross_entropy_bwd_", &backward_inplace);
}

}  // namespace accel::cuda
