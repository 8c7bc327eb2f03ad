"""One rank of `bench context_parallel`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.parallel.collectives import Transfer
from accel.parallel.context import Attention, ContextGroups, Ring, context_attention, owners
from accel.parallel.context.parts import Part
from accel.testing.bench import OURS
from benchmarks._ranks import Call, group, in_turn
from benchmarks._ranks import run as run_ranks
from benchmarks.context_parallel import (
    ATTENTION,
    GATHERED,
    HEADS,
    IDEAL,
    KEPT,
    RANKS,
    SERIAL,
    TRANSFERS,
)

ROUNDS = 7
BACKWARD = "forward and backward"


class Sequences:
    """q, k and v of the whole, and this rank's part of them."""

    def __init__(self, quick: bool) -> None:
        self.tokens, self.heads, self.groups, self.width = (
            (256, 2, 1, 32) if quick else (4096, 8, 2, 64)
        )
        draw = torch.Generator().manual_seed(0)
        sizes = (self.heads, self.groups, self.groups, self.heads)
        self.whole = [torch.randn(self.tokens, 1, n, self.width, generator=draw) for n in sizes]
        own = owners(torch.tensor([0, self.tokens]), self.tokens, RANKS) == dist.get_rank()
        self.own = [t[own] for t in self.whole]
        self.attention = Attention(self.width**-0.5)

    @property
    def shape(self) -> str:
        return (
            f"causal attention of {self.tokens} tokens, {self.heads} heads of {self.width}, "
            f"{self.groups} of keys, fp32"
        )

    @property
    def block(self) -> int:
        """Numbers in a rank's keys and values."""
        return 2 * self.own[1].numel()


def run(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor], both: bool
) -> None:
    if not both:
        with torch.no_grad():
            attend(*tensors[:3])
        return
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    torch.autograd.grad(attend(q, k, v), (q, k, v), tensors[3])


def transfers(sequences: Sequences, both: bool) -> None:
    """What the ring of two ranks sends: keys and values, twice with the backward, and gradients home."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    whole = sequences.block
    # rank 1 sees the first half of rank 0's keys
    keys, home = (whole // 2, whole), (whole, whole // 2)
    sizes = [(keys[rank], keys[other])] * (1 + both) + [(home[rank], home[other])] * both
    for out, into in sizes:
        transfer = Transfer(torch.zeros(out), torch.empty(into), group())
        transfer.wait_received()
        transfer.wait_sent()


def blocks(sequences: Sequences, both: bool) -> None:
    """The ring's work with no link: the own block, then half of another of the same sizes."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = sequences.attention(q, k, v, Part(causal=True))
        half = len(q) // 2
        other = sequences.attention(q[half:], k, v, Part())
        return own + torch.cat([torch.zeros_like(other), other])

    run(attend, sequences.own, both)


def sides(sequences: Sequences, both: bool) -> dict[str, Call]:
    def split(comm_type: str, ring: Ring | None = None) -> Call:
        groups = ContextGroups.of(group(), comm_type)
        assert groups is not None
        attend = partial(
            context_attention, sequences.attention, groups=groups, causal=True, ring=ring
        )
        return partial(run, attend, sequences.own, both)

    def in_a_row() -> None:
        transfers(sequences, both)
        blocks(sequences, both)

    def one_rank() -> None:
        run(partial(sequences.attention, part=Part(causal=True)), sequences.whole, both)

    return {
        OURS: split("p2p"),
        **({KEPT: split("p2p", Ring(keep="keys and values"))} if both else {}),
        GATHERED: split("all_gather"),
        HEADS: split("a2a"),
        IDEAL: one_rank,
        ATTENTION: partial(blocks, sequences, both),
        TRANSFERS: partial(transfers, sequences, both),
        SERIAL: in_a_row,
    }


def alone(quick: bool) -> dict[str, Any]:
    """Seconds of a rank's share of the attention, and the bytes that the rank which sends most sends."""
    sequences = Sequences(quick)
    found = in_turn({IDEAL: sides(sequences, True)[IDEAL]}, 3)
    num_bytes = 5 * sequences.block * torch.float32.itemsize // 2
    return {"seconds": statistics.median(found[IDEAL]) / RANKS, "num_bytes": num_bytes}


def sent(quick: bool) -> dict[str, Any]:
    """Seconds of the transfers of a forward and a backward."""
    found = in_turn({TRANSFERS: partial(transfers, Sequences(quick), True)}, 5)
    return {"seconds": statistics.median(found[TRANSFERS])}


def ring(quick: bool) -> dict[str, Any]:
    sequences = Sequences(quick)
    rounds = 2 if quick else ROUNDS
    directions = {}
    for direction, both in (("forward", False), (BACKWARD, True)):
        seconds = in_turn(sides(sequences, both), rounds)
        seconds[IDEAL] = [took / RANKS for took in seconds[IDEAL]]
        directions[direction] = seconds
    return {"shape": sequences.shape, "rounds": rounds, "directions": directions}


if __name__ == "__main__":
    sys.exit(run_ranks({"alone": alone, "transfers": sent, "ring": ring}))
