#include "rope.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>

#include "accel/cuda/op.h"

namespace accel::cuda {
namespace {

using at::Tensor;

void check_tables(
    const Tensor& cos, const Tensor& sin, int64_t rotary_dim, const Tensor& x, bool packed) {
  const bool fits = cos.dim() == 3 && cos.sizes() == sin.sizes() && cos.is_contiguous() &&
      sin.is_contiguous() && cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat &&
      cos.device() == x.device() && sin.device() == x.device() &&
      (cos.size(1) == 1 || cos.size(1) == x.size(1)) &&
      (cos.size(2) == rotary_dim || 2 * cos.size(2) == rotary_dim);
  ACCEL_CHECK_VALUE(fits, "rope: cos and sin must be contiguous fp32 [rows, 1 or B, rotary_dim (",
                    rotary_dim, ") or half of it] on ", x.device(), ", got ", cos.scalar_type(),
                    cos.sizes(), " and ", sin.scalar_type(), sin.sizes(), " on ", cos.device(), " for x ",
                    x.sizes());
  ACCEL_CHECK_VALUE(packed || cos.size(0) >= x.size(0), "rope: freqs must have a row for each of ",
                    x.size(0), " positions, got ", cos.size(0));
}

void check_tensor(const Tensor& x, const Tensor& first, int64_t rotary_dim) {
  ACCEL_CHECK_VALUE(x.dim() == 4 && x.sizes().slice(0, 2) == first.sizes().slice(0, 2) &&
                        x.scalar_type() == first.scalar_type() && x.device() == first.device(),
                    "rope: q and k must be [S, B, heads, head_dim] of one dtype on one device, got ",
                    first.scalar_type(), first.sizes(), " on ", first.device(), " and ", x.scalar_type(),
                    x.sizes(), " on ", x.device());
  ACCEL_CHECK_VALUE(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= x.size(3),
                    "rope: the rotary dimension must be even and at most the head's ", x.size(3),
                    ", got ", rotary_dim);
  // A block has that many threads, with 4 pairs of fp32 each.
  ACCEL_CHECK_VALUE(rotary_dim <= 2048, "rope on CUDA rotates up to 2048 of a head, got ", rotary_dim);
}

// On the device of x. Its values are the kernel's to judge: here the host would have to wait for them.
Tensor lengths_of(const Tensor& cu_seqlens, const Tensor& x, int64_t cp_size, int64_t cp_rank) {
  ACCEL_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1 &&
                        (cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong),
                    "rope: cu_seqlens must be int32 or int64 [sequences + 1], got ",
                    cu_seqlens.scalar_type(), cu_seqlens.sizes());
  ACCEL_CHECK_VALUE(cp_size >= 1 && 0 <= cp_rank && cp_rank < cp_size,
                    "rope: cp_rank must be in [0, cp_size), got ", cp_rank, " of ", cp_size);
  return cu_seqlens.to(x.device(), /*non_blocking=*/true).contiguous();
}

std::vector<Tensor> forward(
    at::TensorList xs, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& cu_seqlens_in,
    int64_t cp_size, int64_t cp_rank, int64_t rotary_dim, bool interleaved_in, bool interleaved_out,
    bool inverse) {
  ACCEL_CHECK_VALUE(!xs.empty() && xs[0].dim() == 4, "rope: needs at least one [S, B, heads, head_dim]");
  const Tensor& first = xs[0];
  for (const Tensor& x : xs) check_tensor(x, first, rotary_dim);
  check_tables(cos, sin, rotary_dim, first, cu_seqlens_in.has_value());
  const OnDeviceOf device(first);
  Tensor cu_seqlens;
  if (cu_seqlens_in) cu_seqlens = lengths_of(*cu_seqlens_in, first, cp_size, cp_rank);
  const int64_t num_tokens = first.size(0) * first.size(1);
  ACCEL_CHECK_VALUE(num_tokens < int64_t{1} << 31, "rope on CUDA takes fewer than 2^31 tokens, got ",
                    num_tokens);
  Rope call{
      .tensors = {},
      .cos = cos.const_data_ptr<float>(),
      .sin = sin.const_data_ptr<float>(),
      .row_stride = cos.size(1) * cos.size(2),
      .batch_stride = cos.size(1) == 1 ? 0 : cos.size(2),
      .num_rows = cos.size(0),
      .num_tokens = num_tokens,
      .num_batch = first.size(1),
      .half = static_cast<int>(rotary_dim / 2),
      .second = static_cast<int>(cos.size(2) == rotary_dim ? rotary_dim / 2 : 0),
      .cu_seqlens = cu_seqlens.defined() ? cu_seqlens.const_data_ptr() : nullptr,
      .cu_seqlens_is_long = cu_seqlens.defined() && cu_seqlens.scalar_type() == at::kLong,
      .num_sequences = cu_seqlens.defined() ? cu_seqlens.numel() - 1 : 0,
      .cp_size = cp_size,
      .cp_rank = cp_rank,
      .interleaved_in = interleaved_in,
      .interleaved_out = interleaved_out,
      .inverse = inverse,
      .dtype = dtype_of(first.scalar_type(), "rope")};
  const Queue queue = device.queue();
  std::vector<Tensor> inputs, outputs;
  int count = 0;
  for (const Tensor& x_in : xs) {
    const Tensor x = x_in.stride(3) == 1 || x_in.size(3) <= 1 ? x_in : x_in.contiguous();
    Tensor y = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
    inputs.push_back(x);  // alive until it is launched
    outputs.push_back(y);
    if (y.numel() > 0) {
      call.tensors[count++] = {x.const_data_ptr(), y.mutable_data_ptr(), x.stride(0), x.stride(1),
                               x.stride(2), static_cast<int>(x.size(2)), static_cast<int>(x.size(3))};
    }
    if (count == kRopeTensors || (count && inputs.size() == xs.size())) {
      rope(call, queue);
      device.check_launch();
      std::fill_n(call.tensors, kRopeTensors, RopeTensor{});
      count = 0;
    }
  }
  return outputs;
}

}  // namespace

void register_rope(torch::Library& library) { library.impl("rope", &forward); }

}  // namespace accel::cuda
