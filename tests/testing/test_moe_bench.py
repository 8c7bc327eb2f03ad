"""What `bench moe` compares: with Megatron, and its planner with others'."""

import math

import torch

from benchmarks._moe_ranks import largest_difference
from benchmarks.moe import EPLB, MOVED, WITHOUT, planned_rows


def test_a_gradient_that_is_no_number_is_the_largest_difference() -> None:
    theirs = [torch.tensor([4.0, 2.0]), torch.tensor([1.0])]
    assert largest_difference([theirs[0] + 1, theirs[1]], theirs) == 0.25
    for wrong in (math.nan, math.inf):
        ours = [theirs[0], torch.tensor([wrong])]
        assert largest_difference(ours, theirs) == largest_difference(ours[::-1], theirs[::-1])
        assert math.isinf(largest_difference(ours, theirs))


def test_planners_are_held_against_the_same_loads() -> None:
    """One expert has more than a rank's share, so moving cannot even them out; copies
    and replicas can."""
    for row in planned_rows(quick=True):
        peers = row["peers"]
        assert 1 <= row["ours"] < peers[MOVED] < peers[WITHOUT]
        assert 1 <= peers[EPLB] < peers[MOVED]
