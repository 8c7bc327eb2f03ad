"""``--fp16`` with several optimizers, as experts have one of their own.

Each has a loss scale of its own, which an overflow in its own gradients halves, while the loss is multiplied
by the first one's. So after an overflow in the dense layers alone upstream divides the experts' gradients by
another number than they were multiplied by; clipping and Adam's moments get them so, and nothing says it.
Here all scales follow the overflow of any, and scales of a checkpoint that differ follow the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accel.feature import Feature
from accel.patches._settings import idle_without
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


@around
def with_one_verdict(upstream: Callable[[Any], bool], self: Any) -> bool:
    """Wraps ``ChainedOptimizer.prepare_grads``."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    found = [getattr(optimizer, "grad_scaler", None) for optimizer in self.chained_optimizers]
    scalers = [scaler for scaler in found if isinstance(scaler, DynamicGradScaler)]
    if len(scalers) < 2:
        return upstream(self)
    for other in scalers[1:]:
        other.load_state_dict(scalers[0].state_dict())
    with _held(scalers):
        overflow = upstream(self)
    for scaler in scalers:
        scaler.update(overflow)
    return overflow


@contextlib.contextmanager
def _held(scalers: Sequence[Any]) -> Iterator[None]:
    """They keep their scale for a while."""
    for scaler in scalers:
        scaler.update = lambda found_inf: None
    try:
        yield
    finally:
        for scaler in scalers:
            del scaler.update


FEATURE = Feature(
    name="one_loss_scale",
    summary="let the loss scales of experts and dense layers change together with --fp16",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=idle_without("fp16"),
    patches=(
        Patch(
            target="megatron.core.optimizer.optimizer:ChainedOptimizer.prepare_grads",
            replacement="accel.patches.one_loss_scale:with_one_verdict",
            how="wrap",
            why="Upstream changes each optimizer's scale by itself, and scales the loss by the first's.",
        ),
    ),
)
