"""RMSNorm's Triton kernels: the contract, and rows longer than registers hold."""

import pytest

from accel._triton import rms_norm as kernels
from tests.ops import test_rms_norm
from tests.ops.norm_contract import DTYPES
from tests.triton.harness import OnTriton

SHAPES = [(4, 64), (3, 5, 127), (1, 33), (37, 1), (129, 24), (1025, 40), (5, 4096)]


class TestRmsNorm(OnTriton, test_rms_norm.TestRmsNorm):
    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes, zero_centered):
        self.check(self.norm_inputs(shape, dtypes, zero_centered=zero_centered))

    @pytest.mark.parametrize("dtypes", DTYPES[:3], ids=str)
    def test_rows_longer_than_a_block(self, dtypes, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_BLOCK", 32)
        monkeypatch.setattr(kernels, "MAX_BLOCK_BACKWARD", 16)
        monkeypatch.setattr(kernels, "LONG_ROWS_BLOCK", 32)
        self.check(self.norm_inputs((7, 75), dtypes))
