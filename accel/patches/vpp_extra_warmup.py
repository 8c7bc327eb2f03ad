"""More forward passes before the first backward pass of an interleaved pipeline.

``--accel-vpp-extra-warmup K`` lets each rank of an interleaved schedule begin with K forward passes more than
Megatron's 2 (P - r - 1) + (V - 1) G, as far as there are any. The forward and the backward that follow each
other then are of two micro-batches on every rank, so that what one sends (and the all-to-alls of its experts)
can go on behind the other.

The passes are run by accel's executor, which sends early and waits late also in warm-up and cool-down, where
Megatron's blocks; losses and gradients are Megatron's, bit for bit. K more chunks of activations are held: in
the third and fourth step passes and transfers are timed, and two lines say what is gained by these times and
what it costs in memory, or that no gain is to be expected. Transfers between ranks alone need no longer
warm-up: ``--accel-schedule interleaved`` hides them as well in Megatron's order.

It works with as many micro-batches as ranks, in evaluation, with ``--pipeline-model-parallel-layout``,
``--microbatch-group-size-per-virtual-pipeline-stage``, tied embeddings, multi-token prediction, variable
sequence lengths and everything that works inside a layer. **Not with** CUDA graphs,
``--overlap-moe-expert-parallel-comm`` (which has one more forward pass already), distillation and several
models in one pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature, Setting
from accel.parallel.schedule.names import INTERLEAVED
from accel.patches._pipeline import DRIVER, WANTED, refused
from accel.patches._settings import whole_number
from accel.upstream import SUPPORTED_RANGE


def parse_count(given: Any) -> int:
    return whole_number(given, "forward passes")


def _refuses(context: Context) -> str | None:
    args = context.args
    name = getattr(args, "accel_schedule", None) or INTERLEAVED
    if name != INTERLEAVED:
        return f"--accel-schedule {name} has its own warm-up: give one of the two"
    if args is not None and not getattr(args, "virtual_pipeline_model_parallel_size", None):
        return (
            "the pipeline is not interleaved: add --num-virtual-stages-per-pipeline-rank 2 (or more) and "
            "--pipeline-model-parallel-size 2 (or more)"
        )
    return refused(INTERLEAVED, args)


def switch_on(value: int) -> Callable[[], None]:
    return WANTED.want(extra_warmup=value)


FEATURE = Feature(
    name="vpp_extra_warmup",
    summary="more forward passes before the first backward pass of an interleaved pipeline",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    benchmarks=("pipeline",),
    refuses=_refuses,
    settings=(
        Setting(
            name="",
            metavar="K",
            summary="how many more than Megatron's",
            parse=parse_count,
        ),
    ),
    switch_on=switch_on,
    patches=(DRIVER,),
)
