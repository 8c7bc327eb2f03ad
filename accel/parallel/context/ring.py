"""Ring attention: keys and values go from rank to rank while each rank attends to what it has.

    forward     block j of keys travels on while the attention of the own queries to it is computed; results
                are joined by their log-sum-exps in fp32
    backward    the same way once more, with the final log-sum-exp. The gradient of a block's keys goes
                straight to its owner, in the dtype of the keys, and only where queries saw them: with a
                causal mask three quarters of the keys, where a gradient that is added up along the ring
                in fp32 is as long as all keys and takes twice the bytes (four times in 16 bit)

Under a causal mask (zig-zag: `accel.parallel.context.zigzag`) all queries of a rank see the first half of an
earlier rank's keys, and its second half of queries sees all keys of a later rank: the same work. The own
block is computed first in the forward; in the backward one half of its work hides the first block's way and
the other half the last gradient's.

Two rings     with a `window` of W ranks, keys go around W neighbours (a node) while the next node's are on
              their way: between nodes every rank sends at once, each block once
Keeping       `keep` what of a block's `keys`, or of `keys and values`, stays for the backward instead of a
              second journey: N - 1 times as many bytes
Memory        two blocks of keys and values beside the own ones; in the backward two more of gradients, and
              sums in fp32 if the inputs are 16 bit

Source: Liu et al. 2023 (arXiv:2310.01889); two rings: Gu et al. 2024 (arXiv:2406.18485).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.parallel.collectives import Transfer
from accel.parallel.context.parts import Attention, Part
from accel.parallel.context.zigzag import halves

__all__ = [
    "KEPT",
    "Block",
    "Ring",
    "RingSettings",
    "blocks_of",
    "ring_attention",
    "ring_settings",
    "switch_on",
]

Half = Literal["first", "second", "both"]
Kept = Literal["none", "keys", "keys and values"]
KEPT: tuple[Kept, ...] = ("none", "keys", "keys and values")


@dataclass(frozen=True)
class Ring:
    """How blocks travel."""

    window: int = 1
    """Neighbours that form the inner ring; 1: there is one ring."""
    keep: Kept = "none"

    def check(self, num_ranks: int) -> None:
        """Raise ValueError for a window that does not divide the ranks."""
        if self.window < 1 or num_ranks % self.window:
            fits = [w for w in range(1, num_ranks + 1) if num_ranks % w == 0]
            raise ValueError(
                f"context parallelism: a window of {self.window} ranks does not divide the ring of "
                f"{num_ranks}; use one of {', '.join(map(str, fits))}"
            )


@dataclass(frozen=True)
class RingSettings:
    """Of all layers."""

    window: int = 1
    keep: Kept = "none"
    interval: int = 0
    """Layers between two that keep: 0, all of them do."""

    def of_layer(self, number: int | None) -> Ring:
        """`number` counts from 1; None: it keeps."""
        keeps = ((number or 1) - 1) % (self.interval + 1) == 0
        return Ring(self.window, self.keep if keeps else "none")


_SETTINGS: list[RingSettings] = []


def switch_on(settings: RingSettings) -> Callable[[], None]:
    """What the layers of this process ask for; returns what ends that."""
    _SETTINGS[:] = [settings]
    return _SETTINGS.clear


def ring_settings() -> RingSettings:
    return _SETTINGS[0] if _SETTINGS else RingSettings()


class Block(NamedTuple):
    """Halves of a rank's queries and of a block's keys that see each other."""

    queries: Half
    keys: Half
    causal: bool = False


def blocks_of(rank: int, owner: int, causal: bool) -> tuple[list[Block], list[Block]]:
    """What of the keys of `owner` the queries of `rank` see, in two steps of which one may be empty."""
    if not causal:
        return ([Block("first", "both")], [Block("second", "both")])
    if owner < rank:
        return [Block("both", "first")], []
    if owner > rank:
        return [Block("second", "both")], []
    diagonal = [Block("first", "first", True), Block("second", "second", True)]
    return [Block("second", "first")], diagonal


def ring_order(num_ranks: int, window: int) -> list[tuple[int, int]]:
    """For each block in turn how far away its owner is: nodes, and places within the node."""
    return [(a, b) for a in range(num_ranks // window) for b in range(window)]


def moved(rank: int, by: tuple[int, int], num_ranks: int, window: int) -> int:
    node, place = divmod(rank, window)
    return (node + by[0]) % (num_ranks // window) * window + (place + by[1]) % window


def ring_attention(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    starts: Tensor | None = None,
    ring: Ring | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        q: `[S, B, H, D]`, or `[T, H, D]` with `starts`; on each rank two chunks of every sequence.
        k, v: the same with G heads; v may have a width of its own.
        starts: where the sequences of the whole pack start.

    Returns:
        `[S, B, H, E]` or `[T, H, E]`.

    Raises:
        ValueError: a window that does not divide the ranks.
    """
    ring = ring or Ring()
    ring.check(group.size())
    layout = _Layout(group.size(), group.rank(), q.shape[0], starts)
    out: Tensor = _RingAttention.apply(q, k, v, attention, layout, group, causal, ring)
    return out


class _Layout:
    """Where the halves of this rank's tokens are, and how the kernel is told about blocks of them."""

    def __init__(self, ranks: int, rank: int, num_tokens: int, starts: Tensor | None) -> None:
        self.ranks, self.rank, self._starts = ranks, rank, starts
        here = None if starts is None else starts // ranks
        first, second = halves(here, num_tokens)
        self._places: dict[Half, Any] = {"first": first, "second": second, "both": slice(None)}
        self._chunk: int | Tensor = num_tokens // 2
        if starts is not None:
            self._chunk = starts.diff() // (2 * ranks)

    def take(self, x: Tensor, half: Half, dim: int = 0) -> Tensor:
        """A view, but of packs a copy."""
        place = self._places[half]
        if isinstance(place, Tensor):
            return x.index_select(dim, place)
        return x[(slice(None),) * (dim % x.ndim) + (place,)]

    def put_(self, x: Tensor, half: Half, value: Tensor, dim: int = 0) -> None:
        """Back what `take` gave and was changed in place."""
        place = self._places[half]
        if isinstance(place, Tensor):
            x.index_copy_(dim, place, value)

    def add_(self, x: Tensor, half: Half, value: Tensor) -> None:
        place = self._places[half]
        if isinstance(place, Tensor):
            x.index_add_(0, place, value.to(x.dtype))
        else:
            x[place] += value

    def part(self, block: Block, owner: int) -> Part:
        return Part(
            causal=block.causal,
            cu_seqlens_q=self._lengths(block.queries),
            cu_seqlens_k=self._lengths(block.keys),
            first_query=self._chunk * self._number(self.rank, block.queries),
            first_key=self._chunk * self._number(owner, block.keys),
        )

    def _number(self, rank: int, half: Half) -> int:
        """Which of the sequence's chunks begins it."""
        return 2 * self.ranks - 1 - rank if half == "second" else rank

    def _lengths(self, half: Half) -> Tensor | None:
        if self._starts is None:
            return None
        return self._starts // (2 * self.ranks) * (2 if half == "both" else 1)


def _halved(blocks: Sequence[Block]) -> list[Block]:
    """As blocks of neighbouring tokens."""

    def both(half: Half) -> list[Half]:
        return ["first", "second"] if half == "both" else [half]

    return [
        Block(queries, keys, block.causal)
        for block in blocks
        for queries in both(block.queries)
        for keys in both(block.keys)
    ]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: Attention,
        layout: _Layout,
        group: dist.ProcessGroup,
        causal: bool,
        ring: Ring,
    ) -> Tensor:
        joined = _Joined(q, v, layout)
        kept: list[Tensor] = []
        for step, owner, (keys, values) in _arriving([k, v], group, ring.window):
            for block in _forward_blocks(layout.rank, owner, causal, attention.dropout > 0):
                parts = (layout.take(q, block.queries), *_of(layout, block, keys, values))
                joined.add(block.queries, *attention.forward(*parts, layout.part(block, owner)))
            if step is not None and ring.keep != "none":
                kept += [keys] if ring.keep == "keys" else [keys, values]
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, joined.lse, *kept)
        ctx.attention, ctx.layout, ctx.group, ctx.causal, ctx.ring = (
            *(attention, layout, group, causal),
            ring,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        q, k, v, out, lse, *kept = ctx.saved_tensors
        layout, attention, ring = ctx.layout, ctx.attention, ctx.ring
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))

        def compute(
            blocks: Sequence[Block], owner: int, k: Tensor, v: Tensor
        ) -> list[tuple[Half, Tensor, Tensor]]:
            found = []
            for block in _halved(blocks) if attention.dropout else blocks:
                dq_part, dk_part, dv_part = attention.gradients(
                    layout.take(dout, block.queries),
                    layout.take(q, block.queries),
                    *_of(layout, block, k, v),
                    layout.take(out, block.queries),
                    layout.take(lse, block.queries, -1),
                    layout.part(block, owner),
                )
                layout.add_(dq, block.queries, dq_part)
                found.append((block.keys, dk_part, dv_part))
            return found

        def add_own(parts: Sequence[tuple[Half, Tensor, Tensor]]) -> None:
            for half, dk_part, dv_part in parts:
                layout.add_(dk, half, dk_part)
                layout.add_(dv, half, dv_part)

        own, rest_of_own = blocks_of(layout.rank, layout.rank, ctx.causal)
        returning: _Returning | None = None
        for step, owner, (keys, values) in _again(k, v, kept, ctx.group, ring):
            if step is None:
                add_own(compute(own, owner, keys, values))
                continue
            blocks = [
                block for blocks in blocks_of(layout.rank, owner, ctx.causal) for block in blocks
            ]
            if not ctx.causal and not attention.dropout:
                blocks = [Block("both", "both")]
            parts = compute(blocks, owner, keys, values)
            if returning is not None:
                add_own(returning.received())
            returning = _Returning(parts, step, owner, layout, k, v, ctx.group, ctx.causal, ring)
        add_own(compute(rest_of_own, layout.rank, k, v))
        if returning is not None:
            add_own(returning.received())
        return (*(t.to(q.dtype) for t in (dq, dk, dv)), *[None] * 5)


def _forward_blocks(rank: int, owner: int, causal: bool, neighbours_only: bool) -> list[Block]:
    if neighbours_only:
        return _halved([block for blocks in blocks_of(rank, owner, causal) for block in blocks])
    if owner == rank or not causal:
        return [Block("both", "both", causal)]
    return blocks_of(rank, owner, causal)[0]


def _of(layout: _Layout, block: Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return layout.take(k, block.keys), layout.take(v, block.keys)


class _Joined:
    """Results over parts of the keys, joined: the weight of each is the share of its sum of exponentials."""

    def __init__(self, q: Tensor, v: Tensor, layout: _Layout) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
        self.lse = torch.full((*q.shape[1:-1], q.shape[0]), -torch.inf, dtype=wide, device=q.device)
        self._layout, self._empty = layout, True

    def add(self, half: Half, out: Tensor, lse: Tensor) -> None:
        """`out` `[Q, ..., H, E]` and `lse` `[..., H, Q]` of that half of the queries."""
        if self._empty and half == "both":
            self.out, self.lse = out.to(self.out.dtype), lse
        else:
            known = self._layout.take(self.lse, half, -1)
            # of two parts without keys, -inf - -inf: nothing to add
            share = torch.sigmoid(lse - known).nan_to_num_(0.0)
            rows = self._layout.take(self.out, half)
            rows.lerp_(out.to(rows.dtype), share.movedim(-1, 0).unsqueeze(-1))
            self._layout.put_(self.out, half, rows)
            known.copy_(torch.logaddexp(known, lse))
            self._layout.put_(self.lse, half, known, -1)
        self._empty = False


def _arriving(
    own: Sequence[Tensor], group: dist.ProcessGroup, window: int
) -> Iterator[tuple[tuple[int, int] | None, int, list[Tensor]]]:
    """Step, owner and tensors of each rank's block, the own first; the next travels meanwhile.

    The step of the own block is None.
    """
    ranks, me = group.size(), group.rank()
    sizes = [t.numel() for t in own]
    first = torch.cat([t.reshape(-1) for t in own])

    def sent(block: Tensor, by: tuple[int, int]) -> Transfer:
        back = (-by[0], -by[1])
        peers = moved(me, by, ranks, window), moved(me, back, ranks, window)
        return Transfer(block, torch.empty_like(block), group, *peers)

    for node in range(ranks // window):
        across = sent(first, (1, 0)) if node + 1 < ranks // window else None
        block = first
        for place in range(window):
            along = sent(block, (0, 1)) if place + 1 < window else None
            step = (node, place) if node or place else None
            parts = [p.view(t.shape) for p, t in zip(block.split(sizes), own, strict=True)]
            yield step, moved(me, (-node, -place), ranks, window), parts
            if along is not None:
                block = along.received()
                along.wait_sent()
        if across is not None:
            first = across.received()
            across.wait_sent()


def _again(
    k: Tensor, v: Tensor, kept: Sequence[Tensor], group: dist.ProcessGroup, ring: Ring
) -> Iterator[tuple[tuple[int, int] | None, int, tuple[Tensor, Tensor]]]:
    """The blocks of the forward, from what was kept and, for the rest, from the others once more."""
    ranks, me = group.size(), group.rank()
    if ring.keep == "keys and values":
        blocks = [(k, v), *zip(kept[::2], kept[1::2], strict=True)]
        for (node, place), block in zip(ring_order(ranks, ring.window), blocks, strict=True):
            step = (node, place) if node or place else None
            yield step, moved(me, (-node, -place), ranks, ring.window), block
        return
    known = iter([k, *kept])
    keeps = ring.keep == "keys"
    for step, owner, parts in _arriving([v] if keeps else [k, v], group, ring.window):
        yield step, owner, (next(known), parts[0]) if keeps else (parts[0], parts[1])


class _Returning:
    """Gradients of a block on their way to its owner, and those of the own block from who computed them."""

    def __init__(
        self,
        parts: Sequence[tuple[Half, Tensor, Tensor]],
        step: tuple[int, int],
        owner: int,
        layout: _Layout,
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup,
        causal: bool,
        ring: Ring,
    ) -> None:
        ranks, me = group.size(), group.rank()
        computer = moved(me, step, ranks, ring.window)
        # what who computes has seen of the own block
        theirs = {b.keys for blocks in blocks_of(computer, me, causal) for b in blocks}
        self._half: Half = "first" if theirs == {"first"} else "both"
        merged = _merged(parts, layout, k, v)
        self._shapes = [layout.take(t, self._half).shape for t in (k, v)]
        into = k.new_empty(sum(shape.numel() for shape in self._shapes))
        self._transfer = Transfer(merged, into, group, owner, computer)

    def received(self) -> list[tuple[Half, Tensor, Tensor]]:
        flat = self._transfer.received()
        self._transfer.wait_sent()
        sizes = [shape.numel() for shape in self._shapes]
        dk, dv = (p.view(s) for p, s in zip(flat.split(sizes), self._shapes, strict=True))
        return [(self._half, dk, dv)]


def _merged(
    parts: Sequence[tuple[Half, Tensor, Tensor]], layout: _Layout, k: Tensor, v: Tensor
) -> Tensor:
    """One flat tensor: of the half of the keys that was seen."""
    if len(parts) == 1:
        return torch.cat([t.reshape(-1) for t in parts[0][1:]])
    wide = torch.promote_types(k.dtype, torch.float32)
    half: Half = "first" if all(part[0] == "first" for part in parts) else "both"
    sums = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v)]
    for at, *grads in parts:
        for total, grad in zip(sums, grads, strict=True):
            layout.add_(total, at, grad)
    return torch.cat([layout.take(t, half).to(k.dtype).reshape(-1) for t in sums])
