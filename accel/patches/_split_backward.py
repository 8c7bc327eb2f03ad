"""Megatron's linear layers and data parallelism in backward passes of two parts
(`accel.parallel.split_backward`).

A feature that trains with such backward passes lists `LINEAR` and `HOOK`, and has `switch_on` called.

    LINEAR      the linear layers of the local spec compute what they did, to the bit, and put off their
                weights' gradients in an input part
    HOOK        a parameter's gradient goes to ``main_grad``, and counts as ready to be reduced, when the
                weights' part delivers it; what its input part had for it already is delivered with it

Upstream's own code runs where a call asks for more: a buffer for the output layer's delayed gradients
(``--defer-embedding-wgrad-compute``), weights that FSDP or GTP shards, autocast. Then nothing is put off.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.parallel.linear import Layout, parallel_linear
from accel.parallel.split_backward import current
from accel.patching import Patch

__all__ = ["HOOK", "LINEAR", "ON", "switch_on"]

_HERE = "accel.patches._split_backward"

ON: list[bool] = []
"""Holds something while a split schedule trains."""


def switch_on() -> Callable[[], None]:
    """For ``Feature.switch_on``."""
    ON.append(True)
    return ON.clear


def putting_off(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ``linear_with_grad_accumulation_and_async_allreduce``."""
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def linear(*args: Any, **kwargs: Any) -> Tensor:
        if not ON:
            return upstream(*args, **kwargs)
        call = signature.bind(*args, **kwargs).arguments
        if _upstream_needed(call):
            return upstream(*args, **kwargs)
        return parallel_linear(call["input"], call["weight"], call["bias"], _layout(call))

    return linear


def _upstream_needed(call: dict[str, Any]) -> bool:
    weight = call["weight"]
    return (
        not weight.requires_grad
        or call.get("grad_output_buffer") is not None
        or call.get("gtp_remat_size", 1) > 1
        or hasattr(weight, "__fsdp_param__")
        or torch.is_autocast_enabled(weight.device.type)
    )


def _layout(call: dict[str, Any]) -> Layout:
    """No communication unless the call says so: a row layer's comes after it."""
    into_main_grad, sequence = call["gradient_accumulation_fusion"], call["sequence_parallel"]
    if not (call["allreduce_dgrad"] or sequence):
        return Layout(into_main_grad=into_main_grad)
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    group = get_tensor_model_parallel_group_if_none(call.get("tp_group"))
    return Layout("column", group, sequence, into_main_grad)


def waiting(upstream: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """Wraps ``DistributedDataParallel._make_backward_post_hook``."""

    @functools.wraps(upstream)
    def make(self: Any, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = upstream(self, param)

        def unless_put_off(*unused: Any) -> None:
            part = current()
            if part is not None and part.holds(param):
                part.take(param)
            else:
                hook(*unused)

        return unless_put_off

    return make


LINEAR = Patch(
    target="megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    replacement=f"{_HERE}:putting_off",
    how="wrap",
    sources={"0.17.1": "68223b5e19c8", "0.18.2": "68223b5e19c8", "0.19.2": "e8826ff1c83e"},
    why="Upstream's linear layers compute the gradient of their weight in the backward, always.",
)

HOOK = Patch(
    target="megatron.core.distributed.distributed_data_parallel"
    ":DistributedDataParallel._make_backward_post_hook",
    replacement=f"{_HERE}:waiting",
    how="wrap",
    expects=("self", "param"),
    sources={"0.17.1": "fec59a9c44a4", "0.18.2": "fec59a9c44a4", "0.19.2": "9db16cb6b15f"},
    why="Autograd calls the hook of a parameter in the input part too, which has no gradient for it yet.",
)
