"""Projection and cross entropy in one: `OpContract`, pieces of any size, and what is never held."""

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel.ops import linear_cross_entropy, linear_cross_entropy_ref
from accel.ops.gemm_accumulate import unsupported_reason as unsupported_sum
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import (
    LAYOUTS,
    Inputs,
    OpContract,
    change_layout,
    laid_out,
    needs_native,
)
from tests.ops.test_cross_entropy import FLOATS, bytes_saved_beside


def problem(
    rows: tuple[int, ...], hidden_size: int, num_tokens: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(num_tokens, hidden_size, generator=generator) * 0.5).to(dtype)
    target = torch.randint(0, num_tokens, rows, generator=generator)
    return [hidden, weight, target.masked_fill(target % 5 == 0, -100)]


def plain(hidden, weight, target, *, tokens_per_chunk=0, **options):
    """The reference, which has no pieces."""
    return linear_cross_entropy_ref(hidden, weight, target, **options)


class TestLinearCrossEntropy(OpContract):
    op = staticmethod(linear_cross_entropy)
    ref = staticmethod(plain)
    # As in cross_entropy; each logit is a sum of H products.
    roundings = {torch.float32: 8}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        options = {"tokens_per_chunk": 16, "label_smoothing": 0.1 * (seed % 2)}
        return Inputs(problem((6, 3), 20, 43, dtype, seed), options)

    @needs_native
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_a_piece_of_minus_infinity(self, smoothing):
        """With the target and without."""
        hidden, weight, _ = problem((3,), 20, 43, torch.float32)
        hidden, weight = hidden.abs().to(self.device), weight.to(self.device)
        weight[:16] = -torch.inf
        target = torch.tensor([5, 20, 40], device=self.device)
        options = {"tokens_per_chunk": 16, "label_smoothing": smoothing}
        loss, loss_ref = (op(hidden, weight, target, **options) for op in (self.op, self.ref))
        assert loss[0] == torch.inf
        torch.testing.assert_close(loss, loss_ref, rtol=1e-4, atol=1e-4)

    def large_inputs(self) -> Inputs:
        return Inputs(problem((700,), 64, 1500, torch.bfloat16), {"tokens_per_chunk": 512})

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """Sums of the sizes of the terms, where they cancel."""
        hidden, weight, target = inputs.tensors
        hidden, weight = hidden.double().flatten(0, -2), weight.double()
        if hidden.numel() == 0:
            return {}
        dloss = torch.randn(target.shape, generator=torch.Generator().manual_seed(7)).flatten()
        softmax = (hidden @ weight.t()).softmax(-1)
        softmax[torch.arange(len(hidden)), target.flatten().clamp(min=0)] += 1
        dlogits = softmax * dloss.double().abs().unsqueeze(1)
        return {
            "output 0": float((hidden.abs() @ weight.abs().t()).max()),
            "gradient 0": float((dlogits @ weight.abs()).max()),
            "gradient 1": float((dlogits.t() @ hidden.abs()).max()),
        }

    def opchecks(self):
        hidden, weight, target = problem((9,), 20, 43, torch.bfloat16)
        stats = torch.ops.accel.linear_cross_entropy_stats.default
        call = (hidden, weight, target, 0, 43, -100, True, 16)
        yield stats, call
        saved = stats(*call)[:2].clone()
        backward = torch.ops.accel.linear_cross_entropy_bwd.default
        for wanted in ((True, True), (True, False), (False, True)):
            yield backward, (hidden, weight, target, saved, torch.randn(9), 0, 43, 0.1, 16, *wanted)

    @needs_native
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize(
        ("rows", "hidden_size", "num_tokens", "chunk"),
        [
            ((0,), 8, 5, 2),
            ((1,), 1, 1, 1),
            ((2, 3), 7, 31, 31),
            ((1025,), 16, 97, 32),  # one row more than a block
            ((5,), 16, 97, 1000),  # a chunk larger than the vocabulary
        ],
    )
    def test_pieces_of_any_size(self, rows, hidden_size, num_tokens, chunk, dtype):
        tensors = problem(rows, hidden_size, num_tokens, dtype)
        self.check(Inputs(tensors, {"tokens_per_chunk": chunk}))

    @needs_native
    @settings(deadline=None, max_examples=100)
    @given(
        hidden=laid_out(),
        num_tokens=st.sampled_from([1, 2, 7, 16, 43, 97]),
        layout=st.sampled_from(LAYOUTS),
        chunk=st.sampled_from([1, 7, 16, 1000]),
        smoothing=st.sampled_from([0.0, 0.3]),
        dtype=st.sampled_from(FLOATS),
    )
    def test_matches_reference_for_any_layout(
        self, hidden, num_tokens, layout, chunk, smoothing, dtype
    ):
        self.check_layout(hidden, num_tokens, layout, chunk, smoothing, dtype)

    def check_layout(self, hidden, num_tokens, layout, chunk, smoothing, dtype):
        *rows, hidden_size = hidden.shape
        assume(hidden_size and (num_tokens > 1 or not smoothing))
        _, weight, target = problem(tuple(rows), hidden_size, num_tokens, dtype)
        if target.ndim == 2:
            target = target.t().contiguous().t()
        options = {"tokens_per_chunk": chunk, "label_smoothing": smoothing}
        self.check(Inputs([hidden.to(dtype), change_layout(weight, layout), target], options))


@needs_native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_ref])
@pytest.mark.parametrize(("rows", "width"), [(700, 24), (2049, 7), (1, 5), (0, 3)])
def test_adds_to_the_grad_buffer_and_hands_on_no_gradient(function, dtype, rows, width):
    hidden, weight, target = problem((rows,), width, 43, dtype)
    options = {} if function is linear_cross_entropy_ref else {"tokens_per_chunk": 16}
    dloss = torch.rand(rows, generator=torch.Generator().manual_seed(2))

    def gradients(op, hidden, weight, dloss, **options):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        op(*leaves, target, **options).backward(dloss)
        return [t.grad for t in leaves]

    start = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    buffer = start.clone()
    dhidden, no_dweight = gradients(function, hidden, weight, dloss, grad_buffer=buffer, **options)
    assert no_dweight is None
    base = gradients(linear_cross_entropy_ref, hidden, weight, dloss)
    exact = gradients(linear_cross_entropy_ref, hidden.double(), weight.double(), dloss.double())
    magnitude = float(hidden.abs().double().sum(0).max())
    assert_close_to_baseline(dhidden, base[0], exact[0], roundings=8)
    added = (buffer.double() - start.double()).float()
    assert_close_to_baseline(added, base[1].float(), exact[1], magnitude=magnitude)


def check_sums_in_fp32(dtype: torch.dtype, rows: int, scale: float, device: str = "cpu") -> None:
    """Where all of 64 tokens are as likely, the gradients of the logits are 1/64 and -63/64, which every
    dtype holds: the terms of dW are known, and what is left are the roundings of their sum.

    A sum of n terms in fp32 has up to n of them, of 2^-24 of the terms' sizes; 8 more are for the 1/64. Where
    products are rounded to 16 bits first, there is one of these for each piece of rows.
    """
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 24, generator=generator).to(dtype)
    target = torch.randint(0, 64, (rows,), generator=generator)
    start = scale * torch.randn(64, 24, generator=generator)
    buffer = start.to(device, copy=True)
    leaves = [hidden.to(device, copy=True), torch.zeros(64, 24, dtype=dtype, device=device)]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = linear_cross_entropy(*leaves, target.to(device), tokens_per_chunk=16, grad_buffer=buffer)
    loss.sum().backward()

    dlogits = 1 / 64 - F.one_hot(target, 64).double()
    rows_of_piece = sys.modules["accel.ops.linear_cross_entropy"]._piece(buffer.device).rows
    pieces = zip(dlogits.split(rows_of_piece), hidden.double().split(rows_of_piece), strict=True)
    products = torch.stack([a.t() @ b for a, b in pieces])
    sizes = start.double().abs() + dlogits.abs().t() @ hidden.double().abs()
    bound = (rows + 8) * 2**-24 * sizes
    if dtype != torch.float32 and unsupported_sum(buffer, leaves[0], leaves[0]):
        bound += torch.finfo(dtype).eps / 2 * products.abs().sum(0)
    error = (buffer.cpu().double() - start.double() - products.sum(0)).abs()
    assert (error <= bound).all(), f"{float((error / bound).max()):.1f} times what fp32 allows"


@needs_native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [700, 1025])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_grad_buffer_is_summed_in_fp32(dtype, rows, scale):
    """Beside as much as a product, and beside so much more that 16 bits would hold little of it."""
    check_sums_in_fp32(dtype, rows, scale)


@needs_native
@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.parametrize("wanted", [[0], [1]])
def test_a_frozen_input_costs_no_product(wanted, with_buffer, monkeypatch):
    tensors, options, _ = TestLinearCrossEntropy().inputs(torch.float32)
    leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors[:2])]
    if with_buffer:
        options |= {"grad_buffer": torch.zeros(43, 20)}
    loss = linear_cross_entropy(*leaves, tensors[2], **options)
    module = sys.modules["accel.ops.linear_cross_entropy"]
    added, add_product = [], module._add_product

    def adding(total, a, b):
        added.append(tuple(total.shape))
        add_product(total, a, b)

    monkeypatch.setattr(module, "_add_product", adding)
    loss.sum().backward()
    pieces_of_dweight = {(16, 20), (11, 20)} if with_buffer else set()
    assert set(added) == ({(18, 20)} if wanted == [0] else pieces_of_dweight)
    assert not (with_buffer and wanted == [0] and options["grad_buffer"].any())


@needs_native
def test_a_frozen_weight_has_no_gradient_in_memory():
    from accel.testing.bench import _peak_bytes

    hidden, weight, target = problem((64,), 64, 8192, torch.float32)
    hidden.requires_grad_()

    def step():
        loss = linear_cross_entropy(hidden, weight, target, tokens_per_chunk=64)
        return torch.autograd.grad(loss.sum(), hidden)

    step()
    assert _peak_bytes(step) < 0.5 * weight.nbytes


@needs_native
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_keeps_two_floats_per_row(smoothing):
    tensors = problem((9,), 20, 43, torch.float32)
    tensors[0].requires_grad_()
    call = partial(linear_cross_entropy, *tensors, label_smoothing=smoothing)
    assert bytes_saved_beside(tensors, call) == 9 * 2 * 4


@needs_native
def test_memory_does_not_grow_with_the_logits():
    """One call holds its results, one piece, and one block of sums: not [T, V] of anything."""
    from accel.testing.bench import _peak_bytes

    hidden, weight, target = problem((2048,), 16, 8192, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    buffer = torch.zeros_like(weight)

    def step():
        loss = linear_cross_entropy(hidden, weight, target, grad_buffer=buffer, tokens_per_chunk=64)
        return torch.autograd.grad(loss.sum(), hidden)

    step()
    assert _peak_bytes(step) < 0.1 * 2048 * 8192 * 4


@needs_native
def test_second_derivative_is_an_error():
    hidden, weight, target = problem((3,), 8, 11, torch.float32)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target).sum()
    (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    buffer = torch.zeros(weight.shape)
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, grad_buffer=buffer).sum()
    with pytest.raises(RuntimeError, match="second derivative cannot be had with a grad_buffer"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    assert not buffer.any()
    with pytest.raises(RuntimeError, match="linear_cross_entropy_bwd has no derivative"):
        dhidden.sum().backward()


@needs_native
def test_targets_outside_the_vocabulary():
    hidden, weight, _ = problem((2,), 8, 11, torch.float32)
    with pytest.raises(IndexError, match=r"target 11 .* vocabulary of 11 tokens"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 11]), tokens_per_chunk=4)
    logits = hidden @ weight.t()
    for token in (11, -1, 400):  # the last chunk is ragged: 11 would be in it
        target = torch.tensor([0, token])
        unchecked = linear_cross_entropy(
            hidden, weight, target, tokens_per_chunk=4, check_target=False
        )
        torch.testing.assert_close(unchecked[1], logits[1].logsumexp(0) - logits[1].max())


H, W, TARGET = torch.ones(2, 8), torch.ones(5, 8), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((H.long(), W, TARGET), {}, "hidden must be a floating dtype, got torch.int64"),
        ((torch.tensor(1.0), W, TARGET), {}, r"hidden must have shape .* got \[\]"),
        ((torch.ones(3, 0), torch.ones(5, 0), TARGET), {}, r"H >= 1, got \[3, 0\]"),
        ((H, W.t(), TARGET), {}, r"weight must have shape \[V, 8\] .* got \[8, 5\]"),
        ((H, W[:0], TARGET), {}, r"with V >= 1, for hidden \[2, 8\], got \[0, 8\]"),
        ((H, W.half(), TARGET), {}, "weight must be torch.float32 .* got torch.float16"),
        ((H, W.to("meta"), TARGET), {}, "weight must be .* on cpu like hidden, got .* on meta"),
        ((H, W, TARGET[:1]), {}, r"target must have shape \[2\], that of hidden"),
        ((H, W, TARGET), {"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\)"),
        ((H, W, TARGET), {"tokens_per_chunk": 0}, "tokens_per_chunk must be >= 1, got 0"),
        ((H, W, TARGET), {"grad_buffer": W.half()}, "grad_buffer must be torch.float32"),
        ((H, W, TARGET), {"grad_buffer": H}, r"grad_buffer must be .* \[5, 8\] .* got .* \[2, 8\]"),
    ],
)
def test_rejects(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*tensors, **options)


def test_unsupported_dtype_falls_back():
    hidden, weight, target = problem((3,), 8, 11, torch.float64)
    want = linear_cross_entropy_ref(hidden, weight, target)
    assert torch.equal(linear_cross_entropy(hidden, weight, target), want)


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shards_of_the_vocabulary(dtype):
    """Half of the weight on each rank; the shares of dhidden add up."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        hidden, weight, target = problem((11,), 20, 2 * 37, dtype)
        mine = slice(37 * dist.get_rank(), 37 * (dist.get_rank() + 1))

        def result(op, hidden, weight, **options):
            leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
            loss = op(*leaves, target, label_smoothing=0.1, **options)
            return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]

        exact = result(linear_cross_entropy_ref, hidden.double(), weight.double())
        base = result(linear_cross_entropy_ref, hidden, weight)
        options = {"group": dist.group.WORLD, "tokens_per_chunk": 16}
        got = result(linear_cross_entropy, hidden, weight[mine], **options)
        dhidden = got[1].float()
        dist.all_reduce(dhidden)
        magnitude = float((hidden.double().abs() @ weight.double().abs().t()).max())
        assert_close_to_baseline(got[0], base[0], exact[0], roundings=8, magnitude=magnitude)
        assert_close_to_baseline(dhidden.to(dtype), base[1], exact[1], roundings=4)
        assert_close_to_baseline(got[2], base[2][mine], exact[2][mine], roundings=4)
    finally:
        dist.destroy_process_group()
