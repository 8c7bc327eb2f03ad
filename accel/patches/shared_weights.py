"""A bf16 weight is the upper half of its fp32 master: 4 bytes for both, where stock Megatron has 6.

The master of a bf16 model is kept as the weight itself and a 16-bit remainder
(``accel.ops.split_remainder``). A step reads and writes both in one pass of ``accel.ops.adamw``; there is no
moment at which a weight is anything but its master rounded to bf16. With the distributed optimizer the
remainder is sharded as the master is in stock: 2 + 2/D bytes on each of D data-parallel ranks, where stock
has 2 + 4/D.

Under ``--use-distributed-optimizer`` it is Megatron's own path for masters that the inner optimizer holds,
the one of ``--use-precision-aware-optimizer``; without it ``SharedWeightsOptimizer`` takes the place of
Megatron's mixed-precision optimizer. Gradients, clipping, loss scales and skipped steps are stock's.

Training is stock's bit for bit but for ties: where a master lies halfway between two bf16 numbers, and the
lower one is even, it loses one unit in its last place. Of random numbers 1 in 2^17 is such a tie.

Checkpoints are stock's in every format, with the fp32 masters, and load with and without the flag. While one
is written, the masters that it holds are in memory beside the model. ``--log-params-norm`` is the norm of the
weights in bf16.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature
from accel.patches.precision_aware_optimizer import CORRECTIONS, building, checking
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_HERE = "accel.patches.shared_weights"
_ELSEWHERE = "it writes or keeps the fp32 masters itself"
_log = logging.getLogger("accel")
_EXCLUDED = {
    "optimizer_cpu_offload": _ELSEWHERE,
    "use_layer_wise_distributed_optimizer": _ELSEWHERE,
    "use_megatron_fsdp": _ELSEWHERE,
    "use_torch_fsdp2": _ELSEWHERE,
    "fp8_param_gather": "its weights are fp8",
    "fp4_param_gather": "its weights are fp4",
    "optimizer_cuda_graph": "the optimizer cannot be captured",
    "qk_clip": _ELSEWHERE,
}
"""Option of Megatron's -> why weights cannot be shared with it. Not `conflicts` of the feature: an
optimizer's configuration is asked too, and one of these is the name of a feature that is always on."""


def _unshareable(options: Any) -> str | None:
    """Why the weights of Megatron's arguments, or of its ``OptimizerConfig``, cannot be shared."""
    if not options.bf16:
        dtype = "fp16" if options.fp16 else "fp32"
        return f"parameters are {dtype}; it halves what bf16 parameters (--bf16) have beside them"
    if options.optimizer != "adam":
        return f"--optimizer {options.optimizer} is not served, only adam"
    for option, why in _EXCLUDED.items():
        if getattr(options, option, False):
            return f"--{option.replace('_', '-')}: {why}"
    return None


def _refuses(context: Context) -> str | None:
    return _unshareable(context.args) if context.args is not None else None


def _idle(context: Context) -> str | None:
    asked = context.args is not None and context.args.use_precision_aware_optimizer
    return "--use-precision-aware-optimizer does it" if asked else None


def sharing(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make every bf16 Adam a precision-aware one, the plain mixed-precision optimizer's too."""

    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:
        if reason := _unshareable(self):
            _log.warning("shared_weights: this optimizer keeps its own masters: %s", reason)
            post_init(self)
            return
        # without the distributed optimizer upstream refuses the flag, but follows it all the same
        self.use_precision_aware_optimizer = self.use_distributed_optimizer
        checking(post_init)(self)
        self.use_precision_aware_optimizer = True
        if not self.use_distributed_optimizer:
            self.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True

    return __post_init__


def built_sharing(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        if _unshareable(config) or not config.use_precision_aware_optimizer:
            return build(config, model_chunks, *args, **kwargs)
        if any(c.ddp_config.use_megatron_fsdp for c in model_chunks if hasattr(c, "ddp_config")):
            raise ValueError(f"--accel-shared-weights and Megatron-FSDP: {_ELSEWHERE}")
        from accel.patches.shared_weights_optimizer import SharedWeightsOptimizer

        ours = building(build, Float16OptimizerWithFloat16Params=SharedWeightsOptimizer)
        return ours(config, model_chunks, *args, **kwargs)

    return build_


FEATURE = Feature(
    name="shared_weights",
    summary="keep a bf16 weight and its fp32 master in 4 bytes instead of 6",
    preset="max",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("shared_weights",),
    refuses=_refuses,
    idle=_idle,
    patches=(
        Patch(
            target="megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
            replacement=f"{_HERE}:sharing",
            how="wrap",
            expects=("self",),
            why="Megatron follows its configuration to masters that the inner optimizer keeps.",
        ),
        Patch(
            target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            replacement=f"{_HERE}:built_sharing",
            how="wrap",
            why="Upstream would take an Adam that keeps whole masters.",
        ),
        *CORRECTIONS,
    ),
)
