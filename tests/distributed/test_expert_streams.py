"""Experts in two streams: what comes after what, and when memory is given out again, in a model of a device's
streams; each wait that is left out is found, and results are those of one stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from accel.memory.recompute import Recomputed
from accel.parallel.experts.exchange import Experts, Loan, routed_experts
from accel.parallel.experts.plan import Copy
from accel.parallel.experts.streams import Streams, TwoStreams
from accel.parallel.experts.traffic import Traffic
from accel.parallel.split_backward import input_part

from .stream_order import Order, followed
from .test_routed_experts import EXPERTS, HIDDEN, KINDS, Layer, counted, swiglu

CPU = torch.device("cpu")
COPIES = frozenset({Copy(0, 1), Copy(1, 1), Copy(EXPERTS - 1, 0)})

on_2_ranks = pytest.mark.distributed(world_size=2)


@pytest.fixture(autouse=True)
def group(gloo_group: None) -> Any:
    return dist.group.WORLD


def on_first_input(x: Tensor, probs: Tensor, counts: Tensor, first: Any, second: Any) -> Tensor:
    """An MLP that keeps the rows and probabilities that it is given, and multiplies others."""
    return swiglu(x * probs[:, None], torch.ones_like(probs), first, second) * probs[:, None]


def trained(
    streams: Streams | None,
    layer: Layer,
    copies: frozenset[Copy] = frozenset(),
    slices: int = 5,
    into_main_grad: bool = False,
    again: bool = False,
    in_two_parts: bool = False,
) -> list[Tensor]:
    """Results and gradients of three micro-batches."""
    rank, each = dist.get_rank(), EXPERTS // 2
    mine = slice(rank * each, (rank + 1) * each)
    weights = [[w.float().requires_grad_() for w in ws[mine]] for ws in layer.weights]
    shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
    torch.nn.init.eye_(shared.weight)
    for weight in (*weights[0], *weights[1]):
        weight.main_grad = torch.zeros_like(weight)
    experts = Experts(on_first_input, (weights[0], weights[1]), into_main_grad)
    found = []
    for _ in range(3):
        x, probs = (ts[rank].float().requires_grad_() for ts in (layer.x, layer.probs))

        def forward(x: Tensor, probs: Tensor) -> Tensor:
            traffic = Traffic(layer.counts, rank, copies, slices)
            loan = Loan(copies, dist.group.WORLD, experts, traffic.owner, lambda e: e % each)
            y, beside = routed_experts(
                *(x * 1, probs * 1, traffic, dist.group.WORLD, experts, shared, x * 1, loan),
                streams=streams,
            )
            return y + beside

        if again:
            layers = Recomputed()
            out = layers(forward, x, probs)
            y = out * 1
            assert layers.free(y) > 0
        else:
            y = forward(x, probs)
        with input_part() if in_two_parts else contextlib.nullcontext() as part:
            y.backward(layer.dy[rank].float())
        if part is not None:
            part.compute()
        found += [y.detach(), x.grad, probs.grad]
    of = (lambda w: w.main_grad) if into_main_grad else (lambda w: w.grad)
    return [*found, *map(of, (*weights[0], *weights[1])), shared.weight.grad]


@pytest.mark.parametrize("into_main_grad", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("kind", KINDS)
@on_2_ranks
def test_everything_is_in_order(
    kind: str, into_main_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(counted(kind, 2))
    for copies in (frozenset[Copy](), COPIES):
        for slices in (1, 3, 4):
            given = (layer, copies, slices, into_main_grad)
            expected = trained(None, *given)
            with followed(monkeypatch) as order:
                found = trained(TwoStreams(order.second, CPU, order), *given)
            assert not order.faults
            assert all(order.named("")[stream] for stream in ("first", "second", "messages"))
            assert all(map(torch.equal, found, expected))


@on_2_ranks
def test_a_part_for_the_weights_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(counted("even", 2))
    expected = trained(None, layer, COPIES)
    with followed(monkeypatch) as order:
        streams = TwoStreams(order.second, CPU, order)
        found = trained(streams, layer, COPIES, in_two_parts=True)
    assert not order.faults
    assert all(map(torch.equal, found, expected))


@on_2_ranks
def test_pieces_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """About half of the products are in each."""
    with followed(monkeypatch) as order:
        trained(TwoStreams(order.second, CPU, order), Layer(counted("even", 2)))
    products = order.named("grouped_gemm")
    assert min(products["first"], products["second"]) > sum(products.values()) / 3


@on_2_ranks
def test_layers_that_run_again_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(counted("even", 2))
    expected = trained(None, layer, COPIES)
    with followed(monkeypatch) as order:
        found = trained(TwoStreams(order.second, CPU, order), layer, COPIES, again=True)
    assert not order.faults
    assert all(map(torch.equal, found, expected))


class Without(TwoStreams):
    """Two streams that leave something out."""

    def __init__(self, order: Order, what: str) -> None:
        super().__init__(order.second, CPU, order)
        self._what = what

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        first, second = self._streams
        if self._what != "the wait at the beginning":
            second.wait_stream(first)
        yield
        if self._what != "the wait at the end":
            first.wait_stream(second)

    def share(self, tensors: Any) -> None:
        if self._what != "what the allocator is told":
            super().share(tensors)


@pytest.mark.parametrize(
    "what",
    ["nothing", "the wait at the beginning", "the wait at the end", "what the allocator is told"],
)
@on_2_ranks
def test_what_is_left_out_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with followed(monkeypatch) as order:
        trained(Without(order, what), Layer(counted("even", 2)), COPIES)
    assert bool(order.faults) == (what != "nothing"), order.faults
