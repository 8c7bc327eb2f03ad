"""LayerNorm's Triton kernels: the contract, rows longer than registers hold, far-off means, layouts."""

import pytest
import torch

from accel._triton import layer_norm as kernels
from tests.ops import test_layer_norm
from tests.ops.contract import LAYOUTS, change_layout
from tests.ops.norm_contract import DTYPES
from tests.triton.harness import OnTriton

SHAPES = [(4, 64), (3, 5, 127), (1, 33), (37, 1), (129, 24), (1025, 40), (5, 4096)]


class TestLayerNorm(OnTriton, test_layer_norm.TestLayerNorm):
    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes, zero_centered):
        self.check(self.norm_inputs(shape, dtypes, zero_centered=zero_centered))

    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES[:3], ids=str)
    def test_rows_longer_than_a_block(self, dtypes, zero_centered, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_BLOCK", 32)
        monkeypatch.setattr(kernels, "MAX_BLOCK_BACKWARD", 16)
        monkeypatch.setattr(kernels, "LONG_ROWS_BLOCK", 32)
        self.check(self.norm_inputs((7, 75), dtypes, zero_centered=zero_centered))

    @pytest.mark.parametrize("max_block", [16384, 32])
    def test_variance_about_a_mean_far_from_zero(self, max_block, monkeypatch):
        """E[x^2] - E[x]^2 would have no digit left: 1 in 10^8. So no tail beyond a row may count."""
        monkeypatch.setattr(kernels, "MAX_BLOCK", max_block)
        x, weight, bias = self.norm_inputs((4, 75), DTYPES[0]).tensors
        y = self.op(x + 10_000, weight, bias)
        want = self.ref((x + 10_000).double(), weight.double(), bias.double())
        assert torch.allclose(y.double(), want, atol=2e-3)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout):
        for shape in ((5, 17, 31), (3, 64)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            self.check(self.with_vectors(change_layout(x, layout), torch.float32, False))

    @pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8), (0, 0)], ids=str)
    def test_empty(self, shape):
        self.check(self.norm_inputs(shape, DTYPES[1]))
