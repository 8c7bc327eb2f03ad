"""A matrix product added to an fp32 matrix on Ascend."""

import pytest
import torch

from accel._npu import gemm_accumulate as kernels
from accel.ops.gemm_accumulate import _accumulate
from tests.npu import conformance
from tests.npu.harness import npu_kernels
from tests.ops import test_gemm_accumulate

__all__ = ["npu_kernels"]


@pytest.mark.usefixtures("npu_kernels")
class TestGemmAccumulate:
    @pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 1), (33, 64, 17), (4, 6, 0), (0, 3, 2)])
    def test_matches_fp64(self, shape):
        out, a, b = test_gemm_accumulate.matrices(*shape)
        exact = out.double() + a.double().t() @ b.double()
        conformance.called.clear()
        _accumulate(out, a, b)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        assert conformance.called == ([] if 0 in shape else ["npu_grouped_matmul_add_"])

    def test_transposes_and_slices(self):
        _, a, b = test_gemm_accumulate.matrices(6, 4, 9)
        buffer = torch.full((8, 9), 7.0)
        out = buffer[1:7, 2:6]
        _accumulate(out, a.t().contiguous().t(), b.t().contiguous().t())
        torch.testing.assert_close(out, 7 + a.float().t() @ b.float(), rtol=1e-5, atol=1e-5)
        outside = torch.ones_like(buffer, dtype=torch.bool)
        outside[1:7, 2:6] = False
        assert (buffer[outside] == 7).all()

    def test_sizes_that_the_op_does_not_take(self, monkeypatch):
        monkeypatch.setattr(kernels, "LARGEST", 3)
        out, a, b = test_gemm_accumulate.matrices(6, 4, 9)
        want = out + a.float().t() @ b.float()
        conformance.called.clear()
        _accumulate(out, a, b)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        assert not conformance.called
