"""The Triton kernels of the residual addition with RMSNorm: the contract, and the bits of two steps."""

import pytest
import torch

from accel._triton import rms_norm as kernels
from tests.ops import test_add_rms_norm
from tests.ops.contract import LAYOUTS, Inputs, change_layout, run
from tests.ops.norm_contract import DTYPES
from tests.ops.test_add_rms_norm import draw, two_steps
from tests.triton.harness import OnTriton, kernels_launched, on_device

SHAPES = [(4, 64), (3, 5, 127), (1, 33), (37, 1), (129, 24), (3, 4096), (0, 8), (3, 0)]


class TestAddRmsNorm(OnTriton, test_add_rms_norm.TestAddRmsNorm):
    two_steps = staticmethod(on_device(two_steps))

    def check(self, inputs: Inputs) -> None:
        super(test_add_rms_norm.TestAddRmsNorm, self).check(inputs)
        self.assert_same_bits(inputs)

    def assert_same_bits(self, inputs: Inputs) -> None:
        got, want = run(self.op, inputs), run(self.two_steps, inputs)
        for a, b in zip((*got[0], *got[1].values()), (*want[0], *want[1].values()), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_bits_of_the_two_steps(self, shape, dtypes, with_bias):
        inputs = draw(shape, dtypes, with_bias=with_bias, zero_centered=len(shape) == 3)
        self.assert_same_bits(inputs)

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES[:3], ids=str)
    def test_rows_longer_than_a_block(self, dtypes, with_bias, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_BLOCK", 32)
        monkeypatch.setattr(kernels, "MAX_BLOCK_BACKWARD", 16)
        monkeypatch.setattr(kernels, "LONG_ROWS_BLOCK", 32)
        self.check(draw((7, 75), dtypes, with_bias=with_bias))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout):
        x, residual, *rest = draw((5, 17, 31), DTYPES[1]).tensors
        self.assert_same_bits(Inputs([change_layout(x, layout), residual, *rest]))
        self.assert_same_bits(Inputs([x, change_layout(residual, layout), *rest]))

    @pytest.mark.parametrize("used", [0, 1], ids=["norm", "total"])
    def test_one_output_used(self, used):
        inputs = draw((5, 24), DTYPES[1])
        wanted = [0, 1, 3] if used == 1 else [0, 1, 2, 3]
        _, got = run(lambda *a, **o: self.op(*a, **o)[used], inputs, wanted)
        _, want = run(lambda *a, **o: self.two_steps(*a, **o)[used], inputs, wanted)
        for p in wanted:
            assert torch.equal(got[p], want[p])

    def test_nan_and_inf_stay_visible(self):
        for dtypes in DTYPES:
            for bad in (torch.nan, torch.inf):
                inputs = draw((2, 19), dtypes)
                inputs.tensors[0][1, 7] = bad
                for a, b in zip(self.op(*inputs.tensors), self.ref(*inputs.tensors), strict=True):
                    assert torch.equal(a.isnan(), b.isnan())

    def test_one_launch_forward_and_two_backward(self):
        inputs = draw((6, 64), DTYPES[1])
        launched = kernels_launched(lambda: run(self.op, inputs))
        assert launched == ["_forward", "_backward_rows", "_sum_partials"]
