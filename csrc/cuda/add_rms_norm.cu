#include "rms_norm.h"
#include "rms_norm_rows.h"

namespace accel::cuda {

void add_rms_norm_forward(const RmsNormForward& op, Queue queue) {
  whole_packs(op.num_cols, op.dtype, op.x, op.residual, op.bias, op.weight, op.y, op.total)
      ? launch_forward<true, true>(op, queue)
      : launch_forward<true, false>(op, queue);
}

void add_rms_norm_backward(const RmsNormBackward& op, int64_t num_programs, Queue queue) {
  if (!op.dtotal) return rms_norm_backward(op, num_programs, queue);  // what is left of it
  whole_packs(op.num_cols, op.dtype, op.dy, op.dtotal, op.x, op.weight, op.dx)
      ? launch_backward<true, true>(op, num_programs, queue)
      : launch_backward<true, false>(op, num_programs, queue);
}

}  // namespace accel::cuda
