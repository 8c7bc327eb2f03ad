"""An optimizer that is built before its learning rate is known, without Apex and Transformer Engine.

Their Adam takes ``lr=None``, for Megatron's scheduler sets the rate before every step; torch's optimizers,
which Megatron uses instead, refuse it. Here the rate is 0 until it is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.feature import Feature
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


@around
def with_some_rate(build: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    from megatron.core import optimizer

    if config.lr is not None or not optimizer.USING_PYTORCH_OPTIMIZER:
        return build(config, *args, **kwargs)
    config.lr = 0.0
    try:
        return build(config, *args, **kwargs)
    finally:
        config.lr = None


FEATURE = Feature(
    name="optimizer_without_lr",
    summary="build torch's optimizers before the learning rate is known",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    patches=(
        Patch(
            target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            replacement="accel.patches.optimizer_without_lr:with_some_rate",
            how="wrap",
            why="Upstream passes lr=None on, which torch's optimizers refuse.",
        ),
    ),
)
