"""Ops on tensors of more than 2^31 elements: `make test-huge`, some minutes and 20 GiB, and as much of disk.

A tensor repeats a block of P rows, P a prime, so that an offset that wraps at 2^31 or 2^32 elements or bytes
meets another row. Where rows do not know of each other, each row of a result must have the very bits that it
has in the result for the block alone; what is summed over all rows is held against the sum in fp64. The
moments of AdamW are files on disk, as with them its tensors are 28 GiB.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from accel.ops import (
    adamw,
    add_rms_norm,
    attention,
    cross_entropy,
    gemm_accumulate,
    grouped_gemm,
    l2_norm,
    layer_norm,
    linear_cross_entropy,
    masked_softmax,
    moe_permute,
    moe_row_map,
    moe_unpermute,
    rms_norm,
    rope,
    scale,
    squared_relu,
    swiglu,
    topk_router,
)

P = 1009
BEYOND = 97
"""The last rows, which alone have a gradient where sums over rows are looked at."""
LIMIT = 2**31
BF16 = torch.bfloat16


GIB = {
    "test_norms": 15,
    "test_add_rms_norm": 19,
    "test_activations": 13,
    "test_rope": 15,
    "test_attention": 16,
    "test_masked_softmax": 15,
    "test_cross_entropy": 11,
    "test_linear_cross_entropy": 4,
    "test_grouped_gemm": 16,
    "test_gemm_accumulate": 10,
    "test_multi_tensor": 10,
    "test_adamw": 16,
    "test_topk_router": 17,
    "test_moe_permute_and_unpermute": 13,
}
"""That a test needs at its peak, and some more."""


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    needed, there = GIB[request.node.originalname], psutil.virtual_memory().available
    if there < needed << 30:
        pytest.skip(f"needs {needed} GiB of free memory, has {there / 2**30:.1f}")
    yield
    gc.collect()


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_beyond(row: int) -> int:
    """So many rows of `row` elements have more than 2^31, and end within a block."""
    return LIMIT // row + 2 * P + 17


def repeated(block: Tensor, num_rows: int, dim: int = 0) -> Tensor:
    """[num_rows, ...] of the rows of `block`, again and again."""
    shape = [*block.shape[:dim], num_rows, *block.shape[dim + 1 :]]
    return fill(torch.empty(shape, dtype=block.dtype), block, dim)


def fill(x: Tensor, block: Tensor, dim: int = 0) -> Tensor:
    for start in range(0, x.shape[dim], block.shape[dim]):
        part = x.narrow(dim, start, min(block.shape[dim], x.shape[dim] - start))
        part.copy_(block.narrow(dim, 0, part.shape[dim]))
    return x


def assert_repeats(x: Tensor, block: Tensor, dim: int = 0) -> None:
    """Bit for bit, NaN of which there must be none."""
    assert block.isfinite().all()
    for start in range(0, x.shape[dim], block.shape[dim]):
        part = x.narrow(dim, start, min(block.shape[dim], x.shape[dim] - start))
        assert torch.equal(part, block.narrow(dim, 0, part.shape[dim])), f"from row {start}"


def assert_sum(x: Tensor, terms: Tensor) -> None:
    """A sum over rows [rows, ...], in fp64, of which so few are not 0 that a lost one would be seen."""
    wanted = terms.sum(0)
    allowed = 2**-8 * wanted.abs() + 1e-5 * terms.abs().sum(0)  # x is bfloat16
    assert ((x.double() - wanted).abs() <= allowed).all()
    assert 10 * allowed.median() < terms.abs().median(), (
        "one row less would be within what is allowed"
    )


def last_rows(num_rows: int) -> Tensor:
    """Of the block, those that lie beyond 2^31 elements and to the end."""
    return torch.arange(num_rows - BEYOND, num_rows) % P


class Produced(torch.autograd.Function):
    """What a layer before would hand on: no leaf and no view, in the memory of one that holds so much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(0).set_(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


@pytest.mark.parametrize("op", [rms_norm, layer_norm])
def test_norms(op):
    num_cols = 1024
    num_rows = rows_beyond(num_cols)
    vectors = [draw(num_cols, seed=s).requires_grad_() for s in range(1, 2 + (op is layer_norm))]
    few, dy_few = draw(P, num_cols).requires_grad_(), draw(P, num_cols, seed=3)
    y_few = op(few, *vectors)
    (dx_few,) = torch.autograd.grad(y_few, few, dy_few)
    x = repeated(few.detach(), num_rows).requires_grad_()
    y = op(x, *vectors)
    assert_repeats(y.detach(), y_few.detach())
    dy = fill(y.detach(), dy_few)  # the op has not saved y
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert_repeats(dx, dx_few)
    del dx
    dy[:-BEYOND] = 0
    dweight, *dbias = torch.autograd.grad(y, vectors, dy)
    wide = few.detach().double()
    if op is layer_norm:
        wide = wide - wide.mean(-1, keepdim=True)
    h = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    last = last_rows(num_rows)
    assert_sum(dweight, dy_few[last].double() * h[last])
    if dbias:
        assert_sum(dbias[0], dy_few[last].double())


def test_add_rms_norm():
    num_cols = 1024
    num_rows = rows_beyond(num_cols)
    weight, dy_few = draw(num_cols, seed=1), draw(P, num_cols, seed=3)
    few, residual = draw(P, num_cols).requires_grad_(), draw(P, num_cols, seed=4)
    y_few, total_few = add_rms_norm(few, residual, weight)
    (dx_few,) = torch.autograd.grad(y_few, few, dy_few)
    x = repeated(few.detach(), num_rows).requires_grad_()
    y, total = add_rms_norm(x, repeated(residual, num_rows), weight)
    assert_repeats(y.detach(), y_few.detach())
    assert_repeats(total.detach(), total_few.detach())
    (dx,) = torch.autograd.grad(y, x, fill(y.detach(), dy_few))
    assert_repeats(dx, dx_few)


@pytest.mark.parametrize(("op", "halves"), [(swiglu, 2), (squared_relu, 1)])
def test_activations(op, halves):
    width = 512
    num_rows = rows_beyond(width * halves)
    few, dy_few = draw(P, width * halves).requires_grad_(), draw(P, width, seed=3)
    y_few = op(few)
    (dx_few,) = torch.autograd.grad(y_few, few, dy_few)
    x = repeated(few.detach(), num_rows).requires_grad_()
    y = op(x)
    assert_repeats(y.detach(), y_few.detach())
    (dx,) = torch.autograd.grad(y, x, fill(y.detach(), dy_few))
    assert_repeats(dx, dx_few)


def test_rope():
    seq, heads, width = 8, 64, 128
    batch = rows_beyond(seq * heads * width)
    freqs = torch.rand(seq, 1, 1, width) * 6
    few, dy_few = draw(seq, P, heads, width).requires_grad_(), draw(seq, P, heads, width, seed=3)
    y_few = rope(few, freqs)[0]
    (dx_few,) = torch.autograd.grad(y_few, few, dy_few)
    x = repeated(few.detach(), batch, dim=1).requires_grad_()
    y = rope(x, freqs)[0]
    assert_repeats(y.detach(), y_few.detach(), dim=1)
    (dx,) = torch.autograd.grad(y, x, fill(y.detach(), dy_few, dim=1))
    assert_repeats(dx, dx_few, dim=1)


def test_attention():
    seq, heads, width = 16, 16, 64
    batch = rows_beyond(seq * heads * width)
    few = [draw(seq, P, h, width, seed=h + s).requires_grad_() for s, h in enumerate((heads, 1, 1))]
    out_few, lse_few = attention(*few, causal=True)
    grads_few = torch.autograd.grad(out_few, few, few[0].detach())
    large = [repeated(t.detach(), batch, dim=1).requires_grad_() for t in few]
    out, lse = attention(*large, causal=True)
    assert_repeats(out.detach(), out_few.detach(), dim=1)
    assert_repeats(lse.detach(), lse_few.detach())
    grads = torch.autograd.grad(out, large, large[0].detach())
    for got, wanted in zip(grads, grads_few, strict=True):
        assert_repeats(got, wanted, dim=1)


def test_masked_softmax():
    heads, queries = 8, 32
    batch = rows_beyond(heads * queries * queries)
    few = draw(P, heads, queries, queries).requires_grad_()
    y_few = masked_softmax(few, scale=0.5, causal=True)
    (dx_few,) = torch.autograd.grad(y_few, few, few.detach())
    x = repeated(few.detach(), batch).requires_grad_()
    y = masked_softmax(x, scale=0.5, causal=True)
    assert_repeats(y.detach(), y_few.detach())
    (dx,) = torch.autograd.grad(y, x, x.detach())
    assert_repeats(dx, dx_few)


@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy(inplace):
    vocab, period = 131072, 127
    num_rows = LIMIT // vocab + 2 * period + 17
    few = draw(period, vocab).requires_grad_()
    target_few = torch.randint(vocab, (period,), generator=torch.Generator().manual_seed(1))
    loss_few = cross_entropy(few, target_few, label_smoothing=0.1)
    (dx_few,) = torch.autograd.grad(loss_few.sum(), few)
    leaf = repeated(few.detach(), num_rows).requires_grad_()
    x = Produced.apply(leaf)
    loss = cross_entropy(x, repeated(target_few, num_rows), label_smoothing=0.1, inplace=inplace)
    assert_repeats(loss.detach(), loss_few.detach())
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert_repeats(dx, dx_few)


def test_linear_cross_entropy():
    """The logits, never whole, would have so many."""
    vocab, width = 131072, 64
    num_rows = LIMIT // vocab + 2 * P + 17
    few, weight = draw(P, width).requires_grad_(), draw(vocab, width, seed=1).requires_grad_()
    target_few = torch.randint(vocab, (P,), generator=torch.Generator().manual_seed(1))
    loss_few = linear_cross_entropy(few, weight, target_few)
    last = last_rows(num_rows)
    wanted = torch.autograd.grad(loss_few[last].sum(), [few, weight])
    x = repeated(few.detach(), num_rows).requires_grad_()
    loss = linear_cross_entropy(x, weight, repeated(target_few, num_rows))
    dx, dweight = torch.autograd.grad(loss[-BEYOND:].sum(), [x, weight])
    for start in range(0, num_rows, P):
        rows = min(P, num_rows - start)
        torch.testing.assert_close(loss[start : start + rows], loss_few[:rows])
    assert not dx[:-BEYOND].any()
    torch.testing.assert_close(dx[-BEYOND:], wanted[0][last], rtol=0.02, atol=0.02)
    off = (dweight - wanted[1]).float().norm() / wanted[1].float().norm()
    assert off < 0.01, "one row less is 0.1"


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemm(transposed):
    width, out_width, experts = 64, 48, 4
    num_rows = rows_beyond(width)
    few, weight = draw(P, width), draw(width, out_width, seed=1)
    weights = weight[None].expand(experts, -1, -1).contiguous()
    if transposed:
        weights = weights.transpose(1, 2).contiguous()
    x = repeated(few, num_rows).requires_grad_()
    weights.requires_grad_()
    part = num_rows // 5
    counts = torch.tensor([part, 0, 3 * part, num_rows - 4 * part])
    y = grouped_gemm(x, weights, counts, transpose_b=transposed)
    wanted = few.float() @ weight.float()
    for start in range(0, num_rows, P):
        rows = y.detach()[start : start + P].float()
        torch.testing.assert_close(rows, wanted[: len(rows)], rtol=0.02, atol=0.1)
    dy_few = draw(P, out_width, seed=3)
    dy = fill(y.detach(), dy_few)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    wanted = dy_few.float() @ weight.float().T
    for start in range(0, num_rows, P):
        rows = dx[start : start + P].float()
        torch.testing.assert_close(rows, wanted[: len(rows)], rtol=0.02, atol=0.1)
    del dx
    dy[:-BEYOND] = 0
    (dweights,) = torch.autograd.grad(y, weights, dy)
    last = last_rows(num_rows)
    dweight = dweights[3].T if transposed else dweights[3]
    assert_sum(dweight, few[last].double()[:, :, None] * dy_few[last].double()[:, None, :])
    assert not dweights[:3].any()


def test_gemm_accumulate():
    rows, cols, depth = 46400, 46400, 8
    assert rows * cols > LIMIT
    a_few, b = draw(depth, P), draw(depth, cols, seed=1)
    out = torch.ones(rows, cols)
    gemm_accumulate(out, repeated(a_few, rows, dim=1), b)
    wanted = 1 + a_few.float().T @ b.float()
    for start in range(0, rows, P):
        part = out[start : start + P]
        torch.testing.assert_close(part, wanted[: len(part)], rtol=1e-4, atol=1e-4)


def test_multi_tensor():
    few = draw(P)
    x = repeated(few, LIMIT + 2 * P + 17)
    whole, rest = divmod(len(x), P)
    squares = few.double().square()
    wanted = (whole * squares.sum() + squares[:rest].sum()).sqrt()
    assert float(l2_norm([x])) == pytest.approx(float(wanted), rel=1e-5)
    out = torch.empty_like(x)
    scale([x], [out], 0.5)
    assert_repeats(out.view(-1), (few * 0.5).repeat(1021)[: P * 1021])


def test_adamw(tmp_path: Path):
    numel = LIMIT + 2 * P + 17
    on_disk = 2 * 4 * numel
    if (there := psutil.disk_usage(str(tmp_path)).free) < on_disk:
        pytest.skip(f"needs {on_disk >> 30} GiB of disk, has {there / 2**30:.1f}")
    # a weight in two halves, its gradient, its moments
    few = [draw(P), torch.arange(P, dtype=torch.int16), draw(P, seed=1)]
    few += [draw(P, dtype=torch.float32, seed=2), draw(P, dtype=torch.float32, seed=3).square()]
    times = 1021  # fewer and larger copies
    large = [repeated(t.repeat(times), numel) for t in few[:3]]
    for i, moment in enumerate(few[3:]):
        file = torch.from_file(str(tmp_path / f"moment_{i}"), shared=True, size=numel)
        large.append(fill(file, moment.repeat(times)))
    for w, remainder, grad, m, v in (few, large):
        adamw(
            *([t] for t in (w, grad, m, v)),
            [torch.tensor(2.0)],
            remainders=[remainder],
            lr=0.1,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.01,
        )
    for got, wanted in zip(large, few, strict=True):
        assert_repeats(got, wanted.repeat(times))


def test_topk_router():
    experts = 64
    num_rows = rows_beyond(experts)
    few, dp_few = draw(P, experts).requires_grad_(), draw(P, experts, seed=3)
    p_few, map_few = topk_router(few, 4)
    (dx_few,) = torch.autograd.grad(p_few, few, dp_few)
    x = repeated(few.detach(), num_rows).requires_grad_()
    p, chosen = topk_router(x, 4)
    assert_repeats(p.detach(), p_few.detach())
    assert_repeats(chosen, map_few)
    (dx,) = torch.autograd.grad(p, x, fill(p.detach(), dp_few))
    assert_repeats(dx, dx_few)


def test_moe_permute_and_unpermute():
    width, experts, topk = 1024, 4, 2
    num_tokens = rows_beyond(width * topk)
    few = draw(P, width)
    scores = torch.rand(P, experts, generator=torch.Generator().manual_seed(1))
    chosen_few = torch.zeros(P, experts, dtype=torch.bool).scatter_(
        1, scores.topk(topk).indices, True
    )
    x = repeated(few, num_tokens).requires_grad_()
    row_map = moe_row_map(repeated(chosen_few, num_tokens), num_tokens * topk)
    y, _ = moe_permute(x, row_map)
    assert y.numel() > LIMIT
    tokens = (
        torch.arange(num_tokens) % P
    )  # rows of each expert are those of its tokens, in their order
    start = 0
    for expert in range(experts):
        of = tokens[chosen_few[tokens, expert]]
        for part in of.split(100_000):
            assert torch.equal(y.detach()[start : start + len(part)], few[part])
            start += len(part)
    assert start == len(y)
    back = moe_unpermute(y.detach(), row_map, num_tokens)
    assert_repeats(back, few * topk)
    del back
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert_repeats(dx, few * topk)
