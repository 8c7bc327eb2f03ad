"""``--overlap-param-gather-with-optimizer-step`` with experts.

Upstream's chained optimizer gathers the first model chunk's parameters as soon as the first optimizer, that
of its dense layers, has stepped; and with them its experts, whose optimizer has not. Data-parallel ranks
then train with each other's experts of one step before, and a gather that copies late, as Gloo's may,
undoes the step. Nothing says so. Here the experts are gathered, as overlapped, when all optimizers have
stepped: numbers are those without the flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.feature import Feature
from accel.patches._settings import idle_without
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_FLAG = "overlap_param_gather_with_optimizer_step"


@around
def experts_last(upstream: Callable[[Any], bool], self: Any) -> bool:
    """Wraps ``ChainedOptimizer.step_with_ready_grads``."""
    if not getattr(self.config, _FLAG, False):
        return upstream(self)
    (chunk,) = self.chained_optimizers[0].model_chunks
    experts, chunk.expert_parallel_bucket_groups = chunk.expert_parallel_bucket_groups, []
    try:
        success = upstream(self)
    finally:
        chunk.expert_parallel_bucket_groups = experts
    for group in experts:
        group.start_param_sync()
    return success


FEATURE = Feature(
    name="expert_param_gather",
    summary="gather experts after their own step with --overlap-param-gather-with-optimizer-step",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=idle_without(_FLAG, "num_experts"),
    patches=(
        Patch(
            target="megatron.core.optimizer.optimizer:ChainedOptimizer.step_with_ready_grads",
            replacement="accel.patches.expert_param_gather:experts_last",
            how="wrap",
            why="Upstream gathers the first chunk's experts before their optimizer has stepped.",
        ),
    ),
)
