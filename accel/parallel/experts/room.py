"""Whether what an MoE layer takes fits every rank's memory, told to all ranks before any rows set out.

Each rank says how many bytes it has free, beside its counts. So where the rows of one do not fit, every rank
raises the same error, and none waits for it. What is counted is the least that is there at one time, forward
or backward: what fits may still fail for what other layers keep until then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from accel.parallel.experts.plan import Copy, rank_loads
from accel.parallel.experts.traffic import Traffic

__all__ = ["Sizes", "check_room", "fits", "what_bounds"]


class Sizes(NamedTuple):
    """The bytes that rows and copies take, the same on all ranks."""

    own: int
    """Of each row of a rank's own tokens."""
    computed: int
    """Of each row that a rank computes, and that comes from another or lies among such."""
    in_place: int
    """Of each of its own that it computes where it lies: of its last slice of experts, and of copies."""
    matrices: int
    """Of a copy of an expert, on the rank that gets it."""
    gradients: int
    """Of a copy that has rows, on both its ranks."""


def fits(
    traffic: Traffic, free: Sequence[int], sizes: Sizes, held: Collection[Copy] = frozenset()
) -> bool:
    """Whether each rank has room for its rows and copies; arguments as in :func:`check_room`."""
    return all(rows <= room for rows, room in _rows(traffic, free, sizes, held))


def check_room(
    traffic: Traffic,
    free: Sequence[int],
    sizes: Sizes,
    held: Collection[Copy],
    layer: int | None,
    capacity_factor: float | None,
) -> None:
    """Compare the rows that each rank would compute with what it has room for.

    Args:
        free: `[R]` bytes.
        held: copies whose matrices are there already, and not in `free`.
        layer: for the error, as the factor of the experts' capacity is.

    Raises:
        MemoryError: they do not fit; on all ranks alike.
    """
    for rank, (rows, room) in enumerate(_rows(traffic, free, sizes, held)):
        if rows > room:
            owned = traffic.owned(rank)
            to = {e: sum(row[e] for row in traffic.counts) for e in owned}
            hottest = max(owned, key=to.__getitem__)
            raise MemoryError(
                f"MoE layer {layer}: {rows} tokens go to the experts of rank {rank} of the expert-parallel "
                f"group, {to[hottest]} of them to expert {hottest}, and its memory has room for "
                f"{max(0, room)}: {what_bounds(capacity_factor)}"
            )


def what_bounds(capacity_factor: float | None) -> str:
    """The flag that bounds an expert's tokens, where they have no room."""
    if capacity_factor is None:
        return "--moe-expert-capacity-factor bounds them"
    return f"a --moe-expert-capacity-factor below {capacity_factor:g} takes fewer"


def _rows(
    traffic: Traffic, free: Sequence[int], sizes: Sizes, held: Collection[Copy]
) -> list[tuple[int, int]]:
    """Of each rank: the rows that it computes, and those for which it has room."""
    counts = traffic.counts
    owners = [traffic.owner(e) for e in range(len(counts[0]))]
    loads = rank_loads(counts, owners, traffic.copies)
    come = Counter(c.rank for c in traffic.copies)
    come.subtract(c.rank for c in held)
    ends = Counter(rank for c in traffic.used for rank in (owners[c.expert], c.rank))
    found = []
    for rank, load in enumerate(loads):
        mine, last = counts[rank], traffic.slice_of(rank, traffic.slices - 1)
        in_place = sum(mine[e] for e in last)
        in_place += sum(mine[c.expert] for c in traffic.used if c.rank == rank)
        needed = sizes.own * sum(mine) + sizes.in_place * in_place
        needed += sizes.computed * (load - in_place)
        needed += sizes.matrices * come[rank] + sizes.gradients * ends[rank]
        too_many = math.ceil(max(0, needed - free[rank]) / sizes.computed)
        found.append((load, load - too_many))
    return found
