"""Sizes of mixtures of experts: what cannot work is refused, with the flag and the values."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from accel.feature import Context
from accel.patches.moe_flags import check, checking

DEEPSEEK = {
    "num_experts": 16,
    "expert_model_parallel_size": 4,
    "moe_router_topk": 6,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_expert_capacity_factor": None,
}


def checked(**changes: Any) -> None:
    args = SimpleNamespace(**{**DEEPSEEK, **changes})
    check(Context("cpu", "0.19.2", args))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": None, "moe_router_topk": 99},
        {"expert_model_parallel_size": 1},
        {"expert_model_parallel_size": 16},
        {"moe_router_topk": 2},
        {"moe_router_topk": 8},
        {"moe_router_topk": 16, "moe_router_group_topk": None},
        {"moe_router_topk": 1, "moe_router_group_topk": None},
        {"moe_router_num_groups": 5},
        {"moe_expert_capacity_factor": 1e-3},
        {"moe_expert_capacity_factor": -1.0},
    ],
)
def test_works(changes: dict[str, Any]) -> None:
    checked(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"expert_model_parallel_size": 3},
            "--expert-model-parallel-size 3 does not divide --num-experts 16: use one of 1, 2, 4, 8, 16",
        ),
        ({"moe_router_topk": 17}, "--moe-router-topk 17 of --num-experts 16: use 1 to 16"),
        ({"moe_router_topk": 0}, "--moe-router-topk 0 of --num-experts 16"),
        ({"moe_router_topk": 9}, "hold 8, and each gives at least one; use 2 to 8"),
        ({"moe_router_topk": 1}, "--moe-router-topk 1: --moe-router-group-topk 2"),
        ({"moe_expert_capacity_factor": 0.0}, "--moe-expert-capacity-factor 0: .* more than 0"),
        ({"moe_expert_capacity_factor": math.nan}, "--moe-expert-capacity-factor nan"),
        ({"moe_expert_capacity_factor": math.inf}, "--moe-expert-capacity-factor inf"),
    ],
)
def test_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checked(**changes)


@pytest.mark.parametrize(
    ("experts", "factor", "fine"), [(8, 0, False), (8, 1.5, True), (8, None, True), (None, 0, True)]
)
def test_a_configuration_need_not_come_from_a_command_line(
    experts: int | None, factor: float | None, fine: bool
) -> None:
    config = SimpleNamespace(num_moe_experts=experts, moe_expert_capacity_factor=factor)
    checked = checking(lambda self: setattr(self, "seen", True))
    if fine:
        checked(config)
        assert config.seen
        return
    with pytest.raises(ValueError, match="moe_expert_capacity_factor=0 drops every token"):
        checked(config)


def test_ranks_of_a_configuration_that_do_not_divide_its_experts() -> None:
    """More choices than experts are taken, as upstream takes them: a layer may be built and never run."""
    config = SimpleNamespace(
        num_moe_experts=16,
        moe_expert_capacity_factor=None,
        moe_router_topk=17,
        expert_model_parallel_size=4,
    )
    checking(lambda self: None)(config)
    config.expert_model_parallel_size = 3
    says = (
        "expert_model_parallel_size=3 does not divide num_moe_experts=16: use one of 1, 2, 4, 8, 16"
    )
    with pytest.raises(ValueError, match=says):
        checking(lambda self: None)(config)


@pytest.mark.parametrize("choices", [1, 7])
def test_groups_of_a_configuration_that_cannot_hold_the_choice(choices: int) -> None:
    """Upstream routes to a third group, or chooses groups by the sum of no scores."""
    config = SimpleNamespace(
        num_moe_experts=12,
        moe_expert_capacity_factor=None,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk=choices,
    )
    says = f"moe_router_topk={choices}: moe_router_group_topk=2 groups of 3 experts hold 6"
    with pytest.raises(ValueError, match=says):
        checking(lambda self: None)(config)
    config.moe_router_topk = 6
    checking(lambda self: None)(config)
