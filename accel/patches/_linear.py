"""Megatron's linear layers of the local spec through `accel.parallel.parallel_linear`.

A feature that needs it lists the patches, and has `switch_on` called:

    LINEAR      every linear layer with a weight that is trained: Megatron's bits, and what
                `accel.parallel.split_backward` and `accel.parallel.linear_overlap` do for it. Without
                `switch_on` those whose saved tensors go through hooks
    OVERLAP     those with a frozen weight, and the reduction after a row layer, while products overlap

Upstream's own code runs where a call asks for more: weights that FSDP or GTP shards, autocast.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.log import log_once
from accel.ops._saving import hooks_take_saved
from accel.parallel import linear_overlap as overlap
from accel.parallel.linear import Layout, parallel_linear
from accel.patches.cpu_offloading import OffloadedLayers
from accel.patching import Patch, around

__all__ = ["LINEAR", "OVERLAP", "switch_on", "upstream_needed"]

_HERE = "accel.patches._linear"
_LAYERS = "megatron.core.tensor_parallel.layers"

_WANTED: list[object] = []
"""One for each feature that is on."""


def switch_on() -> Callable[[], None]:
    """For ``Feature.switch_on``."""
    mine = object()
    _WANTED.append(mine)
    return functools.partial(_WANTED.remove, mine)


def through_ours(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ``linear_with_grad_accumulation_and_async_allreduce``."""
    # Upstream reads the weight from what was saved, and hooks give another object back: what it notes there,
    # that `main_grad` has the gradient, the parameter never learns, and with `--overlap-grad-reduce` data
    # parallelism stops.
    return _wrapped(upstream, lambda: bool(_WANTED) or hooks_take_saved())


def frozen_through_ours(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ``linear_with_frozen_weight``."""
    return _wrapped(upstream, lambda: overlap.current() is not None, frozen=True)


def _wrapped(
    upstream: Callable[..., Tensor], wanted: Callable[[], bool], frozen: bool = False
) -> Callable[..., Tensor]:
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def linear(*args: Any, **kwargs: Any) -> Tensor:
        if not wanted():
            return upstream(*args, **kwargs)
        call = signature.bind(*args, **kwargs).arguments
        weight = call["weight"]
        if weight.requires_grad is frozen:
            return upstream(*args, **kwargs)
        if upstream_needed(weight, call.get("gtp_remat_size", 1)):
            _say_what_stays()
            return upstream(*args, **kwargs)
        bias = call["bias"]
        if frozen and bias is not None:
            bias = bias.detach()  # upstream's backward gives it no gradient either
        return parallel_linear(call["input"], weight, bias, _layout(call))

    return linear


def upstream_needed(weight: Tensor, gtp_remat_size: int) -> bool:
    """Whether upstream's own code must run: the weight is sharded, or autocast is on."""
    return (
        gtp_remat_size > 1
        or hasattr(weight, "__fsdp_param__")
        or torch.is_autocast_enabled(weight.device.type)
    )


def _say_what_stays() -> None:
    if overlap.current() is not None:
        log_once(
            "tp_overlap",
            "nothing overlaps in Megatron's own linear layers (all of the local spec, and the output layer) "
            "where weights are sharded, as by Megatron-FSDP, or autocast is on",
        )


def _layout(call: dict[str, Any]) -> Layout:
    """No communication unless the call says so: a row layer's comes after it."""
    into_main_grad, sequence = call["gradient_accumulation_fusion"], call["sequence_parallel"]
    taken = _taken(call.get("grad_output_buffer"), call.get("wgrad_deferral_limit"))
    if not (call["allreduce_dgrad"] or sequence):
        return Layout(into_main_grad=into_main_grad, taken=taken)
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    group = get_tensor_model_parallel_group_if_none(call.get("tp_group"))
    return Layout("column", group, sequence, into_main_grad, taken=taken)


def _taken(buffer: list[Tensor] | None, limit: int | None) -> Callable[[Tensor], bool] | None:
    """``--defer-embedding-wgrad-compute``: the schedule computes the output layer's from these."""
    if buffer is None:
        return None

    def take(dy: Tensor) -> bool:
        room = limit == 0 or limit is None or len(buffer) < limit
        if room:
            buffer.append(dy)
        return room

    return take


@around
def reducing_pieces(upstream: Callable[..., Any], self: Any, input_: Tensor) -> Any:
    """Wraps ``RowParallelLinear.forward``."""
    if overlap.current() is None or _row_stays(self):
        return upstream(self, input_)
    layout = Layout("row", self.tp_group, self.sequence_parallel, self.gradient_accumulation_fusion)
    bias = None if self.skip_bias_add else self.bias
    y = parallel_linear(input_, self.weight, bias, layout)
    return y, self.bias if self.skip_bias_add else None


def _row_stays(layer: Any) -> bool:
    """Whether upstream's own code runs: no reduction, or more than that."""
    return (
        layer.tp_group.size() == 1
        or layer.explicit_expert_comm
        or not layer.input_is_parallel
        or not isinstance(layer.config._cpu_offloading_context, OffloadedLayers | None)
        or _stays_sharded(layer)
    )


def _stays_sharded(layer: Any) -> bool:
    stays = upstream_needed(layer.weight, getattr(layer, "gtp_remat_size", 1))
    if stays:
        _say_what_stays()
    return stays


LINEAR = Patch(
    target=f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
    replacement=f"{_HERE}:through_ours",
    how="wrap",
    sources={"0.17.1": "68223b5e19c8", "0.18.2": "68223b5e19c8", "0.19.2": "e8826ff1c83e"},
    why="Upstream's linear layers compute the gradient of their weight in the backward, always, and their "
    "input has come before they begin.",
)

OVERLAP = (
    Patch(
        target=f"{_LAYERS}:linear_with_frozen_weight",
        replacement=f"{_HERE}:frozen_through_ours",
        how="wrap",
        sources={"0.17.1": "aff75146310e", "0.18.2": "aff75146310e", "0.19.2": "49372bcbd385"},
        why="Under sequence parallelism its input is gathered first, and its gradient reduced at the end.",
    ),
    Patch(
        target=f"{_LAYERS}:RowParallelLinear.forward",
        replacement=f"{_HERE}:reducing_pieces",
        how="wrap",
        sources={"0.17.1": "71b59f339209", "0.18.2": "71b59f339209", "0.19.2": "89a0fe41cc0b"},
        why="The reduction begins when the whole product is there.",
    ),
)
