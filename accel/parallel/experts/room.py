"""Whether what an MoE layer takes fits every rank's memory, told to all ranks before any rows set out.

Each rank says how many bytes it has free, beside its counts. So where the rows of one do not fit, every rank
raises the same error, and none waits for it. What is counted is the least that is there at one time, forward
or backward: what fits may still fail for what other layers keep until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from accel import machine
from accel.device.cpu import memory as host_memory
from accel.parallel.experts.plan import Copy, rank_loads
from accel.parallel.experts.traffic import Traffic

__all__ = ["Sizes", "check_room", "fits", "free_bytes", "what_bounds"]


class Sizes(NamedTuple):
    """In bytes; the same on all ranks."""

    own: int
    """Of each row of a rank's own tokens."""
    computed: int
    """Of each row that a rank computes."""
    matrices: int
    """Of a copy of an expert, on the rank that gets it."""
    gradients: int
    """Of a copy that has rows, on both its ranks."""


def free_bytes(device: torch.device) -> int:
    """That a tensor may still take: what the allocator has kept free too; on CPUs and CUDA within the limit
    of `set_per_process_memory_fraction`. All of a host's memory is free to each of its ranks: which of them
    will take it is not known."""
    if device.type == "cpu":
        free, limit = machine.memory()[0], host_memory.below_limit()
        return free if limit is None else min(free, limit)
    module = torch.get_device_module(device)
    reserved = module.memory_reserved(device)
    free, total = module.mem_get_info(device)
    if hasattr(module, "get_per_process_memory_fraction"):  # torch-npu has the setter alone
        share = int(module.get_per_process_memory_fraction(device) * total)
        free = min(free, max(0, share - reserved))
    return free + reserved - module.memory_allocated(device)


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
        taken = sizes.own * sum(counts[rank])
        taken += sizes.matrices * come[rank] + sizes.gradients * ends[rank]
        found.append((load, (free[rank] - taken) // sizes.computed))
    return found
