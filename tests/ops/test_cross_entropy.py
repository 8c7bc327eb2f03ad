"""Cross entropy: `OpContract`, bad input, rows that cost nothing, and what in place promises."""

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel.log import log_once
from accel.ops import _dispatch, cross_entropy, cross_entropy_ref
from accel.ops.cross_entropy import unsupported_reason
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import Inputs, OpContract, laid_out, needs_native, run

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def targets(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Random tokens, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, x.shape[-1], x.shape[:-1], generator=generator)
    return target.masked_fill(torch.rand(target.shape, generator=generator) < 0.2, -100)


def bytes_saved_beside(tensors, loss):
    """Of memory that is kept until the backward of `loss()`, but for that of `tensors`."""
    nbytes = {}

    def pack(t):
        nbytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss()
    return sum(nbytes[p] for p in nbytes.keys() - {t.data_ptr() for t in tensors})


class TestCrossEntropy(OpContract):
    op = staticmethod(cross_entropy)
    ref = staticmethod(cross_entropy_ref)
    # The loss is fp32 for every dtype: x - m, e^, the last steps of the sum, log, the difference.
    roundings = {torch.float32: 8}

    def logits(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(shape, generator=generator) * 3).to(dtype)

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        x = self.logits((6, 3, 43), dtype, seed)
        return Inputs([x, targets(x, seed)], {"label_smoothing": 0.1 * (seed % 2)})

    def large_inputs(self) -> Inputs:
        x = self.logits((257, 5003), torch.bfloat16)
        return Inputs([x, targets(x)], {"label_smoothing": 0.1})

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """Logits are what the loss is a difference of; dloss what dlogits is (0 for V = 1)."""
        x = inputs.tensors[0].double()
        if x.numel() == 0:
            return {}
        dloss = torch.randn(x.shape[:-1], generator=torch.Generator().manual_seed(7))
        return {
            "output 0": float((x.amax(-1) - x.amin(-1)).max() + x.abs().max()),
            "gradient 0": float(dloss.abs().max()),
        }

    @needs_native
    def test_a_shard_of_minus_infinity_adds_nothing_to_the_sum(self):
        x = torch.full((2, 24), -torch.inf, device=self.device)
        target = torch.tensor([3, 30], device=self.device)
        stats = torch.ops.accel.cross_entropy_stats(x, target, 0, 0, None, False)
        assert (stats[0] == -torch.inf).all()
        assert not stats[1].any()

    def opchecks(self):
        for smoothing in (0.0, 0.1):
            x = self.logits((3, 5, 24), torch.bfloat16)
            target = targets(x)
            stats = torch.ops.accel.cross_entropy_stats.default
            yield stats, (x, target, 0, 24, -100, smoothing > 0)
            saved = stats(x, target, 0, 24, -100, smoothing > 0)
            backward = (x, target, saved, torch.randn(3, 5), 0, 24, smoothing)
            yield torch.ops.accel.cross_entropy_bwd.default, backward
            yield torch.ops.accel.cross_entropy_bwd_.default, backward

    @needs_native
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_rows_of_many_blocks(self, dtype):
        """More than two blocks of 4096 columns, with the maximum in each place, and large logits."""
        x = self.logits((7, 4096 * 2 + 71), dtype) * 4
        for row, col in enumerate([0, 4095, 4096, 8191, 8192, x.shape[1] - 1]):
            x[row, col] = 90.0
        self.check(Inputs([x, targets(x)], {}))

    @needs_native
    @settings(deadline=None, max_examples=100)
    @given(x=laid_out(), dtype=st.sampled_from(FLOATS), smoothing=st.sampled_from([0.0, 0.3]))
    def test_matches_reference_for_any_layout(self, x, dtype, smoothing):
        assume(x.shape[-1] >= (2 if smoothing else 1))
        x = (x * 3).to(dtype)
        self.check(Inputs([x, targets(x)], {"label_smoothing": smoothing}))


def test_reference_is_pytorch():
    x = TestCrossEntropy().logits((8, 48), torch.float64)
    target = targets(x)
    want = F.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(cross_entropy_ref(x, target), want)
    # PyTorch spreads a over all tokens, Megatron over all but the target.
    torch.testing.assert_close(
        cross_entropy_ref(x, target, label_smoothing=0.1),
        F.cross_entropy(x, target, reduction="none", label_smoothing=0.1 * 48 / 47),
    )


@needs_native
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_keeps_two_floats_per_row(smoothing):
    x, target = torch.randn(7, 9, requires_grad=True), torch.arange(7)
    call = partial(cross_entropy, x, target, label_smoothing=smoothing)
    assert bytes_saved_beside([x, target], call) == 7 * 2 * 4


@needs_native
def test_ignored_rows_and_masked_rows_have_no_gradient():
    x = torch.randn(4, 9, requires_grad=True)
    target = torch.tensor([3, -100, 8, 0])
    loss = cross_entropy(x, target)
    assert loss[1] == 0
    (dx,) = torch.autograd.grad(loss, x, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert (dx.abs().sum(1) > 0).tolist() == [True, False, False, True]


@needs_native
@pytest.mark.parametrize("op", [cross_entropy, cross_entropy_ref])
def test_targets_outside_the_vocabulary(op):
    x = torch.randn(3, 9)
    for token in (9, -1):
        with pytest.raises(IndexError, match=f"target {token} .* vocabulary of 9 tokens"):
            op(x, torch.tensor([0, token, 8]))
    unchecked = op(x, torch.tensor([0, 9, -7]), check_target=False)
    torch.testing.assert_close(unchecked[1:], torch.logsumexp(x, 1)[1:] - x.amax(1)[1:])


@needs_native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinite_and_nan_logits(dtype):
    """-inf is a token that cannot be; NaN and +inf stay visible."""
    x = torch.randn(5, 10000).to(dtype)
    x[0, :9000] = -torch.inf  # whole blocks of it
    x[1, 5] = torch.nan
    x[2, 9990] = torch.inf
    x[3] = -torch.inf
    target = torch.full((5,), 9999)
    loss, expected = cross_entropy(x, target), cross_entropy_ref(x, target)
    assert loss.isnan().tolist() == expected.isnan().tolist() == [False, True, True, True, False]
    torch.testing.assert_close(loss[0], expected[0])


@needs_native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_logits_far_from_0(dtype):
    """Masks are -1e10 or finfo.min; of so large numbers rounding makes any power of 2."""
    lowest = torch.finfo(dtype).min
    x = torch.randn(11, 5000).to(dtype)
    for row, far in enumerate((-1e9, -2e9, -1e10, -1e30, lowest)):
        x[row] = max(far, lowest)
        x[5 + row, 2500:] = max(far, lowest)
    x[10, 2500:] = min(3e9, -lowest)
    target = torch.tensor([7] * 10 + [4999])
    leaf, leaf_ref = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, expected = cross_entropy(leaf, target), cross_entropy_ref(leaf_ref, target)
    assert expected.isfinite().all()
    torch.testing.assert_close(loss, expected)
    (dx,) = torch.autograd.grad(loss.sum(), leaf)
    (want,) = torch.autograd.grad(expected.sum(), leaf_ref)
    torch.testing.assert_close(dx, want)


class TestInPlace:
    def setup_method(self):
        torch.manual_seed(0)
        self.leaf = torch.randn(5, 67, requires_grad=True)
        self.target = torch.tensor([1, 66, -100, 0, 33])
        self.dloss = torch.rand(5)

    def logits(self) -> torch.Tensor:
        return self.leaf * 1

    @needs_native
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_same_bits_in_the_memory_of_the_logits(self, dtype):
        logits = self.logits().to(dtype)
        (expected,) = torch.autograd.grad(
            cross_entropy(logits, self.target), logits, self.dloss, retain_graph=True
        )
        before = logits.detach().clone()
        loss = cross_entropy(logits, self.target, inplace=True)
        assert torch.equal(logits, before), "the forward must leave the logits alone"
        (dlogits,) = torch.autograd.grad(loss, logits, self.dloss)
        assert torch.equal(dlogits, expected)
        assert dlogits.data_ptr() == logits.data_ptr()

    @needs_native
    def test_second_backward_is_an_error(self):
        loss = cross_entropy(self.logits(), self.target, inplace=True)
        loss.backward(self.dloss, retain_graph=True)
        with pytest.raises(RuntimeError, match="wrote the gradient over the logits"):
            loss.backward(self.dloss)

    @needs_native
    def test_logits_changed_before_the_backward_are_an_error(self):
        logits = self.logits()
        loss = cross_entropy(logits, self.target, inplace=True)
        with torch.no_grad():
            logits += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(self.dloss)

    @needs_native
    def test_who_saved_the_logits_gets_an_error(self):
        logits = self.logits()
        square = logits.square().sum()
        cross_entropy(logits, self.target, inplace=True).sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()

    @needs_native
    def test_two_losses_of_the_same_logits_are_an_error(self):
        logits = self.logits()
        both = [cross_entropy(logits, self.target, inplace=True).sum() for _ in range(2)]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(both).backward()

    @needs_native
    @pytest.mark.parametrize("view", ["no", "of one", "itself"])
    def test_never_writes_over_a_leaf(self, view):
        logits = {"no": self.leaf, "of one": self.leaf[:], "itself": self.leaf.detach()[:]}[view]
        logits = logits.requires_grad_() if view == "itself" else logits
        with pytest.raises(ValueError, match="inplace cannot write over logits that are a leaf"):
            cross_entropy(logits, self.target, inplace=True)

    @needs_native
    def test_non_contiguous_logits_stay_as_they_are(self):
        logits = torch.randn(67, 5).t().requires_grad_() * 1
        assert not logits.is_contiguous()
        before = logits.detach().clone()
        loss = cross_entropy(logits, self.target, inplace=True)
        (dlogits,) = torch.autograd.grad(loss, logits, self.dloss)
        assert torch.equal(logits, before)
        want = torch.autograd.grad(cross_entropy(logits, self.target), logits, self.dloss)[0]
        assert torch.equal(dlogits, want)


@needs_native
def test_second_derivative_is_an_error():
    x = torch.randn(2, 8, requires_grad=True)
    loss = cross_entropy(x, torch.tensor([1, 2]))
    (dx,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy_bwd has no derivative"):
        dx.sum().backward()
    overwriting = cross_entropy(x * 1, torch.tensor([1, 2]), inplace=True)
    with pytest.raises(RuntimeError, match="second derivative cannot be had with inplace"):
        torch.autograd.grad(overwriting.sum(), x, create_graph=True)


X, TARGET = torch.ones(2, 8), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("x", "target", "options", "message"),
    [
        (X.long(), TARGET, {}, "logits must be a floating dtype, got torch.int64"),
        (torch.tensor(1.0), TARGET, {}, r"logits must have shape \[..., V\] with V >= 1, got \[\]"),
        (torch.ones(2, 0), TARGET, {}, r"with V >= 1, got \[2, 0\]"),
        (X, TARGET.float(), {}, "target must be an integer dtype, got torch.float32"),
        (X, TARGET[:1], {}, r"target must have shape \[2\], .* logits \[2, 8\] .*, got \[1\]"),
        (X, TARGET.to("meta"), {}, "target must be on cpu like logits, got meta"),
        (X, TARGET, {"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        (X[:, :1], TARGET * 0, {"label_smoothing": 0.1}, "needs a vocabulary of 2, got 1"),
    ],
)
def test_rejects(x, target, options, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(x, target, **options)


@needs_native
def test_the_kernels_check_for_themselves():
    stats, backward = torch.ops.accel.cross_entropy_stats, torch.ops.accel.cross_entropy_bwd
    with pytest.raises(ValueError, match="target must have the shape of logits"):
        stats(X, TARGET[:1], 0, 8, None, False)
    with pytest.raises(ValueError, match="target must be int64"):
        stats(X, TARGET.int(), 0, 8, None, False)
    saved = stats(X, TARGET, 0, 8, None, False)
    with pytest.raises(ValueError, match="needs the contiguous fp32 stats"):
        backward(X, TARGET, saved[:1], torch.ones(2), 0, 8, 0.0)
    with pytest.raises(ValueError, match="dloss must be float32"):
        backward(X, TARGET, saved, torch.ones(1), 0, 8, 0.0)
    strided = torch.ones(8, 2).t()
    with pytest.raises(ValueError, match="logits must be contiguous"):
        torch.ops.accel.cross_entropy_bwd_(strided, TARGET, saved, torch.ones(2), 0, 8, 0.0)


def test_unsupported_dtype_falls_back_and_says_so_once(caplog):
    x = torch.randn(2, 8, dtype=torch.float64)
    reason = unsupported_reason(x, TARGET)
    assert "float64" in reason
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            assert torch.equal(cross_entropy(x, TARGET), cross_entropy_ref(x, TARGET))
    assert [r.message for r in caplog.records] == [f"cross_entropy: using plain PyTorch: {reason}"]


def test_missing_library_falls_back(monkeypatch):
    inputs = TestCrossEntropy().inputs(torch.bfloat16)
    monkeypatch.setattr(_dispatch, "missing_kernel", lambda op, device_type: "no kernels here")
    (loss,), grads = run(cross_entropy, inputs)
    (loss_ref,), grads_ref = run(cross_entropy_ref, inputs)
    assert torch.equal(loss, loss_ref)
    assert torch.equal(grads[0], grads_ref[0])


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shards_of_the_vocabulary(dtype, smoothing):
    """Two ranks with half of the tokens each, against one that has them all."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        generator = torch.Generator().manual_seed(3)
        whole = (torch.randn(11, 2 * 53, generator=generator) * 3).to(dtype)
        target = targets(whole)
        dloss = torch.rand(11, generator=generator)
        rank = slice(53 * dist.get_rank(), 53 * (dist.get_rank() + 1))

        def result(op, x, group=None):
            x = x.clone().requires_grad_()
            loss = op(x, target, group=group, label_smoothing=smoothing)
            return loss.detach(), torch.autograd.grad(loss, x, dloss.to(loss.dtype))[0]

        exact_loss, exact_grad = result(cross_entropy_ref, whole.double())
        base_loss, base_grad = result(cross_entropy_ref, whole)
        for op in (cross_entropy, cross_entropy_ref):
            loss, grad = result(op, whole[:, rank], dist.group.WORLD)
            options = {"roundings": 8, "magnitude": float(whole.double().abs().max() * 2)}
            assert_close_to_baseline(loss, base_loss, exact_loss, **options)
            parts = (t[:, rank] for t in (base_grad, exact_grad))
            assert_close_to_baseline(grad, *parts, roundings=8, magnitude=1.0)
            both = [torch.empty_like(loss) for _ in range(2)]
            dist.all_gather(both, loss)
            assert torch.equal(*both), "every rank has the same loss"
        whole[
            :2, :53
        ] = -torch.inf  # a shard that the softmax leaves out, with the target or without
        target[:2] = torch.tensor([5, 60])
        losses = [
            op(whole[:, rank], target, group=dist.group.WORLD, label_smoothing=smoothing)
            for op in (cross_entropy, cross_entropy_ref)
        ]
        assert losses[0][0] == torch.inf
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    finally:
        dist.destroy_process_group()
