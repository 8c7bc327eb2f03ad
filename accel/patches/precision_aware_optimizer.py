"""``--use-precision-aware-optimizer`` without Transformer Engine, whose Adam is the only one that Megatron
knows to keep states in dtypes of their own.

Megatron's distributed optimizer is given ``PrecisionAwareAdam`` of ``accel.memory`` in its place:
``--main-params-dtype`` fp32 or fp16, ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype`` fp32, bf16, fp16 or fp8,
``--main-grads-dtype`` fp32 or bf16. With fp32 master weights a bf16 parameter is the upper half of its
master, and 16 bits hold the rest (``store_param_remainders``, Megatron's default): 4 bytes for both, where
stock has 6.

The bf16 weight is the master rounded to nearest, ties to even, as in stock; the master loses one ulp, once,
where it is such a tie whose upper half is even. With fp32 moments a step is otherwise the same arithmetic as
without the flag. Checkpoints hold the fp32 master in the place where stock has it, so that they load with and
without the flag.

Not to be loaded: a ``torch_dist`` checkpoint that Transformer Engine's own Adam has written with the flag. It
holds the 16 bits in that place, and neither Megatron nor accel can tell them from a master; stock without the
flag takes them for one too. ``--optimizer-cuda-graph`` is refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from accel.feature import Feature
from accel.memory.precision_aware_adam import PrecisionAwareAdam
from accel.patches._told import told
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE, te_serves

_OPTIMIZERS = {
    "transformer_engine.pytorch.optimizers": types.SimpleNamespace(FusedAdam=PrecisionAwareAdam)
}


def _yes(*args: Any, **kwargs: Any) -> bool:
    return True


def checked_with_ours(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:
        ours = self.use_precision_aware_optimizer
        (told(post_init, _OPTIMIZERS, is_te_min_version=_yes) if ours else post_init)(self)

    return __post_init__


def built_with_ours(build: Callable[..., Any]) -> Callable[..., Any]:
    names = {
        "USING_PYTORCH_OPTIMIZER": False,
        "Adam": PrecisionAwareAdam,
        "is_te_min_version": _yes,
    }

    @functools.wraps(build)
    def build_(config: Any, *args: Any, **kwargs: Any) -> Any:
        ours = config.use_precision_aware_optimizer and not config.optimizer_cpu_offload
        return (told(build, _OPTIMIZERS, **names) if ours else build)(config, *args, **kwargs)

    return build_


FEATURE = Feature(
    name="precision_aware_optimizer",
    summary="serve --use-precision-aware-optimizer where Transformer Engine is not installed",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    patches=(
        Patch(
            target="megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
            replacement="accel.patches.precision_aware_optimizer:checked_with_ours",
            how="wrap",
            expects=("self",),
            why="Upstream looks for the optimizer in Transformer Engine, and asks for its version.",
        ),
        Patch(
            target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            replacement="accel.patches.precision_aware_optimizer:built_with_ours",
            how="wrap",
            why="Upstream hands the dtypes of the states to torch's AdamW, which does not know them.",
        ),
    ),
)
