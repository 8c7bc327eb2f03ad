"""The split linear layer on one rank: products, gradients, main gradients, delayed gradients, bad input.
Several ranks: `tests/distributed/test_parallel_linear.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel.parallel import linear
from accel.parallel.linear import DelayedGradients, Layout, parallel_linear

DTYPES = (torch.float32, torch.bfloat16)


def inputs(dtype: torch.dtype, *leading: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((*leading, 13), (7, 13), (7,))
    x, w, b = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_()


@pytest.mark.parametrize("leading", [(5,), (3, 2), (0,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_torch(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    x, w, b = inputs(dtype, *leading)
    y = parallel_linear(x, w, b, Layout())
    expected = x @ w.t() + b
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w, b), dy)
    dy_TN, x_TK = dy.reshape(-1, 7), x.detach().reshape(-1, 13)
    for g, e in zip(got, (dy @ w, dy_TN.t() @ x_TK, dy_TN.sum(0)), strict=True):
        assert torch.equal(g, e)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_operands_get_no_gradient(frozen: int) -> None:
    operands = inputs(torch.float32, 5)
    operands[frozen].requires_grad_(False)
    parallel_linear(*operands, Layout()).sum().backward()
    assert [t.grad is None for t in operands] == [i == frozen for i in range(3)]


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_added_to(main_dtype: torch.dtype) -> None:
    x, w, _ = inputs(torch.bfloat16, 5)
    w.main_grad = torch.ones(7, 13, dtype=main_dtype)
    w.grad_added_to_main_grad = False
    for _ in range(2):
        parallel_linear(x, w, None, Layout(into_main_grad=True)).sum().backward()
    dw = 2 * torch.ones(5, 7).t() @ x.detach().float()
    tolerance = 1e-6 if main_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(w.main_grad.float(), 1 + dw, rtol=tolerance, atol=tolerance)
    assert w.grad_added_to_main_grad is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_what_autograd_gets_beside_it_changes_nothing(shared: bool, dtype: torch.dtype) -> None:
    """And takes no memory."""
    x, w, _ = inputs(dtype, 5)
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(7, 13), False
    w.zero_out_wgrad = shared
    parallel_linear(x, w, None, Layout(into_main_grad=True)).sum().backward()
    assert w.grad.layout is torch.sparse_coo
    assert w.grad.dtype == dtype
    assert w.grad.shape == w.shape
    before = w.main_grad.clone()
    w.main_grad.add_(w.grad.data)
    assert torch.equal(w.main_grad, before)
    assert before.any()


@pytest.mark.parametrize("shared", [False, True])
def test_in_a_cuda_graph_it_has_an_address(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_capturing", lambda device: True)
    _, w, _ = inputs(torch.bfloat16, 5)
    w.grad_added_to_main_grad, w.zero_out_wgrad = False, shared
    grad = linear.weight_gradient_added(w)
    assert grad is not None
    assert grad.layout is torch.strided
    assert grad.shape == w.shape
    assert not (shared and grad.any())


@pytest.mark.parametrize("first", ["lookup", "product"])
def test_the_gradient_of_an_embedding_that_shares_the_weight_is_added_to_it(first: str) -> None:
    _, w, _ = inputs(torch.bfloat16, 5)
    w.main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = torch.zeros(7, 13), False, True
    found = []
    w.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone()))
    ids, x = torch.tensor([3, 0, 3]), torch.randn(3, 13, dtype=torch.bfloat16, requires_grad=True)
    uses = {
        "product": lambda: parallel_linear(x, w, None, Layout(into_main_grad=True)).sum(),
        "lookup": lambda: torch.nn.functional.embedding(ids, w).sum(),
    }
    # the backward of what was called last comes first
    sum(uses[name]() for name in sorted(uses, key=lambda name: name == first)).backward()
    expected = torch.zeros(7, 13).index_add_(0, ids, torch.ones(3, 13))
    assert [torch.equal(grad.float(), expected) for grad in found] == [True]
    assert found[0].layout is torch.strided
    assert w.main_grad.any()


def test_no_main_grad_is_one_error_that_says_what_to_do() -> None:
    x, w, _ = inputs(torch.float32, 5)
    y = parallel_linear(x, w, None, Layout(into_main_grad=True))
    with pytest.raises(RuntimeError, match="no-gradient-accumulation-fusion"):
        y.sum().backward()


def test_delayed_gradients_wait_and_come_oldest_first() -> None:
    x, w, _ = inputs(torch.float32, 5)
    delayed = DelayedGradients()
    layout = Layout(delayed=delayed)
    for factor in (1, 10):
        (parallel_linear(x, w, None, layout) * factor).sum().backward()
    assert w.grad is None
    assert len(delayed) == 2
    delayed.compute_next()
    first = w.grad.clone()
    delayed.compute_next()
    plain = inputs(torch.float32, 5)
    (plain[0] @ plain[1].t()).sum().backward()
    torch.testing.assert_close(first, plain[1].grad)
    torch.testing.assert_close(w.grad, 11 * plain[1].grad)
    with pytest.raises(IndexError):
        delayed.compute_next()


def test_a_dimension_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"last dimension of x is 4.*takes 5"):
        parallel_linear(torch.ones(2, 4), torch.ones(3, 5), None, Layout())


def test_a_second_derivative_is_torchs() -> None:
    """Of the weight's gradient too, and where what came back has no graph itself."""

    def gradients(linear: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        first = torch.autograd.grad(linear(*leaves).sum(), leaves, create_graph=True)
        penalty = sum(t.square().sum() for t in first)
        penalty += linear(*leaves).pow(3).sum()
        first = torch.autograd.grad(penalty, leaves, create_graph=True)
        sum(t.square().sum() for t in first).backward()
        return [leaf.grad for leaf in leaves]

    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3, 4), (5, 4), (5,))
    )
    found = gradients(lambda x, w, b: parallel_linear(x, w, b, Layout()))
    torch.testing.assert_close(found, gradients(torch.nn.functional.linear))


def test_a_second_derivative_without_all_its_parts_is_an_error() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    weight.main_grad = torch.zeros(5, 4)
    for layout in (Layout(into_main_grad=True), Layout(delayed=DelayedGradients())):
        y = parallel_linear(x, weight, None, layout)
        with pytest.raises(RuntimeError, match="create_graph=True needs a layer that is not split"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
