"""Cross entropy's CUDA kernels: the contract, ends of rows, several blocks and parts, and what cannot be."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel.ops import cross_entropy_ref
from tests.cuda.harness import (
    DEVICE,
    HAS_GPU,
    OnCuda,
    cuda_kernels,
    kernels_called,
    needs_kernels,
    same_bits,
)
from tests.ops import test_cross_entropy
from tests.ops.contract import LAYOUTS, Inputs, change_layout, run
from tests.ops.cross_entropy_edges import Edges

__all__ = ["cuda_kernels"]

FLOATS = test_cross_entropy.FLOATS
targets = test_cross_entropy.targets


class TestCrossEntropy(OnCuda, test_cross_entropy.TestCrossEntropy):
    large_inputs = None

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        x = self.logits((2, 3, 43), dtype, seed)
        return Inputs([x, targets(x, seed)], {"label_smoothing": 0.1 * (seed % 2)})

    def opchecks(self):
        x = self.logits((2, 2, 24), torch.bfloat16).to(DEVICE)
        target = targets(x).to(DEVICE)
        dloss = torch.randn(2, 2, device=DEVICE)
        ops = torch.ops.accel
        for smoothing in (0.0, 0.1):
            call = (x, target, 0, 24, -100, smoothing > 0)
            yield ops.cross_entropy_stats.default, call
            backward = (x, target, ops.cross_entropy_stats.default(*call), dloss, 0, 24, smoothing)
            yield ops.cross_entropy_bwd.default, backward
            yield ops.cross_entropy_bwd_.default, backward

    @pytest.mark.parametrize("num_rows", [2, 30])
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_long_rows(self, dtype, smoothing, num_rows):
        """In parts where they are few, with the maximum in the first, in the last and between, and not."""
        num_cols = 2 * 4 * 256 * 16 // dtype.itemsize + 75
        x = self.logits((num_rows, num_cols), dtype) * 4
        for row, col in enumerate([num_cols // 2, 0, num_cols - 1, 1024, 9][:num_rows]):
            x[row, col] = 90.0
        inputs = Inputs([x, targets(x)], {"label_smoothing": smoothing})
        self.check(inputs)
        same_bits(self.op, self.op, inputs)

    @settings(deadline=None, max_examples=15)
    @given(
        shape=st.sampled_from([(0, 7), (1, 1), (2, 3), (5, 2, 7), (3, 64), (2, 1, 0, 8)]),
        layout=st.sampled_from(LAYOUTS),
        dtype=st.sampled_from(FLOATS),
        smoothing=st.sampled_from([0.0, 0.3]),
    )
    def test_matches_reference_for_any_layout(self, shape, layout, dtype, smoothing):
        assume(shape[-1] >= (2 if smoothing else 1))
        x = change_layout(self.logits(shape, dtype), layout)
        target = change_layout(targets(x), layout)
        self.check(Inputs([x, target], {"label_smoothing": smoothing}))

    @pytest.mark.parametrize("num_cols", [*range(1, 20), 263, 264, 265, 1089])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_rows_begin_and_end_anywhere(self, num_cols, dtype):
        """Every distance from a multiple of 16 bytes at either end; the target is each token once."""
        x = self.logits((num_cols if num_cols < 20 else 9, num_cols), dtype)
        target = torch.arange(len(x)) * (num_cols // len(x))
        self.check(Inputs([x, target], {"label_smoothing": 0.1 if num_cols > 1 else 0.0}))
        self.check(Inputs([change_layout(x, "offset"), target]))

    def test_gradients_that_are_not_contiguous(self):
        """Of a sum, one number expanded; of a transpose, strided."""
        x = self.logits((4, 3, 24), torch.float32).requires_grad_()
        target = targets(x)
        for reduce in (torch.Tensor.sum, lambda loss: (loss.t() * torch.arange(4.0)).sum()):
            loss, want = self.op(x, target), cross_entropy_ref(x, target)
            got = torch.autograd.grad(reduce(loss), x)[0]
            torch.testing.assert_close(got, torch.autograd.grad(reduce(want), x)[0])

    def test_two_launches_for_a_pass(self):
        assert len(kernels_called(lambda: run(self.op, self.inputs(torch.bfloat16)))) == 2


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestEdges(Edges):
    def split_rows(self, parts, monkeypatch):
        return 8 if parts else 1

    @pytest.mark.skipif(HAS_GPU, reason="a device-side assertion ends the process's use of the GPU")
    @pytest.mark.parametrize("token", [9, -1, 1 << 40])
    def test_targets_outside_the_vocabulary(self, token):
        x, good = torch.randn(3, 9), torch.tensor([0, -100, 8])
        assert self.op(x, good).isfinite().all()
        with pytest.raises(RuntimeError, match="target_is_in_the_vocabulary"):
            self.op(x, good, ignore_index=None)
        with pytest.raises(RuntimeError, match="target_is_in_the_vocabulary"):
            self.op(x, torch.tensor([0, token, 8]))

    def test_the_kernels_refuse_what_they_cannot_index(self):
        ops, target = torch.ops.accel, torch.zeros(2, dtype=torch.int64, device=DEVICE)
        rows = torch.empty(1, device=DEVICE).expand(2, 1 << 31)
        with pytest.raises(ValueError, match="rows of up to 2\\^30 tokens, got 2147483648"):
            ops.cross_entropy_stats(rows, target, 0, 0, None, False)
