"""Experts with many tokens are copied to ranks that have tokens for them.

A layer waits for the rank whose experts got most tokens. ``--accel-hot-experts N`` (3) copies up to N experts
of a layer, for one micro-batch, to ranks that then compute their own tokens for them: chosen from this
micro-batch's counts of all ranks, so that the longest rank gets shorter by more than the copies cost. Their
matrices travel beside the other experts' products, their gradients go back to the owner beside the weights'
gradients and are added there. The routing stays, and with it the loss and the gradients: sums differ in
their order alone.

``--accel-hot-experts-price ROWS`` says how many rows' work a copy must save; without it that is measured
where the first layer runs, and the plan, and with it the last digits, may differ from run to run. 0:
whatever shortens the longest rank. ``--accel-hot-experts-number`` is N by itself, as MindSpeed gives it
(``--balanced-moe-experts --balanced-moe-hot-expert-num N``).

A rank that got copies holds their matrices from the forward to the backward of the layer. Where
``moe_overlap`` leaves a layer to stock, its experts are not copied. **Not with** capacities that pad
(``--moe-pad-expert-input-to-capacity``), where all experts have as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature, Setting
from accel.parallel.experts import overlap
from accel.patches._settings import whole_number
from accel.upstream import SUPPORTED_RANGE


def parse_number(given: Any) -> int:
    return whole_number(given, "experts to be copied")


def parse_price(given: Any) -> float:
    try:
        price = float(str(given))
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise ValueError(f"{given!r} is no number of rows: give 0 or more")
    return price


def refused(context: Context) -> str | None:
    if getattr(context.args, "moe_pad_expert_input_to_capacity", False):
        return "--moe-pad-expert-input-to-capacity gives every expert as many tokens"
    return None


def idle(context: Context) -> str | None:
    ranks = getattr(context.args, "expert_model_parallel_size", None)
    return "there is one expert-parallel rank" if ranks == 1 else None


def switch_on(value: int, number: int | None, price: float | None) -> Callable[[], None]:
    return overlap.copy_hot_experts(value if number is None else number, price)


FEATURE = Feature(
    name="hot_experts",
    summary="copy experts with many tokens to the ranks whose tokens they are",
    preset=None,
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("moe",),
    requires=("moe_overlap",),
    refuses=refused,
    idle=idle,
    settings=(
        Setting(
            name="",
            metavar="N",
            summary="how many experts of a layer may be copied",
            parse=parse_number,
            default=3,
        ),
        Setting(
            name="number",
            metavar="N",
            summary="the same, beside a flag without a number",
            parse=parse_number,
        ),
        Setting(
            name="price",
            metavar="ROWS",
            summary="rows of work that a copy must save; measured by default",
            parse=parse_price,
        ),
    ),
    switch_on=switch_on,
)
