"""Cross entropy's Triton kernels: the contract, rows of many blocks and parts, and what cannot be."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from accel._triton import cross_entropy as kernels
from accel._triton.launch import num_processors
from accel.ops import cross_entropy_ref
from tests.ops import test_cross_entropy
from tests.ops.contract import LAYOUTS, Inputs, change_layout, run
from tests.ops.cross_entropy_edges import Edges
from tests.triton.harness import DEVICE, HAS_GPU, OnTriton, kernels_launched

FLOATS = test_cross_entropy.FLOATS
targets = test_cross_entropy.targets
on_triton = pytest.mark.usefixtures("triton_kernels")


class TestCrossEntropy(OnTriton, test_cross_entropy.TestCrossEntropy):
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
            saved = ops.cross_entropy_stats.default(*call)
            backward = (x, target, saved, dloss, 0, 24, smoothing)
            yield ops.cross_entropy_bwd.default, backward
            yield ops.cross_entropy_bwd_.default, backward

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_rows_of_many_blocks(self, dtype):
        """Three blocks, the last ragged, with the maximum in each place, and large logits."""
        block = 32 * kernels.MAX_WARPS * kernels.PER_THREAD
        x = self.logits((7, 2 * block + 72), dtype) * 4
        for row, col in enumerate([0, block - 1, block, 2 * block - 1, 2 * block, x.shape[1] - 1]):
            x[row, col] = 90.0
        self.check(Inputs([x, targets(x)], {"label_smoothing": 0.1}))

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("num_cols", [4096, 4200, 3001])
    @pytest.mark.parametrize("num_rows", [1, 5])
    def test_parts_of_rows_are_merged(self, num_rows, num_cols, smoothing, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_WARPS", 1)
        monkeypatch.setattr(kernels, "ROWS_PER_MERGE", 4)
        x = self.logits((num_rows, num_cols), torch.float32)
        for row in range(num_rows):
            x[row, row * num_cols // 5] = 30.0
        inputs = Inputs([x, targets(x)], {"label_smoothing": smoothing})
        if not HAS_GPU:
            launched = kernels_launched(lambda: run(self.op, inputs, []))
            assert launched == ["_check_targets", "_stats_of_parts", "_merge"]
        self.check(inputs)

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

    @pytest.mark.parametrize("num_cols", [1, 6, 12, 36, 40, 264])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_vectors_of_any_length(self, num_cols, dtype):
        """V is an odd multiple of 1, 2, 4, 8 elements; rows start wherever that lets them."""
        self.check(Inputs([x := self.logits((3, num_cols), dtype), targets(x)]))

    def test_gradients_that_are_not_contiguous(self):
        """Of a sum, one number expanded; of a transpose, strided."""
        x = self.logits((4, 3, 24), torch.float32).requires_grad_()
        target = targets(x)
        for reduce in (torch.Tensor.sum, lambda loss: (loss.t() * torch.arange(4.0)).sum()):
            for ignore_index in (-100, None):
                options = {"ignore_index": ignore_index, "check_target": False}
                loss = self.op(x, target, **options)
                want = cross_entropy_ref(x, target, **options)
                got = torch.autograd.grad(reduce(loss), x)[0]
                torch.testing.assert_close(got, torch.autograd.grad(reduce(want), x)[0])


@on_triton
class TestEdges(Edges):
    def split_rows(self, parts, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_WARPS", 1)
        monkeypatch.setattr(kernels, "MAX_PARTS", 64 if parts else 1)
        return 1

    @pytest.mark.skipif(HAS_GPU, reason="a device-side assertion ends the process's use of the GPU")
    @pytest.mark.parametrize("token", [9, -1, 1 << 40])
    def test_targets_outside_the_vocabulary(self, token, monkeypatch):
        """The interpreter evaluates assertions only if told; what is compiled is, by its decorator."""
        options = replace(interpreter.interpreter_builder.options, debug=True)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        x, good = torch.randn(3, 9), torch.tensor([0, -100, 8])
        assert self.op(x, good).isfinite().all()
        with pytest.raises(InterpreterError, match="target is outside the vocabulary"):
            self.op(x, good, ignore_index=None)
        with pytest.raises(InterpreterError, match="target is outside the vocabulary"):
            self.op(x, torch.tensor([0, token, 8]))

    def test_one_launch_forward_one_backward(self):
        rows = kernels.PROGRAMS_PER_PROCESSOR * num_processors(torch.device(DEVICE))
        x = torch.randn(rows, 64, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.int64)

        def step():
            self.op(x, target, check_target=False, ignore_index=None).sum().backward()

        assert kernels_launched(step) == ["_stats", "_backward"]
        empty = torch.randn(0, 64, requires_grad=True)
        assert not kernels_launched(lambda: self.op(empty, target[:0]).sum().backward())
