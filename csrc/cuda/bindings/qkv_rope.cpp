#include "qkv_rope.h"

#include <ATen/ops/empty.h>

#include "accel/cuda/op.h"

namespace accel::cuda {
namespace {

using at::Tensor;

void check_contiguous(const char* name, const Tensor& t, const Tensor& like, at::IntArrayRef sizes) {
  ACCEL_CHECK_VALUE(t.sizes() == sizes && t.is_contiguous() && t.scalar_type() == like.scalar_type() &&
                        t.device() == like.device() &&
                        reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kPackBytes == 0,
                    "qkv_rope: ", name, " must be contiguous, from a multiple of 16 bytes on, ",
                    like.scalar_type(), sizes, " on ", like.device(), ", got ", t.scalar_type(), t.sizes(),
                    " on ", t.device());
}

// [S, B, G, (n + 2) D] and all that is not a tensor's address.
QkvRope call_for(const Tensor& like, at::IntArrayRef qkv_sizes, int64_t head_dim, const Tensor& cos,
                 const Tensor& sin, bool interleaved) {
  const Dtype dtype = dtype_of(like.scalar_type(), "qkv_rope");
  const int64_t width = qkv_sizes[3], heads = head_dim > 0 ? qkv_sizes[2] * (width / head_dim) : 0;
  const int64_t num_tokens = qkv_sizes[0] * qkv_sizes[1];
  ACCEL_CHECK_VALUE(qkv_rope_takes(head_dim, dtype) && width % head_dim == 0 && width / head_dim >= 3 &&
                        heads <= kMaxQkvHeads && num_tokens < int64_t{1} << 31,
                    "qkv_rope on CUDA takes qkv [S, B, G, (n + 2) D], with halves of D in whole 16 bytes, up "
                    "to ", kMaxQkvHeads, " heads and fewer than 2^31 tokens, got ", qkv_sizes, ", D = ",
                    head_dim);
  const auto fits = [&](const Tensor& table) {
    return table.dim() == 3 && table.size(0) >= qkv_sizes[0] &&
        (table.size(1) == 1 || table.size(1) == qkv_sizes[1]) && 2 * table.size(2) == head_dim &&
        table.is_contiguous() && table.scalar_type() == at::kFloat && table.device() == like.device() &&
        reinterpret_cast<uintptr_t>(table.const_data_ptr()) % kPackBytes == 0;
  };
  ACCEL_CHECK_VALUE(fits(cos) && fits(sin) && cos.sizes() == sin.sizes(),
                    "qkv_rope: cos and sin must be contiguous fp32 [positions, 1 or B, D / 2] on ",
                    like.device(), ", got ", cos.scalar_type(), cos.sizes(), " and ", sin.scalar_type(),
                    sin.sizes(), " for ", qkv_sizes);
  return {.qkv = nullptr,
          .q = nullptr,
          .k = nullptr,
          .v = nullptr,
          .cos = cos.const_data_ptr<float>(),
          .sin = sin.const_data_ptr<float>(),
          .row_stride = cos.size(1) * cos.size(2),
          .batch_stride = cos.size(1) == 1 ? 0 : cos.size(2),
          .num_tokens = num_tokens,
          .num_batch = qkv_sizes[1],
          .num_groups = static_cast<int>(qkv_sizes[2]),
          .queries_per_group = static_cast<int>(width / head_dim - 2),
          .head_dim = static_cast<int>(head_dim),
          .interleaved = interleaved,
          .is_gradient = false,
          .dtype = dtype};
}

std::tuple<Tensor, Tensor, Tensor> forward(
    const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t head_dim, bool interleaved) {
  ACCEL_CHECK_VALUE(qkv.dim() == 4, "qkv_rope: qkv must be [S, B, G, (n + 2) D], got ", qkv.sizes());
  check_contiguous("qkv", qkv, qkv, qkv.sizes());
  QkvRope call = call_for(qkv, qkv.sizes(), head_dim, cos, sin, interleaved);
  const OnDeviceOf device(qkv);
  const auto heads = [&](int64_t count) {
    return at::empty({qkv.size(0), qkv.size(1), count, head_dim}, qkv.options());
  };
  Tensor q = heads(int64_t{call.num_groups} * call.queries_per_group);
  Tensor k = heads(call.num_groups), v = heads(call.num_groups);
  if (qkv.numel() == 0) return {q, k, v};
  call.qkv = const_cast<void*>(qkv.const_data_ptr());
  call.q = q.mutable_data_ptr(), call.k = k.mutable_data_ptr(), call.v = v.mutable_data_ptr();
  qkv_rope(call, device.queue());
  device.check_launch();
  return {q, k, v};
}

Tensor backward(const Tensor& dq_in, const Tensor& dk_in, const Tensor& dv_in, const Tensor& cos,
                const Tensor& sin, bool interleaved) {
  ACCEL_CHECK_VALUE(dq_in.dim() == 4 && dk_in.dim() == 4 && dk_in.size(2) > 0 &&
                        dq_in.size(2) % dk_in.size(2) == 0,
                    "qkv_rope backward: needs dq [S, B, G n, D] and dk [S, B, G, D], got ", dq_in.sizes(),
                    " and ", dk_in.sizes());
  const Tensor dq = contiguous(dq_in, /*in_whole_packs=*/true), dk = contiguous(dk_in, true),
               dv = contiguous(dv_in, true);
  const int64_t groups = dk.size(2), head_dim = dq.size(3);
  const std::vector<int64_t> apart{dq.size(0), dq.size(1), groups, head_dim};
  check_contiguous("dq", dq, dq, dq.sizes());
  check_contiguous("dk", dk, dq, apart);
  check_contiguous("dv", dv, dq, apart);
  const OnDeviceOf device(dq);
  Tensor dqkv =
      at::empty({dq.size(0), dq.size(1), groups, (dq.size(2) / groups + 2) * head_dim}, dq.options());
  QkvRope call = call_for(dq, dqkv.sizes(), head_dim, cos, sin, interleaved);
  if (dqkv.numel() == 0) return dqkv;
  call.is_gradient = true;
  call.qkv = dqkv.mutable_data_ptr();
  call.q = const_cast<void*>(dq.const_data_ptr());
  call.k = const_cast<void*>(dk.const_data_ptr());
  call.v = const_cast<void*>(dv.const_data_ptr());
  qkv_rope(call, device.queue());
  device.check_launch();
  return dqkv;
}

}  // namespace

void register_qkv_rope(torch::Library& library) {
  library.impl("qkv_rope_fwd", &forward);
  library.impl("qkv_rope_bwd", &backward);
}

}  // namespace accel::cuda
