"""Slots of experts that change ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.parallel.experts.migration import new_order
from accel.parallel.experts.plan import plan_migration


@given(st.integers(1, 6), st.integers(1, 5), st.randoms(use_true_random=False))
def test_order(ranks: int, each: int, draw: random.Random) -> None:
    placed = [rank for rank in range(ranks) for _ in range(each)]
    draw.shuffle(placed)
    order = new_order(placed, ranks)
    assert sorted(order) == list(range(ranks * each))
    for slot, expert in enumerate(order):
        assert placed[expert] == slot // each, "it comes to its rank"
        assert expert // each != slot // each or expert == slot, "one that stays keeps its slot"


def test_order_of_a_plan() -> None:
    rows = [9, 8, 1, 2]
    placed = plan_migration(rows, [0, 0, 1, 1], 2, 0.0)
    assert placed is not None
    order = new_order(placed, 2)
    even = [rows[e] for e in order]
    assert sum(even[:2]) == sum(even[2:])


@pytest.mark.parametrize(("placed", "ranks"), [([0, 0, 1], 2), ([0, 0, 0, 1], 2), ([0, 2], 2)])
def test_refuses_uneven_ranks(placed: list[int], ranks: int) -> None:
    with pytest.raises(ValueError, match="each of 2 needs as many"):
        new_order(placed, ranks)
