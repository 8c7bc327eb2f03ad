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
without the flag. ``--log-params-norm`` is the norm of the masters (upstream prints 0 here).

Not to be loaded: a ``torch_dist`` checkpoint that Transformer Engine's own Adam has written with the flag. It
holds the 16 bits in that place, and neither Megatron nor accel can tell them from a master; stock without the
flag takes them for one too. ``--optimizer-cuda-graph`` is refused.
"""

from __future__ import annotations

import functools

from accel.feature import Context, Feature
from accel.patches._inner_masters import FLAG, INNER_MASTERS, NOT_WITH_FSDP, want
from accel.upstream import SUPPORTED_RANGE, te_serves


def _check(context: Context) -> tuple[str, ...]:
    args = context.args
    flag, fsdp = "use_precision_aware_optimizer", "use_megatron_fsdp"
    if getattr(args, flag, False) and getattr(args, fsdp, False):
        raise ValueError(NOT_WITH_FSDP)
    return ()


FEATURE = Feature(
    name="precision_aware_optimizer",
    summary="serve --use-precision-aware-optimizer where Transformer Engine is not installed",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    prepare=_check,
    switch_on=functools.partial(want, FLAG, True),
    patches=INNER_MASTERS,
)
