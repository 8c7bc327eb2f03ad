"""``--num-distributed-optimizer-instances`` with ``--overlap-grad-reduce`` and pipeline parallelism.

A stage's pipeline schedule begins the reduction of its gradients where the other stages do
(``--align-grad-reduce``), and their end begins it once more, unless it is under way. Upstream looks for that
at a handle, which several instances of the distributed optimizer do not have: gradients are then averaged
twice, in every iteration, on all stages but the first, or on all of an interleaved schedule, and nothing says
so. Here the second beginning does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_HERE = "accel.patches.grad_sync_once"
_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_BEGUN = "accel_reduction_begun"


@around
def unless_begun(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``_ParamAndGradBucketGroup.start_grad_sync``."""
    config = self.ddp_config
    if config.num_distributed_optimizer_instances == 1 or not config.overlap_grad_reduce:
        upstream(self, *args, **kwargs)
    elif not (self.is_first_batch and getattr(self, _BEGUN, False)):
        upstream(self, *args, **kwargs)
        setattr(self, _BEGUN, True)


@around
def then_over(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``_ParamAndGradBucketGroup.finish_grad_sync``."""
    upstream(self, *args, **kwargs)
    setattr(self, _BEGUN, False)


def _idle(context: Context) -> str | None:
    args = context.args
    if args is not None and getattr(args, "num_distributed_optimizer_instances", 1) == 1:
        return "there is one instance of the distributed optimizer"
    if args is not None and not getattr(args, "overlap_grad_reduce", False):
        return "gradients are reduced at the end"
    return None


FEATURE = Feature(
    name="grad_sync_once",
    summary="reduce gradients once with --num-distributed-optimizer-instances under a pipeline",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=_idle,
    patches=(
        Patch(
            target=f"{_GROUP}.start_grad_sync",
            replacement=f"{_HERE}:unless_begun",
            how="wrap",
            why="Upstream begins a reduction again that has no handle.",
        ),
        Patch(
            target=f"{_GROUP}.finish_grad_sync",
            replacement=f"{_HERE}:then_over",
            how="wrap",
            why="The next iteration's is another one.",
        ),
    ),
)
