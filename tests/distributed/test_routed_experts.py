"""Experts over 2 and 4 ranks, their rows under way while others are computed: results and gradients against
one process in fp64, weight gradients bit for bit against one product, copies, empty ranks, bad input."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel.memory.recompute import Recomputed
from accel.parallel.experts.exchange import Experts, Loan, routed_experts
from accel.parallel.experts.plan import Copy
from accel.parallel.experts.traffic import Traffic
from accel.parallel.split_backward import input_part

HIDDEN, FFN, EXPERTS = 16, 24, 8

on_2_and_4_ranks = pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.distributed(world_size=n), id=str(n)) for n in (2, 4)],
)


@pytest.fixture(autouse=True)
def group(gloo_group: None) -> Any:
    return dist.group.WORLD


def counted(kind: str, ranks: int) -> list[list[int]]:
    """Rows of each rank for each expert, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(1, 9, (ranks, EXPERTS), generator=generator)
    if kind == "skewed":
        found[:, 0] = 40
        found[:, 3:] //= 4
    elif kind == "a rank that sends nothing":
        found[0] = 0
    elif kind == "a rank that gets nothing":
        found[:, -EXPERTS // ranks :] = 0
    elif kind == "own rows alone":
        each = EXPERTS // ranks
        owner = torch.arange(EXPERTS) // each
        found = found * (owner == torch.arange(ranks)[:, None])
    elif kind == "others' rows alone":
        each = EXPERTS // ranks
        owner = torch.arange(EXPERTS) // each
        found = found * (owner != torch.arange(ranks)[:, None])
    elif kind == "no rows at all":
        found = torch.zeros_like(found)
    return found.tolist()


KINDS = (
    "even",
    "skewed",
    "a rank that sends nothing",
    "a rank that gets nothing",
    "own rows alone",
    "others' rows alone",
    "no rows at all",
)


def swiglu(x: Tensor, probs: Tensor, first: Any, second: Any) -> Tensor:
    gate, up = first(x).chunk(2, dim=-1)
    return second(torch.nn.functional.silu(gate) * up * probs[:, None])


class Layer:
    """Everybody's rows, weights and gradients of the results, and what one process makes of them."""

    def __init__(self, counts: list[list[int]]) -> None:
        generator = torch.Generator().manual_seed(2)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.counts = counts
        self.x = [drawn(sum(row), HIDDEN) for row in counts]
        self.probs = [drawn(sum(row)).sigmoid() for row in counts]
        self.dy = [drawn(sum(row), HIDDEN) for row in counts]
        self.weights = [drawn(EXPERTS, 2 * FFN, HIDDEN) / 4, drawn(EXPERTS, HIDDEN, FFN) / 4]

    def expected(self) -> dict[str, Any]:
        x, probs = ([t.clone().requires_grad_() for t in ts] for ts in (self.x, self.probs))
        weights = [w.clone().requires_grad_() for w in self.weights]
        y = [
            torch.cat(
                [
                    swiglu(
                        rows,
                        p,
                        lambda t, e=e: t @ weights[0][e].T,
                        lambda t, e=e: t @ weights[1][e].T,
                    )
                    for e, (rows, p) in enumerate(
                        zip(x[rank].split(row), probs[rank].split(row), strict=True)
                    )
                ]
            )
            for rank, row in enumerate(self.counts)
        ]
        torch.autograd.backward(y, self.dy)
        zeros = [torch.zeros_like(w) for w in weights]
        return {
            "y": [t.detach() for t in y],
            "dx": [t.grad for t in x],
            "dprobs": [t.grad for t in probs],
            "dw": [z if w.grad is None else w.grad for w, z in zip(weights, zeros, strict=True)],
        }

    def found(
        self,
        dtype: torch.dtype,
        into_main_grad: bool = False,
        lent_before: bool = False,
        moved: bool = False,
        in_two_parts: bool = False,
        **traffic: Any,
    ) -> dict[str, Any]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        layers = [
            [w.requires_grad_() for w in ws[mine].to(dtype, copy=True)] for ws in self.weights
        ]
        for weight in (*layers[0], *layers[1]):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        x, probs = (ts[rank].to(dtype, copy=True).requires_grad_() for ts in (self.x, self.probs))
        experts = Experts(
            lambda x, probs, counts, first, second: swiglu(x, probs, first, second),
            (layers[0], layers[1]),
            into_main_grad,
        )
        loan, each = None, EXPERTS // ranks
        lent: list[StorageWeakRef] = []
        if in_two_parts:
            lent_before = True
        if lent_before:
            owners = (lambda e: e // each, lambda e: e % each)
            loan = Loan(traffic["copies"], dist.group.WORLD, experts, *owners)
            dist.barrier()  # as the counts' collective comes between
            lent = [StorageWeakRef(w[0].untyped_storage()) for p in loan._came.values() for w in p]
        y, _ = routed_experts(
            *(x, probs, Traffic(self.counts, rank, **traffic), dist.group.WORLD, experts),
            loan=loan,
        )
        del loan
        for weight in (*layers[0], *layers[1]) if moved else ():
            old, weight.data = weight.data, weight.detach().clone()
            old.fill_(torch.nan)
        of = (lambda w: w.main_grad) if into_main_grad else (lambda w: w.grad)
        with input_part() if in_two_parts else contextlib.nullcontext() as part:
            y.backward(self.dy[rank].to(dtype))
        if part is not None:
            assert len(part) == 2 * each
            assert all(storage.expired() for storage in lent), "copies are given back before"
            assert not any(of(w) is not None and of(w).any() for w in (*layers[0], *layers[1]))
            for turn in range(ranks):
                if rank == turn:
                    part.compute()  # without another rank
                dist.barrier()
        dw = [torch.stack([of(w) for w in weights]) for weights in layers]
        return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, "dw": dw, "mine": mine}

    def check(self, found: dict[str, Any], tolerance: float) -> None:
        rank, expected = dist.get_rank(), self.expected()
        for name in ("y", "dx", "dprobs"):
            torch.testing.assert_close(
                found[name].double(), expected[name][rank], rtol=tolerance, atol=tolerance
            )
        for one, other in zip(found["dw"], expected["dw"], strict=True):
            torch.testing.assert_close(
                one.double(), other[found["mine"]], rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("kind", KINDS)
@on_2_and_4_ranks
def test_equals_one_process(ranks: int, kind: str) -> None:
    layer = Layer(counted(kind, ranks))
    for slices in (1, 2, 3, 4, 7):
        layer.check(layer.found(torch.float64, slices=slices), 1e-12)


@on_2_and_4_ranks
def test_weights_may_lie_elsewhere_in_the_backward_pass(ranks: int) -> None:
    """Megatron-FSDP gathers them anew, into whichever of its buffers is free."""
    layer = Layer(counted("even", ranks))
    layer.check(layer.found(torch.float64, moved=True), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@on_2_and_4_ranks
def test_copies_change_nothing(ranks: int, kind: str) -> None:
    """Each expert everywhere; some on some; and one on ranks without rows for it."""
    layer = Layer(counted(kind, ranks))
    owner = [e * ranks // EXPERTS for e in range(EXPERTS)]
    everywhere = {Copy(e, r) for e in range(EXPERTS) for r in range(ranks) if r != owner[e]}
    some = {copy for copy in everywhere if (copy.expert + copy.rank) % 3 == 0}
    one = {copy for copy in everywhere if copy.expert == 0}
    for copies in (everywhere, some, one):
        found = layer.found(torch.float64, copies=frozenset(copies), slices=2)
        layer.check(found, 1e-12)
        before = layer.found(torch.float64, lent_before=True, copies=frozenset(copies), slices=2)
        assert torch.equal(before["y"], found["y"])
        assert torch.equal(before["dx"], found["dx"])
        assert all(map(torch.equal, before["dw"], found["dw"]))


@pytest.mark.parametrize("into_main_grad", [False, True])
@on_2_and_4_ranks
def test_gradients_of_weights_add_up_in_fp32(ranks: int, into_main_grad: bool) -> None:
    layer = Layer(counted("skewed", ranks))
    copies = frozenset({Copy(0, ranks - 1), Copy(EXPERTS - 1, 0)})
    found = layer.found(torch.float32, into_main_grad, copies=copies)
    layer.check(found, 1e-4)
    bf16 = layer.found(torch.bfloat16, into_main_grad, copies=copies)
    layer.check(bf16, 0.25)  # values of up to 30, of 8 bits
    if into_main_grad:
        assert all(dw.dtype == torch.float32 for dw in bf16["dw"])


@pytest.mark.parametrize("into_main_grad", [False, True])
@on_2_and_4_ranks
def test_weights_may_get_theirs_in_a_part_of_their_own(ranks: int, into_main_grad: bool) -> None:
    layer = Layer(counted("skewed", ranks))
    copies = frozenset({Copy(0, ranks - 1), Copy(EXPERTS - 1, 0)})
    expected, found = (
        layer.found(torch.float32, into_main_grad, in_two_parts=split, copies=copies, slices=2)
        for split in (False, True)
    )
    assert all(map(torch.equal, found["dw"], expected["dw"]))
    for name in ("y", "dx", "dprobs"):
        assert torch.equal(found[name], expected[name])


@on_2_and_4_ranks
def test_what_is_beside_is_computed_and_differentiated(ranks: int) -> None:
    layer = Layer(counted("even", ranks))
    rank = dist.get_rank()
    each = EXPERTS // ranks
    weights = [
        [w.clone().requires_grad_() for w in ws[rank * each :][:each]] for ws in layer.weights
    ]
    x, probs = (ts[rank].clone().requires_grad_() for ts in (layer.x, layer.probs))
    linear = torch.nn.Linear(5, 3, dtype=torch.float64)
    hidden = torch.arange(10.0, dtype=torch.float64).view(2, 5).requires_grad_()
    experts = Experts(
        lambda x, probs, counts, first, second: swiglu(x, probs, first, second),
        (weights[0], weights[1]),
    )
    given: list[weakref.ref[Tensor]] = []

    def beside(hidden: Tensor) -> Tensor:
        out = linear(hidden)
        given.append(weakref.ref(out))
        return out

    y, shared = routed_experts(
        x, probs, Traffic(layer.counts, rank), dist.group.WORLD, experts, beside, hidden
    )
    assert shared is not None
    assert given[0]() is None, "the result is the caller's to keep"
    torch.autograd.backward([y, shared], [layer.dy[rank], torch.ones(2, 3, dtype=torch.float64)])
    assert torch.equal(shared, linear(hidden))
    assert torch.equal(hidden.grad, torch.ones(2, 3, dtype=torch.float64) @ linear.weight)
    assert torch.equal(linear.weight.grad, hidden.detach().sum(0).expand(3, 5))
    assert torch.allclose(x.grad, layer.expected()["dx"][rank])


@on_2_and_4_ranks
def test_without_gradients_nothing_is_kept(ranks: int) -> None:
    layer = Layer(counted("even", ranks))
    with torch.no_grad():
        rank = dist.get_rank()
        each = EXPERTS // ranks
        own = slice(rank * each, (rank + 1) * each)
        experts = Experts(
            lambda x, probs, counts, first, second: swiglu(x, probs, first, second),
            (list(layer.weights[0][own]), list(layer.weights[1][own])),
        )
        y, _ = routed_experts(
            layer.x[rank], layer.probs[rank], Traffic(layer.counts, rank), dist.group.WORLD, experts
        )
    assert y.grad_fn is None
    assert torch.allclose(y, layer.expected()["y"][rank])


@on_2_and_4_ranks
def test_the_rows_that_were_given_are_not_kept(ranks: int) -> None:
    """For the backward: pieces have theirs."""
    layer, rank, each = Layer(counted("even", ranks)), dist.get_rank(), EXPERTS // ranks
    own = slice(rank * each, (rank + 1) * each)
    weights = [[w.clone().requires_grad_() for w in ws[own]] for ws in layer.weights]
    experts = Experts(
        lambda x, probs, counts, first, second: swiglu(x, probs, first, second),
        (weights[0], weights[1]),
    )
    copies = frozenset({Copy(0, ranks - 1)})
    given = layer.x[rank].numpy().copy()
    gone = weakref.ref(given)
    x, probs = torch.from_numpy(given), layer.probs[rank].clone().requires_grad_()
    traffic = Traffic(layer.counts, rank, copies)
    y, _ = routed_experts(x, probs, traffic, dist.group.WORLD, experts)
    del x, given
    assert gone() is None
    y.backward(layer.dy[rank])
    assert torch.allclose(probs.grad, layer.expected()["dprobs"][rank])


@pytest.mark.distributed(world_size=2)
def test_rows_are_not_kept_where_they_are_computed_again() -> None:
    """Neither the experts' rows and their probs, come or own, nor what is beside."""
    counts = counted("even", 2)
    layer, rank = Layer(counts), dist.get_rank()
    each = EXPERTS // 2
    mine = slice(rank * each, (rank + 1) * each)
    given: list[StorageWeakRef] = []

    def note(*tensors: Tensor) -> None:
        given.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)

    def mlp(x: Tensor, probs: Tensor, counts: Tensor, first: Any, second: Any) -> Tensor:
        note(x, probs)
        return swiglu(x, probs, first, second)

    def beside(x: Tensor) -> Tensor:
        note(x)
        return x * x

    def gradients(again: bool) -> list[Tensor]:
        weights = [[w.clone().requires_grad_() for w in ws[mine]] for ws in layer.weights]
        x, probs, hidden = (
            ts[rank].clone().requires_grad_() for ts in (layer.x, layer.probs, layer.dy)
        )
        copies = frozenset({Copy(0, 1), Copy(EXPERTS - 1, 0)})

        def forward(x: Tensor, probs: Tensor, hidden: Tensor) -> Tensor:
            traffic = Traffic(counts, rank, copies)
            experts = Experts(mlp, (weights[0], weights[1]))
            out = routed_experts(
                *(x * 1, probs * 1, traffic, dist.group.WORLD, experts, beside, hidden * 1)
            )
            return out[0] + out[1]

        given.clear()
        if again:
            layers = Recomputed()
            y = layers(forward, x, probs, hidden)
            z = y * 1
            assert layers.free(z) > 0
            assert given
            assert all(storage.expired() for storage in given)
        else:
            z = forward(x, probs, hidden)
        z.backward(layer.dy[rank])
        return [t.grad for t in (x, probs, hidden, *weights[0], *weights[1])]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.distributed(world_size=2)
def test_bad_input_is_one_error() -> None:
    counts = counted("even", 2)
    layer, rank = Layer(counts), dist.get_rank()
    experts = Experts(lambda *args: args[0], ([], []))
    with pytest.raises(ValueError, match=r"x must be \[\d+, H\]"):
        routed_experts(
            layer.x[rank][1:], layer.probs[rank], Traffic(counts, rank), dist.group.WORLD, experts
        )
    with pytest.raises(ValueError, match="counts of 2 ranks as rank"):
        routed_experts(
            layer.x[rank], layer.probs[rank], Traffic(counts, 1 - rank), dist.group.WORLD, experts
        )
    loan = Loan([], dist.group.WORLD, Experts(experts.mlp, ([torch.ones(1)] * 4,) * 2), int, int)
    with pytest.raises(ValueError, match=r"a loan of \[\] for copies \[Copy\(expert=0, rank=1\)\]"):
        routed_experts(
            layer.x[rank],
            layer.probs[rank],
            Traffic(counts, rank, frozenset({Copy(0, 1)})),
            dist.group.WORLD,
            experts,
            loan=loan,
        )
    with pytest.raises(ValueError, match="7 experts on 2 ranks"):
        Traffic([row[:7] for row in counts], rank)
