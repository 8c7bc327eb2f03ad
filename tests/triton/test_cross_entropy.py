"""Cross entropy's Triton kernels: the contract, rows of many blocks and parts, and what cannot be."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from accel._triton import cross_entropy as kernels
from accel.ops import cross_entropy, cross_entropy_ref
from tests.ops import test_cross_entropy
from tests.ops.contract import LAYOUTS, Inputs, change_layout, run
from tests.triton.harness import HAS_GPU, OnTriton, kernels_launched, on_device

FLOATS = test_cross_entropy.FLOATS
targets = test_cross_entropy.targets
DEVICE = "cuda" if HAS_GPU else "cpu"
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
class TestEdges:
    op = staticmethod(on_device(cross_entropy))

    def test_rows_without_a_gradient_are_not_looked_at(self):
        x = torch.randn(4, 9)
        x[2] = torch.nan
        x.requires_grad_()
        loss = self.op(x, torch.tensor([3, -100, 8, 0]))
        assert loss[1] == 0
        (dx,) = torch.autograd.grad(loss, x, torch.tensor([1.0, 1.0, 0.0, 1.0]))
        assert (dx.abs().sum(1) > 0).tolist() == [True, False, False, True]

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

    def test_targets_that_are_not_checked(self):
        x = torch.randn(4, 9, requires_grad=True)
        target = torch.tensor([0, 9, -7, 1 << 40])
        loss = self.op(x, target, check_target=False)
        torch.testing.assert_close(loss[1:], torch.logsumexp(x, 1)[1:] - x.amax(1)[1:])
        (dx,) = torch.autograd.grad(loss.sum(), x)
        want = x.detach().softmax(1)
        want[0, 0] -= 1
        torch.testing.assert_close(dx, want)

    @pytest.mark.parametrize("parts", [False, True])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_infinite_and_nan_logits(self, dtype, parts, monkeypatch):
        """-inf is a token that cannot be; NaN and +inf stay visible."""
        monkeypatch.setattr(kernels, "MAX_WARPS", 1)
        monkeypatch.setattr(kernels, "MAX_PARTS", 64 if parts else 1)
        x = torch.randn(7, 5000).to(dtype)
        x[0, :4000] = -torch.inf  # whole blocks of it
        x[1, 5] = torch.nan
        x[2, 4990] = torch.inf
        x[3] = -torch.inf
        x[4] = -500.0  # 2^(0 - this) is infinite: no block before may leave a trace
        x[4, 4500:] = -torch.inf
        x[5, 1024:2048] = -torch.inf
        x[5, 2048:] = -300.0
        x[5, :1024] = -torch.inf
        x[6, :4992] = -torch.inf
        target = torch.tensor([4999, 4999, 4999, 4999, 0, 4999, 4999])
        leaf, leaf_ref = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, expected = self.op(leaf, target), cross_entropy_ref(leaf_ref, target)
        assert loss.isnan().tolist() == expected.isnan().tolist()
        assert loss.isnan().tolist() == [False, True, True, True, False, False, False]
        torch.testing.assert_close(loss, expected, equal_nan=True)
        (dx,) = torch.autograd.grad(loss.sum(), leaf)
        (want,) = torch.autograd.grad(expected.sum(), leaf_ref)
        finite = ~loss.isnan()
        torch.testing.assert_close(dx[finite], want[finite])
        assert dx[~finite].isnan().any(1).all()

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_shards_make_the_whole(self, smoothing):
        """The stats of shards of any width, put together; the targets may be on any of them."""
        x = torch.randn(5, 40)
        target = torch.tensor([0, 15, 16, 39, 24])
        ops = torch.ops.accel
        whole = ops.cross_entropy_stats(x.to(DEVICE), target.to(DEVICE), 0, 40, None, True).cpu()
        dloss = torch.rand(5)
        want = ops.cross_entropy_bwd(
            *(t.to(DEVICE) for t in (x, target, whole, dloss)), 0, 40, smoothing
        ).cpu()
        for cols in (slice(0, 16), slice(16, 40)):
            shard = x[:, cols].contiguous().to(DEVICE)
            stats = ops.cross_entropy_stats(shard, target.to(DEVICE), cols.start, 40, None, True)
            highest, sum_exp, at_target, total = stats.cpu()
            here = (target >= cols.start) & (target < cols.stop)
            part = x[:, cols]
            assert torch.equal(highest, part.amax(1))
            torch.testing.assert_close(sum_exp, (part - highest[:, None]).exp().sum(1))
            torch.testing.assert_close(total, (part - highest[:, None]).sum(1))
            picked = x.gather(1, target[:, None])[:, 0] - highest
            torch.testing.assert_close(at_target, torch.where(here, picked, 0.0))
            grad = ops.cross_entropy_bwd(
                shard, *(t.to(DEVICE) for t in (target, whole, dloss)), cols.start, 40, smoothing
            )
            assert torch.equal(grad.cpu(), want[:, cols])

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_in_place_gives_the_same_bits(self, dtype):
        target = torch.tensor([1, 66, -100, 0, 33]).to(DEVICE)
        dloss = torch.rand(5).to(DEVICE)
        logits = (torch.randn(5, 67, requires_grad=True) * 1).to(DEVICE, dtype)
        loss = cross_entropy(logits, target)
        (expected,) = torch.autograd.grad(loss, logits, dloss, retain_graph=True)
        before = logits.detach().clone()
        loss = cross_entropy(logits, target, inplace=True)
        assert torch.equal(logits, before), "the forward must leave the logits alone"
        (dlogits,) = torch.autograd.grad(loss, logits, dloss)
        assert torch.equal(dlogits, expected)
        assert dlogits.data_ptr() == logits.data_ptr()

    def test_one_launch_forward_one_backward(self):
        rows = 3 * kernels.PROGRAMS_PER_PROCESSOR  # of interpreted processors
        x = torch.randn(rows, 64, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.int64)

        def step():
            self.op(x, target, check_target=False, ignore_index=None).sum().backward()

        assert kernels_launched(step) == ["_stats", "_backward"]
        empty = torch.randn(0, 64, requires_grad=True)
        assert not kernels_launched(lambda: self.op(empty, target[:0]).sum().backward())

    def test_the_kernels_check_for_themselves(self):
        x, target = torch.ones(2, 8, device=DEVICE), torch.tensor([1, 2], device=DEVICE)
        ops, ones = torch.ops.accel, torch.ones(2, device=DEVICE)
        with pytest.raises(ValueError, match="target must have the shape of logits"):
            ops.cross_entropy_stats(x, target[:1], 0, 8, None, False)
        with pytest.raises(ValueError, match="target must be int64"):
            ops.cross_entropy_stats(x, target.int(), 0, 8, None, False)
        saved = ops.cross_entropy_stats(x, target, 0, 8, None, False)
        with pytest.raises(ValueError, match="needs the contiguous fp32 stats"):
            ops.cross_entropy_bwd(x, target, saved[:1], ones, 0, 8, 0.0)
        with pytest.raises(ValueError, match="dloss must be float32"):
            ops.cross_entropy_bwd(x, target, saved, ones[:1], 0, 8, 0.0)
        with pytest.raises(ValueError, match="vocab_size must be >= 1"):
            ops.cross_entropy_bwd(x, target, saved, ones, 0, 0, 0.0)
        strided = torch.ones(8, 2, device=DEVICE).t()
        with pytest.raises(ValueError, match="logits must be contiguous"):
            ops.cross_entropy_bwd_(strided, target, saved, ones, 0, 8, 0.0)
