"""``--cpu-offloading-num-layers N`` without Transformer Engine.

Upstream's transformer block takes a context for its layers from Transformer Engine, and refuses the flag
where there is none. Here each of the first N layers is a group of :mod:`accel.memory.swap`, in both layer
specs: what autograd saves in it goes to pinned host memory while the next layer computes, and comes back
while the backward pass is one layer behind. Parameters stay, and so does what is smaller than 1 MiB.

Pinned buffers are always kept for the next iteration, and two layers are on the device at a time, so that
``cpu_offloading_double_buffering`` and ``cpu_offloading_retain_pinned_cpu_buffers`` change nothing;
``cpu_offloading_weights`` moves nothing in Transformer Engine either. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature
from accel.memory.swap import MIN_BYTES, Chain, Swap
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_serves

__all__ = ["OffloadedLayers", "get_cpu_offload_context"]

_BLOCK = "megatron.core.transformer.transformer_block"
_HERE = "accel.patches.cpu_offloading"
_log = logging.getLogger("accel")


class OffloadedLayers:
    """The context that a block opens around each of its layers in turn.

    Args:
        num_layers: the first so many layers are offloaded.
    """

    inside_context = False
    """Whether upstream's linear layers are to mark their inputs for Transformer Engine."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.chain: Chain | None = None
        self._swap: Swap | None = None
        self._layer = contextlib.ExitStack()

    def __enter__(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._swap is None:
            device = torch.empty(0, device=torch.cuda.current_device()).device
            self._swap = Swap(device, min_bytes=MIN_BYTES)
        if self.chain is None:
            self.chain = self._swap.chain(lambda number: number < self.num_layers)
        self._layer.enter_context(self.chain.group())

    def __exit__(self, *exc: Any) -> None:
        self._layer.close()

    def end(self) -> None:
        """The forward pass of the block is over."""
        if self.chain is not None:
            self.chain.close()
            self.chain = None


def get_cpu_offload_context(
    enabled: bool,
    num_layers: int,
    model_layers: int,
    activation_offloading: bool,
    weight_offloading: bool,
    double_buffering: bool = False,
    retain_pinned_cpu_buffers: bool = False,
) -> tuple[Any, Callable[[Tensor], Tensor] | None]:
    """The context for a block's layers, and what the block calls behind each.

    Raises:
        ValueError: neither activations nor weights are to be offloaded.
    """
    if not enabled:
        return contextlib.nullcontext(), None
    if weight_offloading:
        _log.warning("cpu_offloading_weights: weights stay, as with Transformer Engine")
    elif not activation_offloading:
        raise ValueError(
            f"cpu_offloading of {num_layers} layers with cpu_offloading_activations=False and "
            "cpu_offloading_weights=False moves nothing: set cpu_offloading_activations"
        )
    # the groups of a chain follow each other: nothing is left to do behind a layer
    return OffloadedLayers(num_layers if activation_offloading else 0), None


@around
def ending_with_the_block(forward: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return forward(self, *args, **kwargs)
    finally:
        if isinstance(self.offload_context, OffloadedLayers):
            self.offload_context.end()


def _prepare(context: Context) -> list[str]:
    args = context.args
    patterns = ("hybrid_layer_pattern", "hybrid_override_pattern")
    hybrid = any(getattr(args, pattern, None) for pattern in patterns)
    if not hybrid or not getattr(args, "cpu_offloading_num_layers", 0):
        return []
    return ["--cpu-offloading-num-layers: hybrid models do not ask for it, nothing moves"]


FEATURE = Feature(
    name="cpu_offloading",
    summary="serve Megatron's --cpu-offloading-num-layers without Transformer Engine",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    prepare=_prepare,
    patches=(
        Patch(
            target=f"{_BLOCK}:get_cpu_offload_context",
            replacement=f"{_HERE}:get_cpu_offload_context",
            why="Upstream's is Transformer Engine's, and None without it.",
        ),
        Patch(
            target=f"{_BLOCK}:TransformerBlock.forward",
            replacement=f"{_HERE}:ending_with_the_block",
            how="wrap",
            why="What one forward pass has saved is one chain.",
        ),
    ),
)
