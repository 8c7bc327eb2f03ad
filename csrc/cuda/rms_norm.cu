#include "rms_norm.h"

#include <algorithm>

#include "rms_norm_rows.h"

namespace accel::cuda {

int64_t rms_norm_programs(int64_t num_rows, int64_t num_cols, Dtype dtype, int num_processors) {
  const RowBlock block(num_cols, dtype, kPacks, kMaxThreadsBackward);
  // 512 threads with 110 registers each are what a processor holds at once.
  const int64_t most = std::clamp<int64_t>(512 / block.threads_per_block, 1, 4) * num_processors;
  const int64_t groups = ceil_div(num_rows, block.rows_per_block);
  return std::min(groups, std::clamp<int64_t>(ceil_div(groups, kMinRows), num_processors, most));
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
