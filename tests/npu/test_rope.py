"""Rotary embedding on Ascend: every layout, packs, and sizes that torch-npu's op does not take."""

import pytest
import torch
from hypothesis import given, settings

from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_rope
from tests.ops.contract import Inputs

__all__ = ["npu_kernels"]


def batched(layout: str) -> Inputs:
    """Every sequence of the batch has angles of its own."""
    q = test_rope.draw(5, 2, 6, 16)
    freqs = test_rope.angles(5, 16, layout, batch=2)
    return Inputs([q, freqs, q[:, :, :3]], {"layout": layout}, [1])


class TestRope(OnNpu, test_rope.TestRope):
    uses = ("npu_rotary_mul", "npu_rotary_mul_backward")

    @settings(deadline=None, max_examples=15)
    @given(inputs=test_rope.calls())
    def test_any_layout(self, inputs):
        self.check(inputs)

    @settings(deadline=None, max_examples=30)
    @given(inputs=test_rope.packed_calls())
    def test_packed(self, inputs):
        self.check(inputs)

    @pytest.mark.parametrize("layout", test_rope.LAYOUTS)
    def test_angles_of_each_sequence(self, layout):
        inputs = batched(layout)
        self.check(inputs)
        assert bool(calls_of(self.op, inputs)) == (layout != "interleaved")

    @pytest.mark.parametrize("layout", test_rope.LAYOUTS)
    def test_wider_than_the_op_takes(self, layout):
        inputs = Inputs(
            [test_rope.draw(3, 1, 2, 900), test_rope.angles(3, 900, layout), None],
            {"layout": layout},
            [1],
        )
        self.check(inputs)
        assert not calls_of(self.op, inputs)

    def test_more_positions_than_angles(self):
        tables = torch.ones(3, 1, 4), torch.ones(3, 1, 4)
        with pytest.raises(ValueError, match="4 positions need more than 3 rows"):
            torch.ops.accel.rope(
                [torch.ones(4, 1, 1, 8)], *tables, None, 1, 0, 8, False, False, False
            )
