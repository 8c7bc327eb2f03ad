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

Checkpoints are stock's in every format, with the fp32 masters, and load with and without the flag. The
masters that one holds are joined in host memory, one by one; the device has no second copy of them.
``--log-params-norm`` is the norm of the masters, as in stock: each is joined for it by itself.

A program that writes into weights between steps changes their masters: what it wrote is what the next step
starts from, to within the remainder, half a unit in the last place of bf16. In stock the masters stay as they
were, and the next step undoes such writes unless ``reload_model_params`` was called. So weights that are
quantised or disturbed for one pass, while masters keep the rest, want ``--no-accel-shared-weights``.

Where Megatron's ``offload_to_cpu`` would take an optimizer's parameters along, the states go alone: the
parameters are the model's own. Programs that move ``exp_avg`` and ``exp_avg_sq`` themselves (verl, ms-swift)
leave the remainders on the device, 2 bytes of a parameter: ``optimizer.offload_to_cpu()`` takes them too.
Code that looks for fp32 masters beside the optimizer's states
(``fp32_from_float16_groups``, ``shard_fp32_from_float16_groups``) finds none, as under
``--use-precision-aware-optimizer``: ``--no-accel-shared-weights`` keeps them there.
"""

from __future__ import annotations

import functools

from accel.feature import Context, Feature
from accel.patches._inner_masters import INNER_MASTERS, SHARED, refused, want
from accel.upstream import SUPPORTED_RANGE


def _refuses(context: Context) -> str | None:
    return refused(context.args) if context.args is not None else None


def _idle(context: Context) -> str | None:
    asked = getattr(context.args, "use_precision_aware_optimizer", False)
    return "--use-precision-aware-optimizer does it" if asked else _refuses(context)


FEATURE = Feature(
    name="shared_weights",
    summary="keep a bf16 weight and its fp32 master in 4 bytes instead of 6",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("shared_weights",),
    refuses=_refuses,
    idle=_idle,
    switch_on=functools.partial(want, SHARED, True),
    patches=INNER_MASTERS,
)
