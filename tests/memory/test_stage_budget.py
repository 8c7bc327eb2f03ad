"""The plan of a stage: its two peaks, what is in flight, and what its ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from accel.memory.layer_costs import KEEP, OTHER, WHOLE, Costs
from accel.memory.planner import CannotMeet
from accel.memory.stage_budget import Figures, Stage, largest_of_stage

BASE = 1000
"""Bytes that are no layer's."""
LAYER = Costs(100, 1.0, {"norms": (30, 0.125)}, moved={OTHER: 50})


def stage_of(figures: Figures, hides: Sequence[bool] = (True, False)) -> Stage:
    return Stage(figures, [str(at) for at, _ in enumerate(figures.layers)], hides)


def figures(loss: int = 0, seconds_of_a_byte: float = math.inf) -> Figures:
    """Of two layers with two micro-batches in flight; `loss`: bytes that are there before any layer is."""
    return Figures(BASE + LAYER.num_bytes, BASE + loss, seconds_of_a_byte, [(2, LAYER)] * 2)


def names(stage: Stage, budget: int) -> list[str]:
    plan = stage.choose(budget)
    assert stage.peak(plan) <= budget
    return [choice.name for choice in plan.choices]


def test_peaks_if_all_is_kept() -> None:
    stage = stage_of(figures(loss=7))
    assert (stage.forward, stage.backward, stage.in_flight) == (BASE + 7 + 400, BASE + 400, 2)


def test_the_cheapest_that_meets_the_budget() -> None:
    stage = stage_of(figures())
    assert names(stage, BASE + 400) == [KEEP, KEEP]
    assert names(stage, BASE + 370) == [KEEP, "recompute norms"]  # 60 less, 30 of them workspace
    assert names(stage, BASE + 310) == ["recompute norms", "recompute norms"]
    assert names(stage, BASE + 100) == [WHOLE, WHOLE]
    with pytest.raises(CannotMeet) as error:
        stage.choose(BASE + 99)
    assert error.value.short == 1


def test_where_the_loss_is_the_peak_no_workspace_counts() -> None:
    stage = stage_of(figures(loss=200))
    assert names(stage, BASE + 200 + 340) == [KEEP, "recompute norms"]
    plan = stage.choose(BASE + 200)
    assert [choice.name for choice in plan.choices] == [WHOLE, WHOLE]
    assert plan.workspace == LAYER.num_bytes
    assert stage.peak(plan) == BASE + 200


def test_a_swap_where_copies_hide() -> None:
    stage = stage_of(figures(seconds_of_a_byte=1e-3))
    assert names(stage, BASE + 350) == ["swap", KEEP]
    assert names(stage_of(figures()), BASE + 350) == ["recompute norms", "recompute norms"]


def test_layers_that_keep_nothing_are_not_in_flight() -> None:
    stage = stage_of(Figures(BASE, BASE, math.inf, [(64, Costs()), (2, LAYER)]))
    assert stage.in_flight == 2
    assert stage_of(Figures(BASE, BASE, math.inf, []), []).backward == BASE


def test_one_rank_agrees_with_itself() -> None:
    """Its parts are those that are asked for, in their order."""
    found = largest_of_stage(figures(3, 0.5), ("activation", "norms"), 0, torch.device("cpu"))
    assert (found.peak, found.forward_peak) == (BASE + LAYER.num_bytes, BASE + 3)
    assert found.seconds_of_a_byte == 0.5
    for count, costs in found.layers:
        assert count == 2
        assert list(costs.parts.items()) == [("activation", (0, 0.0)), ("norms", (30, 0.125))]
