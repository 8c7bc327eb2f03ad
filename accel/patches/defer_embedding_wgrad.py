"""``--defer-embedding-wgrad-compute``: the output layer's gradient is there before it is reduced.

Upstream computes that gradient after the last backward pass of the pipeline, from inputs and gradients that
it has kept. Six things are wrong there, four of them without a word:

``--overlap-grad-reduce``  the bucket with the weight is reduced when its backward passes have run, before the
                           gradient is there. Here the reduction begins after it.
``--mtp-num-layers``       the output layer runs twice for each micro-batch, and its gradients are paired with
                           the wrong inputs, and added to the embedding's. Here the flag is off then; a line
                           says so.
the local spec             asks every column-parallel layer for a list that only the output layer was given.
                           Here the others have one that keeps nothing.
a single micro-batch       stops upstream's loop over the gradients, which is written for two and more.
a step that raises         leaves gradients, which are paired with the inputs of the next step. Here each step
                           begins without.
evaluation                 keeps all inputs of the output layer until the next training step. Here it keeps
                           none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from accel.feature import Context, Feature
from accel.parallel import linear
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_HERE = "accel.patches.defer_embedding_wgrad"
_LAYERS = "megatron.core.tensor_parallel.layers"
_ATTRIBUTE = "accel_deferred"


@dataclass
class Deferred:
    """What belongs to the weight of an output layer."""

    gradients: list[Tensor]
    """Of the layer's outputs, whose products with its inputs are not computed yet. Upstream's own list."""
    reduction: Callable[[], None] | None = None
    """Waits for them."""

    @staticmethod
    def of(weight: Parameter) -> Deferred | None:
        return getattr(weight, _ATTRIBUTE, None)


class Nothing(list[Tensor]):
    """Keeps nothing."""

    def append(self, item: Tensor) -> None:
        pass


@around
def with_a_list(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``ColumnParallelLinear.__init__``."""
    upstream(self, *args, **kwargs)
    if not self.config.defer_embedding_wgrad_compute:
        return
    # where no command line has switched it off
    if getattr(self.config, "mtp_num_layers", None):
        raise ValueError(
            f"defer_embedding_wgrad_compute=True with mtp_num_layers={self.config.mtp_num_layers}: "
            "upstream adds the output layer's gradient to another weight; set it to False"
        )
    if self.embedding_activation_buffer is None:
        self.embedding_activation_buffer = Nothing()
    elif self.weight is not None:
        setattr(self.weight, _ATTRIBUTE, Deferred(self.grad_output_buffer))


@around
def keeping_for_a_backward_pass(
    upstream: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``ColumnParallelLinear.forward``."""
    kept = self.embedding_activation_buffer
    if kept is None or torch.is_grad_enabled():
        return upstream(self, *args, **kwargs)
    self.embedding_activation_buffer = Nothing()
    try:
        return upstream(self, *args, **kwargs)
    finally:
        self.embedding_activation_buffer = kept


@around
def when_all_are_there(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``_ParamAndGradBucketGroup.start_grad_sync``."""
    reduce = functools.partial(upstream, self, *args, **kwargs)
    for deferred in filter(None, map(Deferred.of, self.params)):
        if deferred.gradients:
            deferred.reduction = reduce
            return
    reduce()


@around
def with_its_gradients(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps ``clear_embedding_activation_buffer``, which a step begins with."""
    module = upstream(*args, **kwargs)
    weights = () if module is None else module.parameters()
    for deferred in filter(None, map(Deferred.of, weights)):
        deferred.gradients.clear()
        deferred.reduction = None
    return module


@around
@torch.no_grad()  # as in the backward pass, where reductions begin else
def then_reducing(
    upstream: Callable[..., None],
    config: Any,
    inputs: Any,
    gradients: Any,
    weight: Parameter,
    tp_group: Any,
) -> None:
    """Wraps ``drain_embedding_wgrad_compute``."""
    if len(inputs) == len(gradients) == 1:
        _accumulate(config, inputs.pop(), gradients.pop(), weight, tp_group)
    else:
        upstream(config, inputs, gradients, weight, tp_group)
    deferred = Deferred.of(weight)
    if deferred is not None and deferred.reduction is not None:
        deferred.reduction()
        deferred.reduction = None


def _accumulate(config: Any, x: Tensor, dy: Tensor, weight: Any, tp_group: Any) -> None:
    """One gradient alone, for which upstream has no end of its loop."""
    if config.sequence_parallel:
        whole = x.new_empty((tp_group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=tp_group)
        x = whole
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    linear.accumulate(weight.main_grad, dy.flatten(0, -2), x.flatten(0, -2))


def unless_it_runs_twice(context: Context) -> Sequence[str]:
    args = context.args
    asked = getattr(args, "defer_embedding_wgrad_compute", False)
    if not (asked and getattr(args, "mtp_num_layers", None)):
        return []
    args.defer_embedding_wgrad_compute = False
    return [
        "--defer-embedding-wgrad-compute is off: with --mtp-num-layers upstream adds the output layer's "
        "gradient to another weight"
    ]


def _idle(context: Context) -> str | None:
    asked = context.args is None or getattr(context.args, "defer_embedding_wgrad_compute", False)
    return None if asked else "nothing is put off"


FEATURE = Feature(
    name="defer_embedding_wgrad",
    summary="make --defer-embedding-wgrad-compute right with --overlap-grad-reduce and --mtp-num-layers",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    prepare=unless_it_runs_twice,
    idle=_idle,
    patches=(
        Patch(
            target=f"{_LAYERS}:ColumnParallelLinear.__init__",
            replacement=f"{_HERE}:with_a_list",
            how="wrap",
            why="Upstream appends to a list that layers but the output layer do not have.",
        ),
        Patch(
            target=f"{_LAYERS}:ColumnParallelLinear.forward",
            replacement=f"{_HERE}:keeping_for_a_backward_pass",
            how="wrap",
            why="Upstream keeps inputs that have no backward pass.",
        ),
        Patch(
            target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
            replacement=f"{_HERE}:when_all_are_there",
            how="wrap",
            why="Upstream reduces a bucket without the gradient that is put off.",
        ),
        Patch(
            target="megatron.core.pipeline_parallel.schedules:clear_embedding_activation_buffer",
            replacement=f"{_HERE}:with_its_gradients",
            how="wrap",
            expects=("config", "model", "is_last_stage"),
            why="Gradients of a step that raised are paired with the inputs of the next.",
        ),
        Patch(
            target="megatron.core.utils:drain_embedding_wgrad_compute",
            replacement=f"{_HERE}:then_reducing",
            how="wrap",
            expects=(
                "config",
                "embedding_activation_buffer",
                "grad_output_buffer",
                "weight",
                "tp_group",
            ),
            why="The reduction that waited begins.",
        ),
    ),
)
