"""Sizes of mixtures of experts that cannot work, refused where the arguments are checked.

Stock meets them late or not at all: ``--moe-expert-capacity-factor 0`` drops every token and trains on,
``--moe-router-topk`` above the experts fails in the first layer of the first step, groups with fewer experts
than a token chooses have it routed to experts of other groups, and experts that the ranks do not divide are
an assertion without a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


def check(context: Context) -> None:
    """Raises ValueError: it names the flags, their values and what works."""
    args = context.args
    if getattr(args, "num_experts", None):
        _check_ranks(args)
        _check_choices(args)
        _check_capacity(args)


def _check_ranks(args: Any) -> None:
    names = "--expert-model-parallel-size {} does not divide --num-experts {}"
    _check_divides(args, args.num_experts, names)


def _check_divides(given: Any, experts: int, names: str) -> None:
    """Of arguments or a configuration, as the following; `names` has places for two values."""
    ranks = getattr(given, "expert_model_parallel_size", None) or 1
    if experts % ranks:
        divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ValueError(f"{names.format(ranks, experts)}: use one of {divisors}")


def _check_choices(args: Any) -> None:
    experts, choices = args.num_experts, args.moe_router_topk
    if not 1 <= choices <= experts:
        raise ValueError(
            f"--moe-router-topk {choices} of --num-experts {experts}: use 1 to {experts}"
        )
    _check_groups(args, experts, "--moe-router-topk {}: --moe-router-group-topk {}")


def _check_groups(given: Any, experts: int, names: str) -> None:
    groups = getattr(given, "moe_router_num_groups", None)
    chosen = getattr(given, "moe_router_group_topk", None)
    if not groups or not chosen or experts % groups:
        return  # upstream names what it misses
    most = chosen * (experts // groups)
    if not chosen <= given.moe_router_topk <= most:
        raise ValueError(
            f"{names.format(given.moe_router_topk, chosen)} groups of {experts // groups} experts hold "
            f"{most}, and each gives at least one; use {chosen} to {most}"
        )


def _check_capacity(args: Any) -> None:
    factor = getattr(args, "moe_expert_capacity_factor", None)
    if factor is not None and (factor == 0 or not math.isfinite(factor)):
        raise ValueError(
            f"--moe-expert-capacity-factor {factor:g}: an expert takes that many times its share of the "
            "tokens; use more than 0, or leave it out to drop none"
        )


@around
def checking(post_init: Callable[[Any], None], self: Any) -> None:
    """Wraps ``TransformerConfig.__post_init__``, of programs without a command line, and of yaml."""
    factor = self.moe_expert_capacity_factor
    if self.num_moe_experts and factor == 0:
        raise ValueError(
            f"moe_expert_capacity_factor={factor} drops every token: use more than 0, or None for none"
        )
    if experts := self.num_moe_experts:
        names = "expert_model_parallel_size={} does not divide num_moe_experts={}"
        _check_divides(self, experts, names)
        _check_groups(self, experts, "moe_router_topk={}: moe_router_group_topk={}")
    post_init(self)


FEATURE = Feature(
    name="moe_flags",
    summary="refuse sizes of mixtures of experts that cannot work",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    check=check,
    patches=(
        Patch(
            target="megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            replacement="accel.patches.moe_flags:checking",
            how="wrap",
            why="A configuration need not come from a command line.",
        ),
    ),
)
