"""What cross entropy's kernels owe beyond the op's contract, whichever language they are in."""

import pytest
import torch

from accel.ops import cross_entropy, cross_entropy_ref
from tests.ops import test_cross_entropy
from tests.triton.harness import DEVICE, on_device

FLOATS = test_cross_entropy.FLOATS


class Edges:
    """Mixin; the class below it says how rows are split into parts, and sees to its kernels being called."""

    op = staticmethod(on_device(cross_entropy))

    def split_rows(self, parts: bool, monkeypatch: pytest.MonkeyPatch) -> int:
        """-> how many times 5000 logits make rows that are split into parts, or are not."""
        raise NotImplementedError

    def test_rows_without_a_gradient_are_not_looked_at(self):
        x = torch.randn(4, 9)
        x[2] = torch.nan
        x.requires_grad_()
        loss = self.op(x, torch.tensor([3, -100, 8, 0]))
        assert loss[1] == 0
        (dx,) = torch.autograd.grad(loss, x, torch.tensor([1.0, 1.0, 0.0, 1.0]))
        assert (dx.abs().sum(1) > 0).tolist() == [True, False, False, True]

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
    def test_logits_that_are_masked_by_the_lowest_number(self, dtype, parts, monkeypatch):
        """Times log2(e) it is -inf in fp32; and of numbers far from 0 rounding makes any power of 2."""
        k = self.split_rows(parts, monkeypatch)
        lowest = torch.finfo(dtype).min
        x = torch.randn(12, 5000 * k).to(dtype)
        for row, far in enumerate((-1e10, -2e9, -1e30, 3e9), start=8):
            x[row, 2500 * k :] = max(lowest, min(far, -lowest))
        x[9] = max(lowest, -2e9)
        x[0, 2500 * k :] = lowest
        x[6], x[6, 2048 * k :] = (
            0.88 * lowest,
            0.65 * lowest,
        )  # to either side of what is told apart
        x[7], x[7, ::2], x[7, 4000 * k] = 0.88 * lowest, 0.65 * lowest, 1.0
        x[1, : 4990 * k] = lowest
        x[2] = lowest
        x[3] = lowest
        x[3, 4000 * k] = 0.8 * lowest
        x[4] = -torch.inf
        x[4, 3 * k : 9 * k] = lowest
        x[5, : 2500 * k], x[5, 2500 * k :] = lowest, -torch.inf
        last = 5000 * k - 1
        target = torch.tensor([0, last, last, 4000 * k, 3 * k, 0, last, 4000 * k, 0, 0, 0, last])
        leaf, leaf_ref = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, expected = self.op(leaf, target), cross_entropy_ref(leaf_ref, target)
        assert expected.isfinite().all()
        torch.testing.assert_close(loss, expected)
        (dx,) = torch.autograd.grad(loss.sum(), leaf)
        (dx_ref,) = torch.autograd.grad(expected.sum(), leaf_ref)
        torch.testing.assert_close(dx, dx_ref)

    @pytest.mark.parametrize("parts", [False, True])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_infinite_and_nan_logits(self, dtype, parts, monkeypatch):
        """-inf is a token that cannot be; NaN and +inf stay visible."""
        k = self.split_rows(parts, monkeypatch)
        x = torch.randn(7, 5000 * k).to(dtype)
        x[0, : 4000 * k] = -torch.inf  # whole blocks of it
        x[1, 5] = torch.nan
        x[2, 4990 * k] = torch.inf
        x[3] = -torch.inf
        x[4] = -500.0  # 2^(0 - this) is infinite: no block before may leave a trace
        x[4, 4500 * k :] = -torch.inf
        x[5, 1024 * k : 2048 * k] = -torch.inf
        x[5, 2048 * k :] = -300.0
        x[5, : 1024 * k] = -torch.inf
        x[6, : 4992 * k] = -torch.inf
        last = 5000 * k - 1
        target = torch.tensor([last, last, last, last, 0, last, last])
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
