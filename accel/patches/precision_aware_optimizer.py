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
without the flag. ``--log-params-norm`` is the norm of the weights in bf16 (upstream prints 0 here).

Not to be loaded: a ``torch_dist`` checkpoint that Transformer Engine's own Adam has written with the flag. It
holds the 16 bits in that place, and neither Megatron nor accel can tell them from a master; stock without the
flag takes them for one too. ``--optimizer-cuda-graph`` is refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from accel.feature import Feature
from accel.memory.precision_aware_adam import PrecisionAwareAdam
from accel.patches._told import told
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE, te_serves

OPTIMIZERS = {
    "transformer_engine.pytorch.optimizers": types.SimpleNamespace(FusedAdam=PrecisionAwareAdam)
}
"""What Megatron shall find where it looks for the optimizer."""

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_HERE = "accel.patches.precision_aware_optimizer"

CORRECTIONS = (
    Patch(
        target=f"{_DISTRIBUTED}.__init__",
        replacement=f"{_HERE}:without_main_params",
        how="wrap",
        why="Upstream leaves a main parameter of None, whose norm --log-params-norm takes for 0.",
    ),
    Patch(
        target=f"{_DISTRIBUTED}._copy_model_params_to_main_params",
        replacement=f"{_HERE}:masters_too",
        how="wrap",
        why="Upstream leaves the masters as they were when other weights are loaded into the model.",
    ),
    Patch(
        target=f"{_DISTRIBUTED}._copy_model_grads_to_main_grads",
        replacement=f"{_HERE}:in_the_dtype_of_main_grads",
        how="wrap",
        expects=("self",),
        why="Upstream would clip gradients in bf16 where they were reduced in bf16.",
    ),
)
"""What upstream does not do for a distributed optimizer whose masters are the inner optimizer's."""


def _yes(*args: Any, **kwargs: Any) -> bool:
    return True


def checked_with_ours(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:
        ours = self.use_precision_aware_optimizer
        (checking(post_init) if ours else post_init)(self)

    return __post_init__


def checking(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """``OptimizerConfig.__post_init__`` that finds an optimizer for the flag."""
    return told(post_init, OPTIMIZERS, is_te_min_version=_yes)


def built_with_ours(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_(config: Any, *args: Any, **kwargs: Any) -> Any:
        ours = config.use_precision_aware_optimizer and not config.optimizer_cpu_offload
        return (building(build) if ours else build)(config, *args, **kwargs)

    return build_


def building(build: Callable[..., Any], **names: object) -> Callable[..., Any]:
    """``_get_megatron_optimizer_based_on_param_groups`` that takes ours for Transformer Engine's Adam."""
    return told(
        build,
        OPTIMIZERS,
        USING_PYTORCH_OPTIMIZER=False,
        Adam=PrecisionAwareAdam,
        is_te_min_version=_yes,
        **names,
    )


def without_main_params(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if isinstance(self.optimizer, PrecisionAwareAdam) and not self.is_stub_optimizer:
            for param in (p for group in self.model_float16_groups for p in group):
                if param.main_param is None:  # then upstream takes the weights themselves
                    del param.main_param

    return __init__


def masters_too(copy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(copy)
    def copy_(self: Any, *args: Any, **kwargs: Any) -> None:
        copy(self, *args, **kwargs)
        if isinstance(self.optimizer, PrecisionAwareAdam):
            self.optimizer.reload_masters()

    return copy_


def in_the_dtype_of_main_grads(copy: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(copy)
    def copy_(self: Any) -> None:
        copy(self)
        wide = (
            self.config.main_grads_dtype == torch.float32 and not self.ddp_config.use_megatron_fsdp
        )
        if wide and isinstance(self.optimizer, PrecisionAwareAdam):
            for param in (p for group in self.optimizer.param_groups for p in group["params"]):
                if getattr(param, "decoupled_grad", None) is not None:
                    param.decoupled_grad = param.decoupled_grad.float()

    return copy_


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
            replacement=f"{_HERE}:checked_with_ours",
            how="wrap",
            expects=("self",),
            why="Upstream looks for the optimizer in Transformer Engine, and asks for its version.",
        ),
        Patch(
            target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            replacement=f"{_HERE}:built_with_ours",
            how="wrap",
            why="Upstream hands the dtypes of the states to torch's AdamW, which does not know them.",
        ),
        *CORRECTIONS,
    ),
)
