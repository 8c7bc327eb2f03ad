// RMSNorm backward by a row ring. Rows that fit one go by it however their tensors lie: whoever calls gives
// whole packs.
#pragma once

#include "rms_norm_parts.h"
#include "row_ring.h"

namespace accel::cuda {
namespace {

static_assert(kPacks == kRingPacks);

template <typename T, bool kAdd, int kLog2Threads>
using RmsNormRing = RowRing<T, kAdd ? 3 : 2, 1, kLog2Threads>;

// The weight is of type W and has no offset.
template <typename T, typename W, bool kAdd, int kLog2Threads>
__global__ void __launch_bounds__(kRingThreads, 1) rms_norm_backward_ring(const BackwardCall call) {
#if ACCEL_BULK_COPIES
  const RmsNormBackward& op = call.op;
  using Ring = RmsNormRing<T, kAdd, kLog2Threads>;
  Ring ring(op.num_rows, op.x, op.dy, op.dtotal);
  const W* weight_of_lane = static_cast<const W*>(op.weight) + ring.first_col();
  float dweight[kPacks][kPack<T>] = {};
  WeightPack<T, W> weight[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) weight[k].load(weight_of_lane + k * Ring::kStep);
  for (; ring.has_row(); ring.next()) {
    const float rstd = op.rstd[ring.row()];
    ring.wait();
    Pack<T> x[kPacks], dy[kPacks], dtotal[kAdd ? kPacks : 1];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      x[k] = ring.pack(0, k);
      dy[k] = ring.pack(1, k);
      if constexpr (kAdd) dtotal[k] = ring.pack(2, k);
    }
    Sums dots;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      weight[k].stay_packed();
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) dots.add(i, dy[k][i] * weight[k][i], x[k][i]);
    }
    float dot[] = {dots.total()};
    ring.sum(dot);
    const RowGradient gradient(dot[0], Ring::kCols, rstd);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      x[k].stay_packed(), dy[k].stay_packed(), weight[k].stay_packed();
      float dx[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        dx[i] = dx_of<T, kAdd>(gradient, x[k].again(i), dy[k].again(i), weight[k].again(i),
                               kAdd ? dtotal[k][i] : 0.0f, dweight[k][i]);
      }
      store<true>(static_cast<T*>(op.dx) + ring.start() + k * Ring::kStep, pack_of<T>(dx), kPack<T>);
    }
  }
  ring.store(dweight, op.dweight_PN);
  ring.end();
#endif
}

template <bool kAdd>
void launch_ring_of(const BackwardCall& call, int64_t num_programs, Queue queue) {
  with_log2_threads(call.op.num_cols, call.op.dtype, [&]<int kLog2Threads> {
    for_dtype(call.op.dtype, [&]<typename T> {
      auto* kernel = call.op.weight_is_float ? &rms_norm_backward_ring<T, float, kAdd, kLog2Threads>
                                             : &rms_norm_backward_ring<T, T, kAdd, kLog2Threads>;
      launch_ring<RmsNormRing<T, kAdd, kLog2Threads>>(kernel, num_programs, queue, call);
    });
  });
}

}  // namespace
}  // namespace accel::cuda
