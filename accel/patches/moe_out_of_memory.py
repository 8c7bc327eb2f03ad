"""An MoE layer that runs out of memory says how many tokens came to its experts, and what bounds them.

Routing without a capacity sends each rank as many tokens as its experts attract. Where a few attract most,
the rank that has them runs out of memory, in a layer and a step that nobody foresees, with an error that
tells of bytes alone. Here the same error says which layer it was, how many tokens came, how many of them to
which expert, and the flag. Nothing is computed otherwise, and nothing waits that did not before: the counts
are read once the memory is gone. ``moe_overlap`` finds out on all ranks before the tokens set out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.parallel.experts.room import what_bounds
from accel.patches._expert_counts import number_of
from accel.patches._settings import no_experts
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_HERE = "accel.patches.moe_out_of_memory"
_OF_THE_HOST = "can't allocate memory"
"""PyTorch's words where the CPU's own allocator fails, in a RuntimeError."""


@around
def on_the_way(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``dispatch``."""
    self.accel_tokens = None
    with _explained(self):
        found = original(self, *args, **kwargs)
    # the dispatcher forgets them when the experts begin
    self.accel_tokens = _counts(self.token_dispatcher)
    return found


@around
def at_the_experts(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``routed_experts_compute``."""
    with _explained(self):
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def _explained(layer: Any) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of which torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and _OF_THE_HOST not in str(error):
            raise
        raise torch.OutOfMemoryError(f"{_told(layer)}\n{error}") from error


def _told(layer: Any) -> str:
    came = "the tokens of this rank's experts"
    counts = _counts(layer.token_dispatcher)
    if counts is None:
        counts = getattr(layer, "accel_tokens", None)
    if counts is not None:
        hottest = int(counts.argmax())
        came = (
            f"the {int(counts.sum())} tokens of this rank's experts, {int(counts[hottest])} of them for "
            f"expert {layer.local_expert_indices[hottest]}"
        )
    bound = what_bounds(layer.config.moe_expert_capacity_factor)
    return f"MoE layer {number_of(layer)}: no memory for {came}: {bound}"


def _counts(dispatcher: Any) -> Tensor | None:
    """Of the experts here, where the dispatcher has got so far as to know."""
    counts = getattr(dispatcher, "tokens_per_expert", None)
    if counts is None and (local_map := getattr(dispatcher, "local_map", None)) is not None:
        counts = local_map.sum(dim=0)
    return counts if isinstance(counts, Tensor) else None


FEATURE = Feature(
    name="moe_out_of_memory",
    summary="an MoE layer without memory says how many tokens came, and what bounds them",
    preset="exact",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=no_experts,
    patches=tuple(
        Patch(
            target=f"{_LAYER}.{method}",
            replacement=f"{_HERE}:{replacement}",
            how="wrap",
            expects=("self", "hidden_states", "probs"),
            why="Upstream's error tells of bytes, neither of the layer nor of what bounds them.",
        )
        for method, replacement in (
            ("dispatch", "on_the_way"),
            ("routed_experts_compute", "at_the_experts"),
        )
    ),
)
