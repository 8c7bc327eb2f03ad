"""Grouped products on Ascend."""

import pytest
import torch

from accel._npu import grouped_gemm as npu_grouped_gemm
from accel.ops.grouped_gemm import accumulate_wgrad
from tests.npu import conformance
from tests.npu.harness import OnNpu, npu_kernels
from tests.ops import test_grouped_gemm
from tests.ops.contract import LAYOUTS, Inputs, change_layout

__all__ = ["npu_kernels"]


class TestGroupedGemm(OnNpu, test_grouped_gemm.TestGroupedGemm):
    uses = ("npu_grouped_matmul",)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("transpose_b", [False, True])
    def test_any_layout_and_a_list(self, transpose_b, layout):
        for dtype in self.dtypes:
            inputs = test_grouped_gemm.product_inputs(
                [3, 0, 4, 1], 16, 24, dtype, transpose_b=transpose_b
            )
            x, weight, counts = inputs.tensors
            tensors = [change_layout(x, layout), change_layout(weight, layout), counts]
            self.check(Inputs(tensors, inputs.options))

            def by_list(x, weight, counts, **options):
                return test_grouped_gemm.grouped_gemm(x, list(weight.unbind(0)), counts, **options)

            got, want = (op(*inputs.tensors, **inputs.options) for op in (by_list, self.op))
            assert torch.equal(got, want)

    def test_a_list_of_matrices_that_lie_in_two_ways(self):
        inputs = test_grouped_gemm.product_inputs([3, 2], 16, 24, torch.bfloat16, transpose_b=False)
        x, weight, counts = inputs.tensors
        mixed = [weight[0], weight[1].t().contiguous().t()]
        got = test_grouped_gemm.grouped_gemm(x, mixed, counts)
        assert torch.equal(got, self.op(x, weight, counts))

    @pytest.mark.parametrize("counts", [[0, 0], [0], [2] * 130], ids=["none", "one", "many"])
    def test_number_of_groups(self, counts):
        inputs = test_grouped_gemm.product_inputs(counts, 4, 3, torch.float32, transpose_b=True)
        self.check(inputs)
        x, weight, counts = inputs.tensors
        by_list = test_grouped_gemm.grouped_gemm(x, list(weight), counts, transpose_b=True)
        # not to the bit: torch.mm rounds by the layout of its operands where the CPU is Intel's
        torch.testing.assert_close(by_list, self.op(*inputs.tensors, **inputs.options))

    @pytest.mark.parametrize("dtype", test_grouped_gemm.DTYPES, ids=str)
    @pytest.mark.parametrize("transpose_b", [False, True])
    def test_main_gradients(self, transpose_b, dtype):
        """One tensor goes to the op that adds, unless it is a product of fp32; a list is a loop."""
        shape = {"transpose_b": transpose_b}
        inputs = test_grouped_gemm.product_inputs([30, 0, 50], 16, 24, dtype, **shape)
        x, weight, counts = inputs.tensors
        dy = torch.randn(80, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
        start = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        product = torch.ops.accel.grouped_gemm_wgrad(dy.double(), x.double(), counts, transpose_b)
        whole, parts = start.clone(), list(start.clone())
        conformance.called.clear()
        accumulate_wgrad(dy, x, counts, whole, **shape)
        fused = [] if dtype == torch.float32 else ["npu_grouped_matmul_add_"]
        assert conformance.called == fused
        accumulate_wgrad(dy, x, counts, parts, **shape)
        for got in (whole, torch.stack(parts)):
            assert torch.equal(got[1], start[1])
            torch.testing.assert_close(got.double(), start + product, rtol=1e-5, atol=1e-5 * 80)

    def test_a_single_row_of_a_wider_matrix_is_handed_as_a_transposed_one(self):
        left = torch.randn(1, 12)[:, :8]
        assert left.is_contiguous()
        assert npu_grouped_gemm._columns(left).stride() == (1, 8)
        assert npu_grouped_gemm._columns(torch.randn(3, 8)).stride() == (1, 8)

    def test_fp64_is_plain_pytorch(self):
        inputs = self.inputs(torch.float32).to_fp64()
        got, want = (op(*inputs.tensors, **inputs.options) for op in (self.op, self.ref))
        assert torch.equal(got, want)

    @pytest.mark.parametrize(
        ("counts", "ends"),
        [
            ([3, 0, 6], [3, 3, 4]),
            ([3, 2**40, 2**62], [3, 4, 4]),
            ([-1, 3, -5], [0, 3, 3]),
            ([2**62] * 3, [4, 4, 4]),
            ([1, 0, 1], [1, 1, 2]),
            ([0, 0, 0], [0, 0, 0]),
        ],
    )
    def test_counts_that_lie_stay_within_the_rows(self, counts, ends, monkeypatch):
        """On a device nobody looks at them. Rows that are no expert's are undefined, and in no gradient."""
        monkeypatch.setattr(npu_grouped_gemm, "_known", lambda counts: False)
        counts, groups = torch.tensor(counts), list(zip([0, *ends[:-1]], ends, strict=True))
        x, dy = (torch.randn(4, n, generator=torch.Generator().manual_seed(n)) for n in (16, 8))
        x[ends[-1] :], dy[ends[-1] :] = torch.nan, torch.nan
        x, dy, weight = x.bfloat16(), dy.bfloat16(), torch.randn(3, 16, 8).bfloat16()
        conformance.called.clear()
        y = torch.ops.accel.grouped_gemm(x, [weight], counts, False)
        dw = torch.ops.accel.grouped_gemm_wgrad(dy, x, counts, False)
        main_grads = torch.ones(3, 16, 8)
        torch.ops.accel.grouped_gemm_add_wgrad_(dy, x, counts, [main_grads], False)
        by_rows, by_k = "npu_grouped_matmul", "npu_grouped_matmul_add_"
        assert conformance.called == [by_rows, by_rows, by_k]
        for e, (a, b) in enumerate(groups):
            torch.testing.assert_close(y[a:b], x[a:b] @ weight[e])
            torch.testing.assert_close(dw[e], x[a:b].T @ dy[a:b])
            torch.testing.assert_close(main_grads[e], 1 + x[a:b].float().T @ dy[a:b].float())
        # the same counts with fewer rows
        fewer = torch.ops.accel.grouped_gemm(x[:1], [weight], counts, False)
        assert fewer.shape == (1, 8)
