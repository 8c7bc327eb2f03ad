"""The fused residual addition's CUDA kernels: the contract and the bits of the two steps, both on CUDA."""

import contextlib
import itertools

import pytest
import torch

from accel.ops import rms_norm
from tests.cuda.harness import OnCuda, cuda_kernels, on_device, without_bulk_copies
from tests.cuda.test_rms_norm import EXACT
from tests.ops import test_add_rms_norm
from tests.ops.contract import LAYOUTS, change_layout
from tests.ops.norm_contract import DTYPES

__all__ = ["cuda_kernels"]


class TestAddRmsNorm(OnCuda, test_add_rms_norm.TestAddRmsNorm):
    @pytest.fixture(autouse=True)
    def both_on_cuda(self, monkeypatch):
        """The two steps are compared where the fused op runs."""
        for name in ("fused", "two_steps"):
            op = on_device(getattr(test_add_rms_norm, name))
            monkeypatch.setattr(test_add_rms_norm, name, op)

    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("num_cols", [1, 43, 64, 1024, 2048, 2080, 8192, 16384, 16640, 33000])
    def test_bits_of_the_two_steps(self, num_cols, dtypes):
        for num_rows, with_bias in ((21, True), (2, False)):
            inputs = test_add_rms_norm.draw(
                (num_rows if num_cols < 2000 else 4, num_cols),
                dtypes,
                with_bias=with_bias,
                zero_centered=with_bias,
            )
            test_add_rms_norm.assert_same_bits(inputs)

    @pytest.mark.parametrize("device", [contextlib.nullcontext, without_bulk_copies])
    @pytest.mark.parametrize("shape", EXACT, ids=str)
    def test_bits_of_rows_that_fill_their_threads(self, shape, device):
        for dtypes in DTYPES:
            shape_of_dtype = (shape[0], shape[1] * 2 // dtypes[0].itemsize)
            with device():
                test_add_rms_norm.assert_same_bits(test_add_rms_norm.draw(shape_of_dtype, dtypes))

    @pytest.mark.parametrize("shape", [(5, 64), (3, 2, 43), (0, 8), (3, 0)], ids=str)
    def test_bits_for_any_layout(self, shape):
        for ways in itertools.product(LAYOUTS, LAYOUTS[:4]):
            inputs = test_add_rms_norm.draw(shape, DTYPES[1])
            x, residual, *rest = inputs.tensors
            x, residual = (change_layout(t, w) for t, w in zip((x, residual), ways, strict=True))
            test_add_rms_norm.assert_same_bits(inputs._replace(tensors=[x, residual, *rest]))

    @pytest.mark.parametrize("used", [[0], [1]], ids=["norm", "total"])
    def test_one_output_used(self, used):
        test_add_rms_norm.test_one_output_used(used)

    def test_nan_stays_visible(self):
        for dtypes in DTYPES:
            x, residual, weight, bias = test_add_rms_norm.draw((2, 19), dtypes).tensors
            x[1, 7] = torch.nan
            y, total = self.op(x, residual, weight, bias)
            assert torch.equal(y.isnan().any(1), torch.tensor([False, True]))
            assert int(total.isnan().sum()) == 1

    def test_the_kernel_checks_again(self):
        x, weight = torch.ones(2, 8), torch.ones(8)
        for residual, bias in ((torch.ones(2, 7), None), (x, torch.ones(7)), (x.half(), None)):
            with pytest.raises(ValueError, match="add_rms_norm: "):
                on_device(torch.ops.accel.add_rms_norm_fwd)(x, residual, bias, weight, 1e-5, False)

    def test_norm_alone_is_the_same(self):
        """Guards `test_bits_of_the_two_steps`: what it compares with is this norm."""
        x, _, weight, _ = test_add_rms_norm.draw((6, 43), DTYPES[1]).tensors
        y, total = self.op(x, torch.zeros_like(x), weight, None)
        assert torch.equal(total, x)
        assert torch.equal(y, on_device(rms_norm)(x, weight))
