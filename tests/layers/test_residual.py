"""Sums of the residual stream and their norms: which are computed together, and that no bit differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accel.layers import residual
from accel.layers.residual import MISSES, ResidualSum, norm_of
from accel.ops import add_rms_norm, rms_norm
from tests.ops.contract import needs_native

N = 48


@contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of sums that are computed with their norm."""
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(x.shape))
        return add_rms_norm(x, *args, **kwargs)

    with mock.patch.object(residual, "add_rms_norm", noted):
        yield shapes


def pass_through(
    place: ResidualSum | None, x: Tensor, bias: Tensor | None, stream: Tensor, *norm: object
) -> tuple[Tensor, Tensor]:
    """As a layer computes the sum, and as the norm is called behind it."""
    weight, eps, zero_centered = norm
    total = None if place is None else place.add(x, bias, stream)
    if total is None:
        total = stream + (x if bias is None else x + bias)
        total = total if place is None else place.watch(total, x)
    normed = norm_of(total, weight, eps, zero_centered)
    if normed is None:
        normed = rms_norm(total, weight, eps, zero_centered=zero_centered)
    return normed, total


@needs_native
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_are_those_of_the_two_steps(
    dtype: torch.dtype, zero_centered: bool, with_bias: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, stream = (torch.randn(5, 3, N, generator=draw).to(dtype) for _ in range(2))
    bias = torch.randn(N, generator=draw).to(dtype) if with_bias else None
    weight = torch.randn(N, generator=draw).to(dtype)
    leaves = [t.requires_grad_() for t in (x, stream, weight, bias) if t is not None]
    place, found = ResidualSum(), []
    with counted() as shapes:
        for where in (None, place, place, place):
            normed, total = pass_through(where, x, bias, stream, weight, 1e-5, zero_centered)
            grads = torch.autograd.grad((normed.sin() + 2 * total).sum(), leaves)
            found.append([normed, total, *grads])
    assert shapes == [(5, 3, N)] * 2, "the first pass teaches which norm it is"
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@needs_native
def test_a_sum_that_nobody_reads_is_left_alone() -> None:
    place, x, weight = ResidualSum(), torch.randn(4, N).requires_grad_(), torch.ones(N)
    with counted() as shapes:
        for _ in range(MISSES + 3):
            pass_through(place, x, None, x, weight, 1e-5, False)
            place.add(x, None, x)  # its norm reads a copy
    assert place.alone
    assert len(shapes) == MISSES


@needs_native
def test_a_sum_whose_norm_read_a_copy_for_a_while_is_computed_with_it_again() -> None:
    """As in the steps in which Megatron saves gradients of modules, by hooks on them."""
    place, x, weight = ResidualSum(), torch.randn(4, N).requires_grad_(), torch.ones(N)
    for _ in range(2 * MISSES):
        with counted() as shapes:
            for copied in (False, False, True, True, False, False):
                total = place.add(x, None, x)
                total = place.watch(2 * x, x) if total is None else total
                norm_of(total.clone() if copied else total, weight, 1e-5, False)
        assert len(shapes) >= 3
    assert not place.alone


@needs_native
@pytest.mark.parametrize("change", ["weight", "eps", "zero_centered"])
def test_another_norm_computes_its_own_result(change: str) -> None:
    x = torch.randn(4, N).requires_grad_()
    first = {"weight": torch.ones(N), "eps": 1e-5, "zero_centered": False}
    second = {
        **first,
        change: {"weight": torch.rand(N), "eps": 1e-1, "zero_centered": True}[change],
    }
    place = ResidualSum()
    with counted() as shapes:
        for norm in (first, first, second, second):
            normed, total = pass_through(place, x, None, x, *norm.values())
            expected = rms_norm(
                total, norm["weight"], norm["eps"], zero_centered=norm["zero_centered"]
            )
            assert torch.equal(normed, expected)
    assert len(shapes) == 3
    assert not place.alone


class Whole(torch.autograd.Function):
    """A layer as a checkpoint computes it: what is within has no part in the graph."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(stream)
        return layer(stream)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        stream = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(stream).backward(grad)
        return None, stream.grad


@needs_native
@pytest.mark.parametrize("cut", [False, True])
def test_a_sum_that_comes_out_of_a_checkpoint_has_its_gradient(cut: bool) -> None:
    """Its norm belongs to the graph behind the checkpoint, not to what was computed within.

    `cut`: what is added within wants a gradient of its own.
    """
    place, norm = ResidualSum(), (torch.rand(N), 1e-5, False)
    given, scale = torch.randn(4, N), torch.rand(N).requires_grad_()

    def layer(place: ResidualSum | None, stream: Tensor) -> Tensor:
        x = stream.sin() * scale
        if cut and not torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        with torch.enable_grad():  # as Megatron adds
            total = None if place is None else place.add(x, None, stream)
            if total is not None:
                return total
            total = stream + x
            return total if place is None else place.watch(total, x)

    def gradients(place: ResidualSum | None) -> list[Tensor]:
        """Of two passes, the second of which begins before the first goes back."""
        stream = given.clone().requires_grad_()
        outputs = []
        for _ in range(2):
            total = Whole.apply(partial(layer, place), stream)
            normed = norm_of(total, *norm)
            outputs.append(rms_norm(total, norm[0], norm[1]) if normed is None else normed)
        scale.grad = None
        for each in reversed(outputs):
            each.sin().sum().backward()
        assert stream.grad is not None
        assert scale.grad is not None
        return [*outputs, stream.grad, scale.grad]

    expected = gradients(None)
    for _ in range(3):
        assert all(map(torch.equal, gradients(place), expected))


@needs_native
def test_a_sum_that_was_changed_is_normalized_anew() -> None:
    place, x, norm = ResidualSum(), torch.randn(4, N).requires_grad_(), (torch.rand(N), 1e-5, False)
    pass_through(place, x, None, x, *norm)
    total = place.add(x, None, x)
    assert total is not None
    with torch.no_grad():
        total.mul_(2)
    assert norm_of(total, *norm) is None
    pass_through(place, x, None, x, *norm)
    assert place.norm is not None, "learnt anew"


@needs_native
def test_a_second_reader_computes_for_itself() -> None:
    """Multi-token prediction reads what the last norm has read."""
    place, x, weight = ResidualSum(), torch.randn(4, N).requires_grad_(), torch.ones(N)
    for _ in range(2):
        _, total = pass_through(place, x, None, x, weight, 1e-5, False)
    assert norm_of(total, weight, 1e-5, False) is None
    assert norm_of(total.detach(), weight, 1e-5, False) is None
    assert not place.alone


@needs_native
def test_what_is_not_computed_together() -> None:
    place, x, weight = ResidualSum(), torch.randn(4, N).requires_grad_(), torch.ones(N)
    pass_through(place, x, None, x, weight, 1e-5, False)
    assert place.add(x.bfloat16(), None, x) is None
    assert place.add(x[:2], None, x) is None
    assert place.add(x, torch.ones(N, dtype=torch.bfloat16), x) is None
    assert place.add(x, torch.ones(4, N), x) is None
    frozen = x.detach()
    assert place.add(frozen, None, frozen) is None
    assert not hasattr(place.watch(frozen + x, frozen), "accel_residual_sum")
    assert place.add(x, None, x) is not None


@needs_native
def test_what_is_compiled_computes_the_two_apart() -> None:
    """In one graph, and whatever was learnt before."""
    place, x = ResidualSum(), torch.randn(4, N).requires_grad_()
    norm = (torch.rand(N).requires_grad_(), 1e-5, False)
    compiled = torch.compile(pass_through, backend="eager", fullgraph=True)
    found = []
    with counted() as shapes:
        for run in (compiled, pass_through, compiled):
            normed, total = run(place, x, None, x, *norm)
            grads = torch.autograd.grad((normed.sin() + total).sum(), (x, norm[0]))
            found.append([normed, total, *grads])
        assert not shapes
        pass_through(place, x, None, x, *norm)
    assert len(shapes) == 1
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@needs_native
def test_a_norm_in_a_checkpoint_without_reentry_has_its_gradient() -> None:
    """Its sum is outside, where the norm was learnt; computed again, it finds no note."""
    x = torch.randn(4, N).requires_grad_()
    weight = torch.rand(N).requires_grad_()

    def normed_sine(total: Tensor) -> Tensor:
        normed = norm_of(total, weight, 1e-5, False)
        return (rms_norm(total, weight, 1e-5) if normed is None else normed).sin()

    def results(place: ResidualSum | None) -> list[Tensor]:
        pass_through(place, x, None, x, weight, 1e-5, False)
        total = None if place is None else place.add(x, None, x)
        y = checkpoint(normed_sine, x + x if total is None else total, use_reentrant=False)
        return [y, *torch.autograd.grad(y.sum(), (x, weight))]

    with counted() as shapes:
        found = results(ResidualSum())
    assert len(shapes) == 1
    assert all(map(torch.equal, found, results(None)))
