"""LayerNorm's CUDA kernels: the contract, layouts, far-off means, and each kind of rows they tell apart."""

import pytest
import torch

from tests.cuda.harness import HAS_GPU, OnCuda, cuda_kernels, kernels_called
from tests.cuda.test_rms_norm import EXACT, SHAPES, check_exact_rows
from tests.ops import test_layer_norm
from tests.ops.contract import LAYOUTS, change_layout, run
from tests.ops.norm_contract import DTYPES

__all__ = ["cuda_kernels"]

LONG = [6200, 12288, 12296, 33000]
"""Beyond what registers hold: of fp32 backward; no more of 16 bits, but nearly; of these too; both ways."""


class TestLayerNorm(OnCuda, test_layer_norm.TestLayerNorm):
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes):
        self.check(self.norm_inputs(shape, dtypes, zero_centered=shape[0] % 2 == 1))

    @pytest.mark.parametrize("shape", EXACT, ids=str)
    def test_rows_that_fill_their_threads(self, shape):
        check_exact_rows(self, shape)

    @pytest.mark.parametrize("dtypes", DTYPES[:2], ids=str)
    @pytest.mark.parametrize("num_cols", LONG)
    def test_rows_longer_than_registers(self, num_cols, dtypes):
        """Of more rows than programs, so that one sums several."""
        self.check(self.norm_inputs((5, num_cols), dtypes))

    @pytest.mark.parametrize("num_cols", [75, 512, 2200, 66000])
    def test_variance_about_a_mean_far_from_zero(self, num_cols):
        """E[x^2] - E[x]^2 would have no digit left: 1 in 10^8. So no tail beyond a row may count."""
        x, weight, bias = self.norm_inputs((4, num_cols), DTYPES[0]).tensors
        y = self.op(x + 10_000, weight, bias)
        want = self.ref((x + 10_000).double(), weight.double(), bias.double())
        assert torch.allclose(y.double(), want, atol=2e-3)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(6, 3, 64), (5, 43), (0, 8), (3, 0)], ids=str)
    def test_layouts(self, shape, layout):
        for dtypes in DTYPES:
            x, weight, _ = self.norm_inputs(shape, dtypes).tensors
            self.check(self.with_vectors(change_layout(x, layout), weight.dtype, False))

    @pytest.mark.parametrize("num_cols", [64, 4096])
    def test_vectors_that_begin_anywhere(self, num_cols):
        """Each of them alone keeps the row from being read in whole packs."""
        for which in range(3):
            inputs = self.norm_inputs((5, num_cols), DTYPES[1])
            inputs.tensors[which] = change_layout(inputs.tensors[which], "offset")
            self.check(inputs)

    def test_two_ops_for_a_pass(self):
        called = kernels_called(lambda: run(self.op, self.inputs(torch.bfloat16)))
        assert len(called) == 2 + HAS_GPU, "there, the sums over programs are a kernel of their own"
