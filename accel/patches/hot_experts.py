"""Experts with many tokens are copied to ranks that have tokens for them.

A layer waits for the rank whose experts got most tokens. ``--accel-hot-experts N`` (3) copies up to N experts
of a layer, for one micro-batch, to ranks that then compute their own tokens for them: chosen from this
micro-batch's counts of all ranks, so that the longest rank gets shorter by more than the copies cost. Their
matrices travel beside the other experts' products, their gradients go back to the owner beside the weights'
gradients and are added there. The routing stays, and with it the loss and the gradients: sums differ in
their order alone.

``--accel-hot-experts-price ROWS`` says how many rows' work a copy must save; without it that is measured
where the first layer runs, and the plan, and with it the last digits, may differ from run to run. 0:
whatever shortens the longest rank.

``--accel-hot-experts-every K`` plans ahead instead, once in K micro-batches from a moving average of the
counts before, so that the matrices travel beside the attention before the layer: for links that take longer
for a copy than the experts' products hide, and loads that change slowly. A rank may then get an expert for
which it has no tokens.

A rank that got copies holds their matrices from the forward to the backward of the layer; where only they do
not fit beside the rows, that micro-batch goes without. Where ``moe_overlap`` leaves a layer to stock, its
experts are not copied. **Not with** capacities that pad
(``--moe-pad-expert-input-to-capacity``), where all experts have as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature, Setting
from accel.parallel.experts import expert_overlap as overlap
from accel.parallel.experts import load
from accel.patches import _experts
from accel.patches._settings import not_negative, one_expert_rank, whole_number
from accel.patches.moe_overlap import served
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


def parse_number(given: Any) -> int:
    return whole_number(given, "experts to be copied")


def parse_price(given: Any) -> float:
    return not_negative(given, "number of rows")


def parse_every(given: Any) -> int:
    return whole_number(given, "micro-batches")


@around
def lending_before(
    original: Callable[..., Any], self: Any, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``TransformerLayer._forward_attention``: copies that are planned ahead set out before it."""
    lend(self.mlp, hidden_states)
    return original(self, hidden_states, *args, **kwargs)


def lend(mlp: Any, hidden_states: Any) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    hot = overlap.current().hot
    if not isinstance(mlp, MoELayer) or hot is None or hot.every is None:
        return
    mlp.accel_loan = None
    if mlp.training and served(mlp):
        mlp.accel_ahead = ahead = getattr(mlp, "accel_ahead", None) or overlap.Ahead()
        experts = _experts.experts_of(mlp.experts, hidden_states)
        mlp.accel_loan = hot.lend(ahead, mlp.token_dispatcher.ep_group, experts)
        note = vars(mlp).pop("accel_note_copies", None)
        if note is not None:
            note(ahead.copies)


@around
def noting_counts(original: Callable[..., Any], self: Any, hidden_states: Any, probs: Any) -> Any:
    """Wraps ``routed_experts_compute``: the next plans are of these counts too."""
    ahead = getattr(self, "accel_ahead", None)
    if ahead is not None and self.training and not load.computing_again() and served(self):
        ahead.note(self.token_dispatcher.accel_counts)
    return original(self, hidden_states, probs)


def refused(context: Context) -> str | None:
    if getattr(context.args, "moe_pad_expert_input_to_capacity", False):
        return "--moe-pad-expert-input-to-capacity gives every expert as many tokens"
    return None


def switch_on(value: int, price: float | None, every: int | None) -> Callable[[], None]:
    return overlap.copy_hot_experts(value, price, every)


FEATURE = Feature(
    name="hot_experts",
    summary="copy experts with many tokens to the ranks whose tokens they are",
    preset=None,
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("moe",),
    requires=("moe_overlap",),
    refuses=refused,
    idle=one_expert_rank,
    settings=(
        Setting(
            name="",
            metavar="N",
            summary="how many experts of a layer may be copied",
            parse=parse_number,
            default=3,
        ),
        Setting(
            name="price",
            metavar="ROWS",
            summary="rows of work that a copy must save; measured by default",
            parse=parse_price,
        ),
        Setting(
            name="every",
            metavar="K",
            summary="plan ahead, once in K micro-batches; by default for each from its own tokens",
            parse=parse_every,
        ),
    ),
    switch_on=switch_on,
    patches=(
        Patch(
            target="megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention",
            replacement="accel.patches.hot_experts:lending_before",
            how="wrap",
            why="Copies that are planned ahead travel beside the attention.",
        ),
        Patch(
            target="megatron.core.transformer.moe.moe_layer:MoELayer.routed_experts_compute",
            replacement="accel.patches.hot_experts:noting_counts",
            how="wrap",
            why="Plans that are made ahead are of the counts of the micro-batches before.",
        ),
    ),
)
