#include "rms_norm.h"

#include "rms_norm_rows.h"

namespace accel::cuda {

int64_t rms_norm_programs(int64_t num_rows, int64_t num_cols, Dtype dtype, float weight_offset,
                          int num_processors) {
  if (goes_by_ring(num_cols, dtype, weight_offset)) {
    return RingRows(num_cols, dtype).num_programs(num_rows, num_processors);
  }
  return norm_programs(backward_block(num_cols, dtype), num_rows, num_processors);
}

bool rms_norm_needs_whole_packs(int64_t num_cols, Dtype dtype, float weight_offset) {
  return goes_by_ring(num_cols, dtype, weight_offset);
}

void rms_norm_forward(const RmsNormForward& op, Queue queue) {
  whole_packs(op.num_cols, op.dtype, op.x, op.weight, op.y)
      ? launch_forward<false, true>(op, queue)
      : launch_forward<false, false>(op, queue);
}

void rms_norm_backward(const RmsNormBackward& op, int64_t num_programs, Queue queue) {
  whole_packs(op.num_cols, op.dtype, op.dy, op.x, op.weight, op.dx)
      ? launch_backward<false, true>(op, num_programs, queue)
      : launch_backward<false, false>(op, num_programs, queue);
}

}  // namespace accel::cuda
