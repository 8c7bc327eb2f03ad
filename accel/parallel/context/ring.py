"""Ring attention: keys and values go from rank to rank while each rank attends to what it has.

    forward     halves of blocks of keys travel on while the attention of the own queries to those before them
                is computed; results are joined by their log-sum-exps in fp32
    backward    the same way once more, with the final log-sum-exp. The gradient of a half of keys goes
                straight to its owner, in the dtype of the keys, and only where queries saw them: with a
                causal mask three quarters of the keys, where a gradient that is added up along the ring
                in fp32 is as long as all keys and takes twice the bytes (four times in 16 bit)

Under a causal mask (zig-zag: `accel.parallel.context.zigzag`) all queries of a rank see the first half of an
earlier rank's keys, and its second half of queries sees all keys of a later rank: the same work. The own
block is computed first in the forward; in the backward one half of its work hides the first piece's way and
the other half the last gradient's.

Two rings     with a `window` of W ranks, keys go around W neighbours (a node) while the next node's are on
              their way: between nodes every rank sends at once, each block once
Keeping       `keep` what of a block's `keys`, or of `keys and values`, stays for the backward instead of a
              second journey: N - 1 times as many bytes
Memory        a block and a half of keys and values beside the own ones (two in the first step); in the
              backward two more of gradients, and sums in fp32 if the inputs are 16 bit

Source: Liu et al. 2023 (arXiv:2310.01889); two rings: Gu et al. 2024 (arXiv:2406.18485).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.device.streams import one_queue
from accel.ops.attention import join_offset, offset_gradient
from accel.parallel.collectives import Messages, Outbox
from accel.parallel.context.parts import Attention, Part, place_of_chunk
from accel.parallel.context.zigzag import halves
from accel.slot import Slot

__all__ = [
    "RING",
    "Block",
    "Half",
    "Kept",
    "Ring",
    "RingSettings",
    "blocks_of",
    "moved",
    "ring_attention",
    "ring_order",
    "ring_settings",
]

Half = Literal["first", "second", "both"]
HALVES: tuple[Half, ...] = ("first", "second")
Kept = Literal["none", "keys", "keys and values"]


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
    """How the blocks of all layers travel."""

    window: int = 1
    keep: Kept = "none"
    interval: int = 0
    """Layers between two that keep: 0, all of them do."""

    def of_layer(self, number: int | None) -> Ring:
        """`number` counts from 1; None: it keeps."""
        keeps = ((number or 1) - 1) % (self.interval + 1) == 0
        return Ring(self.window, self.keep if keeps else "none")


RING = Slot[RingSettings]()
"""What was asked for in this process."""


def ring_settings() -> RingSettings:
    """The settings of this process: those that were asked for, or the defaults."""
    return RING.get() or RingSettings()


class Block(NamedTuple):
    """Halves of a rank's queries and of a rank's keys that see each other."""

    queries: Half
    keys: Half
    causal: bool = False


def blocks_of(rank: int, owner: int, causal: bool) -> list[Block]:
    """What of the keys of `owner` the queries of `rank` see, for each half of the keys one at most.

    Of the own keys there are more, of which the first hides the first piece's way in the backward.
    """
    if owner == rank and causal:
        diagonal = [Block("first", "first", True), Block("second", "second", True)]
        return [Block("second", "first"), *diagonal]
    if owner == rank:
        return [Block("first", "both"), Block("second", "both")]
    if not causal:
        return [Block("both", "first"), Block("both", "second")]
    if owner < rank:
        return [Block("both", "first")]
    return [Block("second", "first"), Block("second", "second")]


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
    out: Tensor = _RingAttention.apply(
        q, k, v, attention.offset, attention, layout, group, causal, ring
    )
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
            first_query=place_of_chunk(self._number(self.rank, block.queries), self._chunk),
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
    """As blocks of neighbouring tokens, whose places dropout knows."""

    def both(half: Half) -> list[Half]:
        return ["first", "second"] if half == "both" else [half]

    return [
        Block(queries, keys, block.causal)
        for block in blocks
        for queries in both(block.queries)
        for keys in both(block.keys)
    ]


def _outbox(group: dist.ProcessGroup, device: torch.device) -> Outbox:
    return Outbox(group, together=one_queue(device))


def _exchange(
    leaving: Sequence[Tensor], to: int, coming: Sequence[Tensor], source: int, outbox: Outbox
) -> Messages:
    return outbox.add([(t, to) for t in leaving], [(t, source) for t in coming])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offset: Tensor | None,
        attention: Attention,
        layout: _Layout,
        group: dist.ProcessGroup,
        causal: bool,
        ring: Ring,
    ) -> Tensor:
        joined = _Joined(q, v, layout)
        kept: list[Tensor] = []

        def attend(block: Block, owner: int, keys: Tensor, values: Tensor) -> None:
            out, lse = attention.forward(
                layout.take(q, block.queries), keys, values, layout.part(block, owner)
            )
            joined.add(block.queries, out, lse)

        journey = _Journey(_outbox(group, q.device), ring.window, causal, layout, [k, v])
        own = [Block("both", "both", causal)]
        if attention.dropout:
            own = _halved(blocks_of(layout.rank, layout.rank, causal))
        for block in own:
            attend(block, layout.rank, *(layout.take(t, block.keys) for t in (k, v)))
        for _, owner, half, parts in journey.pieces():
            found = _seen(layout.rank, owner, half, causal, attention)
            for block in found:
                attend(block, owner, *parts)
            if found and ring.keep != "none":
                kept += parts[:1] if ring.keep == "keys" else parts
        if offset is not None:
            joined.out, joined.lse = join_offset(joined.out, joined.lse, offset)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, joined.lse, offset, *kept)
        ctx.how = attention, layout, group, causal, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_qkv = _Backward(ctx, grads[0]).run()
        of_offset = None
        if ctx.needs_input_grad[3]:
            of_offset = offset_gradient(grads[0], *ctx.saved_tensors[3:6])
        return (*of_qkv, of_offset, *[None] * 5)


def _seen(rank: int, owner: int, half: Half, causal: bool, attention: Attention) -> list[Block]:
    """What the queries see of that half of the keys of another rank."""
    blocks = [block for block in blocks_of(rank, owner, causal) if block.keys == half]
    return _halved(blocks) if attention.dropout else blocks


class _Backward:
    """One backward pass: sums of the three gradients, and those of keys on their way to their owners."""

    def __init__(self, ctx: Any, dout: Tensor) -> None:
        self._attention, self._layout, group, self._causal, self._ring = ctx.how
        self._outbox = _outbox(group, dout.device)
        self._q, self._k, self._v, self._out, self._lse, _, *self._kept = ctx.saved_tensors
        self._dout = dout
        wide = torch.promote_types(dout.dtype, torch.float32)
        self._sums = [
            torch.zeros(t.shape, dtype=wide, device=t.device) for t in (self._q, self._k, self._v)
        ]
        self._coming: list[tuple[Half, Messages]] = []

    def run(self) -> list[Tensor]:
        rank = self._layout.rank
        own = blocks_of(rank, rank, self._causal)
        journey = self._journey()
        self._own(own[:1])
        for step, owner, half, piece in self._pieces(journey):
            grads = self._of_piece(owner, half, piece)
            self._add_what_came(leave=1)
            self._send_home(step, owner, half, grads)
            del grads, piece  # a block's worth, which the next need not lie beside
        self._outbox.post()
        self._own(own[1:])
        self._add_what_came(leave=0)
        return [
            total.to(t.dtype)
            for total, t in zip(self._sums, (self._q, self._k, self._v), strict=True)
        ]

    def _of_piece(self, owner: int, half: Half, piece: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of that half of the owner's keys and values; none where no query sees it."""
        grads: list[Tensor] = []
        for block in _seen(self._layout.rank, owner, half, self._causal, self._attention):
            found = self._compute(block, owner, *piece)
            grads = [a + b for a, b in zip(grads, found, strict=True)] if grads else found
        return grads

    def _journey(self) -> _Journey:
        travelling = {"none": [self._k, self._v], "keys": [self._v], "keys and values": []}
        return _Journey(
            self._outbox, self._ring.window, self._causal, self._layout, travelling[self._ring.keep]
        )

    def _pieces(
        self, journey: _Journey
    ) -> Iterator[tuple[tuple[int, int], int, Half, Sequence[Tensor]]]:
        """The pieces of the forward, from what was kept and, for the rest, from the others once more."""
        kept = iter(self._kept)
        for step, owner, half, parts in journey.pieces():
            seen = any(b.keys == half for b in blocks_of(self._layout.rank, owner, self._causal))
            if not seen:
                yield step, owner, half, (self._k, self._v)
            elif self._ring.keep == "keys and values":
                yield step, owner, half, (next(kept), next(kept))
            elif self._ring.keep == "keys":
                yield step, owner, half, (next(kept), parts[0])
            else:
                yield step, owner, half, parts

    def _own(self, blocks: Sequence[Block]) -> None:
        layout = self._layout
        for block in _halved(blocks) if self._attention.dropout else blocks:
            keys, values = (layout.take(t, block.keys) for t in (self._k, self._v))
            dk, dv = self._compute(block, layout.rank, keys, values)
            layout.add_(self._sums[1], block.keys, dk)
            layout.add_(self._sums[2], block.keys, dv)

    def _compute(self, block: Block, owner: int, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Gradients of keys and values; that of the queries is added up."""
        layout, half = self._layout, block.queries
        dq, dk, dv = self._attention.gradients(
            layout.take(self._dout, half),
            layout.take(self._q, half),
            keys,
            values,
            layout.take(self._out, half),
            layout.take(self._lse, half, -1),
            layout.part(block, owner),
        )
        layout.add_(self._sums[0], half, dq)
        return [dk, dv]

    def _send_home(
        self, step: tuple[int, int], owner: int, half: Half, grads: Sequence[Tensor]
    ) -> None:
        """These to the owner, and to this rank those that another has computed at this step."""
        layout = self._layout
        computer = moved(layout.rank, step, layout.ranks, self._ring.window)
        theirs = blocks_of(computer, layout.rank, self._causal)
        coming: list[Tensor] = []
        if any(block.keys == half for block in theirs):
            coming = [t.new_empty(layout.take(t, half).shape) for t in (self._k, self._v)]
        leaving = [t.contiguous() for t in grads]
        self._coming.append((half, _exchange(leaving, owner, coming, computer, self._outbox)))

    def _add_what_came(self, leave: int) -> None:
        """All but the last `leave` of what is on its way.

        A rank that sees half of an owner's keys computes their gradient for as long as one that sees all
        takes for both halves: waited for at once, it would have no work to hide its way.
        """
        while len(self._coming) > leave:
            half, messages = self._coming.pop(0)
            for total, part in zip(self._sums[1:], messages.received(), strict=False):
                self._layout.add_(total, half, part)
            messages.wait_sent()


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


class _Journey:
    """Halves of every rank's tensors as they come by; each goes on when it has come.

    Args:
        outbox: is posted before each piece is given.
        own: what travels of this rank, `[S, ...]` or `[T, ...]`; none: nothing does, and pieces have no
            tensors.
    """

    def __init__(
        self,
        outbox: Outbox,
        window: int,
        causal: bool,
        layout: _Layout,
        own: Sequence[Tensor],
    ) -> None:
        self._outbox, self._window, self._causal, self._layout = outbox, window, causal, layout
        self._shapes = {half: [layout.take(t, half).shape for t in own] for half in HALVES}
        self._like = own[0] if own else None
        self._passing: dict[tuple[int, int, Half], Messages] = {}
        for half in HALVES:
            travels = self._travels(layout.rank, half)
            piece = [layout.take(t, half).contiguous() for t in own] if travels else []
            self._send_on(0, 0, half, piece)
        outbox.post()

    def pieces(self) -> Iterator[tuple[tuple[int, int], int, Half, list[Tensor]]]:
        """Step, owner, half and tensors; none of a half that nobody but its owner sees."""
        ranks, me = self._layout.ranks, self._layout.rank
        steps = ring_order(ranks, self._window)[1:]
        for number, (node, place) in enumerate(steps):
            owner = moved(me, (-node, -place), ranks, self._window)
            for half in HALVES:
                piece: list[Tensor] = []
                if self._like is not None:
                    messages = self._passing.pop((node, place, half))
                    piece = messages.received()
                    messages.wait_sent()
                    self._send_on(node, place, half, piece)
                self._outbox.post()
                if half == "second":
                    self._release([(*step, "first") for step in steps[number + 1 :][:1]])
                elif number:  # the own two pieces left together
                    self._release([(node, place, "second")])
                yield (node, place), owner, half, piece

    def _release(self, next_of_half: list[tuple[int, int, Half]]) -> None:
        """What was sent a piece earlier, as these were posted, shall not lie beside what is computed."""
        for key in next_of_half:
            if key in self._passing:
                self._passing[key].release_sent()

    def _travels(self, owner: int, half: Half) -> bool:
        """The last chunk of the sequence is seen by its own queries alone."""
        return not (self._causal and owner == 0 and half == "second")

    def _send_on(self, node: int, place: int, half: Half, piece: Sequence[Tensor]) -> None:
        """To the next of this node, and what begins a node also to the next node."""
        if self._like is None:
            return
        if place + 1 < self._window:
            self._post(node, place + 1, half, piece, (0, 1))
        if place == 0 and node + 1 < self._layout.ranks // self._window:
            self._post(node + 1, 0, half, piece, (1, 0))

    def _post(
        self, node: int, place: int, half: Half, piece: Sequence[Tensor], by: tuple[int, int]
    ) -> None:
        ranks, me, window = self._layout.ranks, self._layout.rank, self._window
        assert self._like is not None
        coming: list[Tensor] = []
        if self._travels(moved(me, (-node, -place), ranks, window), half):
            coming = [self._like.new_empty(shape) for shape in self._shapes[half]]
        to, source = moved(me, by, ranks, window), moved(me, (-by[0], -by[1]), ranks, window)
        self._passing[node, place, half] = _exchange(piece, to, coming, source, self._outbox)
