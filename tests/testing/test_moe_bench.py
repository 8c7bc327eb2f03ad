"""The comparison of `bench moe` with Megatron."""

import math

import torch

from benchmarks._moe_ranks import largest_difference


def test_a_gradient_that_is_no_number_is_the_largest_difference() -> None:
    theirs = [torch.tensor([4.0, 2.0]), torch.tensor([1.0])]
    assert largest_difference([theirs[0] + 1, theirs[1]], theirs) == 0.25
    for wrong in (math.nan, math.inf):
        ours = [theirs[0], torch.tensor([wrong])]
        assert largest_difference(ours, theirs) == largest_difference(ours[::-1], theirs[::-1])
        assert math.isinf(largest_difference(ours, theirs))
