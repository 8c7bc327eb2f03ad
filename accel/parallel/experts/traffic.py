"""Which rows of a mixture of experts are computed where, and which travel.

rows       of a rank: one for each choice of each of its tokens, those of expert 0 first
experts    as many on each rank, in order; `Copy` says where they are besides
slices     of a rank's experts; the rows for one of them are a piece, but for its own rows of the last slice,
           which are there before others' come
piece      rows that are computed together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from accel.parallel.experts.plan import Copy

__all__ = ["Block", "Piece", "Traffic"]


class Block(NamedTuple):
    """The rows of one rank for one expert."""

    expert: int
    source: int
    rows: int


@dataclass(frozen=True)
class Piece:
    """Blocks that are computed together, expert after expert and in each source after source."""

    blocks: tuple[Block, ...]

    @cached_property
    def rows(self) -> int:
        return sum(block.rows for block in self.blocks)

    @cached_property
    def experts(self) -> list[int]:
        return list(dict.fromkeys(block.expert for block in self.blocks))

    def counts(self) -> Tensor:
        """Rows of each of the experts, int64."""
        rows = dict.fromkeys(self.experts, 0)
        for block in self.blocks:
            rows[block.expert] += block.rows
        return torch.tensor(list(rows.values()), dtype=torch.int64)

    @cached_property
    def places(self) -> list[tuple[Block, slice]]:
        """Each block, and where it lies among the rows of the piece."""
        ends = accumulate(block.rows for block in self.blocks)
        return [
            (block, slice(end - block.rows, end))
            for block, end in zip(self.blocks, ends, strict=True)
        ]


@dataclass(frozen=True)
class Traffic:
    """Who computes which rows, as one rank sees it.

    Args:
        counts: `[R][E]`, the rows of each rank for each expert.
        rank: this one.
        copies: of all ranks.
        slices: of each rank's experts, some of them empty where there are more than experts.

    Raises:
        ValueError: experts that the ranks do not divide.
    """

    counts: Sequence[Sequence[int]]
    rank: int
    copies: frozenset[Copy] = frozenset()
    slices: int = 5

    def __post_init__(self) -> None:
        if len(self.counts[0]) % len(self.counts):
            raise ValueError(
                f"{len(self.counts[0])} experts on {len(self.counts)} ranks: each needs as many"
            )

    @property
    def mine(self) -> Sequence[int]:
        """This rank's rows for each expert."""
        return self.counts[self.rank]

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(len(self.counts)) if rank != self.rank]

    def owned(self, rank: int) -> range:
        each = len(self.counts[0]) // len(self.counts)
        return range(rank * each, (rank + 1) * each)

    def rows(self, expert: int) -> slice:
        """Those of this rank for an expert, among all its rows."""
        end = self._ends[expert]
        return slice(end - self.mine[expert], end)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.mine))

    def apart(self) -> Piece:
        """This rank's rows for its last slice, which lie together."""
        last = self.slice_of(self.rank, self.slices - 1)
        return Piece(tuple(Block(e, self.rank, self.mine[e]) for e in last if self.mine[e]))

    @cached_property
    def pieces(self) -> list[Piece]:
        """The rows for each slice of this rank's experts, without those apart."""
        return [self._piece(index) for index in range(self.slices)]

    def _piece(self, index: int) -> Piece:
        own = index < self.slices - 1
        return Piece(
            tuple(
                Block(expert, source, self.counts[source][expert])
                for expert in self.slice_of(self.rank, index)
                for source in range(len(self.counts))
                if self._travels(source, expert) and (own or source != self.rank)
            )
        )

    @cached_property
    def leaving(self) -> list[list[tuple[slice, int]]]:
        """For each slice of the others' experts: which of this rank's rows go there, and to whom."""
        return [
            [
                (self.rows(expert), rank)
                for rank in self.peers
                for expert in self.slice_of(rank, index)
                if self._travels(self.rank, expert)
            ]
            for index in range(self.slices)
        ]

    @cached_property
    def arriving(self) -> list[list[tuple[slice, int]]]:
        """For each piece: where others' rows lie in it, and whose they are."""
        return [
            [(here, block.source) for block, here in piece.places if block.source != self.rank]
            for piece in self.pieces
        ]

    @cached_property
    def staying(self) -> list[list[tuple[slice, slice]]]:
        """For each piece: where this rank's rows lie in it, and where among all its rows."""
        return [
            [
                (here, self.rows(block.expert))
                for block, here in piece.places
                if block.source == self.rank
            ]
            for piece in self.pieces
        ]

    def guests(self) -> list[Piece]:
        """This rank's rows for experts of which it has copies, one by one."""
        return [
            Piece((Block(c.expert, c.rank, self.mine[c.expert]),)) for c in self._used(self.rank)
        ]

    def lent(self) -> list[Copy]:
        """The copies of this rank's experts, those of the first rank first."""
        used = (copy for rank in self.peers for copy in self._used(rank))
        return [copy for copy in used if copy.expert in self.owned(self.rank)]

    def owner(self, expert: int) -> int:
        return expert * len(self.counts) // len(self.counts[0])

    @cached_property
    def used(self) -> list[Copy]:
        """The copies on ranks that have rows for them, in order."""
        return sorted(c for c in self.copies if self.counts[c.rank][c.expert])

    def _used(self, rank: int) -> list[Copy]:
        return [copy for copy in self.used if copy.rank == rank]

    def slice_of(self, rank: int, index: int) -> range:
        """The experts of a rank's slice."""
        first, end = self._bounds[index : index + 2]
        return self.owned(rank)[first:end]

    @cached_property
    def _bounds(self) -> list[int]:
        """Of the slices among a rank's experts. Little is computed beside the way to the first and nothing
        beside that from the last: they are at most half as large as those between them, or of one expert."""
        experts, inner = len(self.owned(0)), self.slices - 2
        if inner < 1 or experts <= self.slices:
            return [experts * index // self.slices for index in range(self.slices + 1)]
        end = max(1, experts // (2 * (self.slices - 1)))
        between = experts - 2 * end
        return [0, *(end + between * index // inner for index in range(inner + 1)), experts]

    def _travels(self, source: int, expert: int) -> bool:
        return self.counts[source][expert] > 0 and Copy(expert, source) not in self.copies
