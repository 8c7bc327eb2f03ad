"""Transfers of devices whose streams share one queue: they are posted one after the other, each beside what
hides it, and bring what they bring otherwise, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel
from accel.parallel import collectives, overlapped_linear
from accel.parallel.collectives import Messages
from accel.parallel.context import Attention, ContextGroups, Ring, context_attention
from accel.parallel.context import ring as ring_module
from accel.parallel.experts import exchange
from accel.parallel.experts.plan import Copy
from accel.parallel.overlapped_linear import FORMS, Plan, gather_matmul
from accel.testing.distributed import under_torchrun

from .test_context_parallel import TWO_RINGS
from .test_routed_experts import EXPERTS, Layer, counted

on_2_and_4_ranks = pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.distributed(world_size=n), id=str(n)) for n in (2, 4)],
)


@pytest.fixture(autouse=True)
def enabled(gloo_group: None) -> None:
    if under_torchrun():
        accel.enable(preset="fast")


@pytest.fixture
def one_queue(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """From when it is called on the device has one; gives how many messages left together."""
    found: list[int] = []
    post = collectives.post_together

    def noted(messages: Any) -> None:
        found.append(len(messages))
        post(messages)

    def switch() -> list[int]:
        for module in (overlapped_linear, ring_module, exchange):
            monkeypatch.setattr(module, "one_queue", lambda device: True)
        monkeypatch.setattr(collectives, "post_together", noted)
        return found

    return switch


def test_what_was_never_posted_is_not_waited_for() -> None:
    messages = Messages([], [], dist.group.WORLD, post=False)
    assert not messages.posted
    messages.release_sent()
    with pytest.raises(RuntimeError, match="never posted"):
        messages.wait_received()


@on_2_and_4_ranks
def test_rings(ranks: int, one_queue: Callable[[], list[int]]) -> None:
    world = dist.group.WORLD
    assert world is not None
    rings = [ring for ring in (Ring(), *TWO_RINGS) if ranks % ring.window == 0]
    torch.manual_seed(dist.get_rank())
    q, k, v, dout = (torch.randn(16, 2, 2, 4).requires_grad_() for _ in range(4))
    starts = torch.tensor([0, 4, 16], dtype=torch.int32) * ranks
    shared = ContextGroups.of(world, "p2p")
    assert shared is not None

    def attended(ring: Ring, causal: bool, packed: bool) -> list[torch.Tensor]:
        given = [t[:, 0] if packed else t for t in (q, k, v, dout)]
        cu = starts if packed else None
        out = context_attention(
            Attention(0.5), *given[:3], shared, causal=causal, starts=cu, ring=ring
        )
        return [out, *torch.autograd.grad(out, (q, k, v), given[3])]

    cases = list(product(rings, (True, False), (True, False)))
    expected = [attended(*case) for case in cases]
    found = one_queue()
    for case, wanted in zip(cases, expected, strict=True):
        assert all(map(torch.equal, attended(*case), wanted)), case
    assert max(found) == (
        4 if ranks == 4 else 2
    )  # the own halves, to the next and to the next node


@on_2_and_4_ranks
@pytest.mark.parametrize("kind", ["even", "skewed", "a rank that gets nothing"])
def test_experts(ranks: int, kind: str, one_queue: Callable[[], list[int]]) -> None:
    layer = Layer(counted(kind, ranks))
    owner = [e * ranks // EXPERTS for e in range(EXPERTS)]
    copies = {Copy(e, r) for e in range(EXPERTS) for r in range(ranks) if r != owner[e]}
    cases: list[dict[str, Any]] = [
        *({"slices": slices} for slices in (1, 2, 4, 7)),
        *({"slices": 3, "copies": frozenset(c for c in copies if c.expert < n)} for n in (1, 8)),
        {"slices": 3, "copies": frozenset(copies), "lent_before": True},
        {"slices": 3, "copies": frozenset(copies), "in_two_parts": True},
    ]
    expected = [layer.found(torch.float64, **case) for case in cases]
    found = one_queue()
    for case, wanted in zip(cases, expected, strict=True):
        got = layer.found(torch.float64, **case)
        for name in ("y", "dx", "dprobs"):
            assert torch.equal(got[name], wanted[name]), (case, name)
        assert all(map(torch.equal, got["dw"], wanted["dw"])), case
    assert max(found) == 2  # a slice's homecoming, another's way out


@on_2_and_4_ranks
@pytest.mark.parametrize("form", FORMS)
def test_gathers(ranks: int, form: Any, one_queue: Callable[[], list[int]]) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(dist.get_rank())
    # whose products have the same bits in pieces of any size
    x, w = torch.randint(-8, 9, (64, 24)).float(), torch.randint(-8, 9, (24, 12)).float()
    operands = [(x[:rows], w) for rows in (0, 1, 7, 64)]

    def gathered() -> list[torch.Tensor]:
        found = []
        for (x, w), chunks, keep in product(operands, (1, 2, 3, 100), (True, False)):
            y, whole = gather_matmul(x, w, group, Plan(chunks, form), keep=keep)
            found += [y] if whole is None else [y, whole]
        return found

    expected = gathered()
    one_queue()
    assert all(map(torch.equal, gathered(), expected))
