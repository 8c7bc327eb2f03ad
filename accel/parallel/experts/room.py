"""Whether the rows that go to a rank fit its memory, told to all ranks before any of them sets out.

Each rank says how many rows it has room for, beside its counts. So where the rows of one do not fit, every
rank raises the same error, and none waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel import machine

__all__ = ["check_room", "free_bytes"]


def free_bytes(device: torch.device) -> int:
    """That a tensor may still take: what the allocator has kept free too."""
    if device.type == "cpu":
        return machine.memory()[0]
    module = torch.get_device_module(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return module.mem_get_info(device)[0] + kept


def check_room(counts: Sequence[Sequence[int]], room: Sequence[int], layer: int | None) -> None:
    """Compare the rows that each rank would compute with what it has room for.

    Args:
        counts: `[R][E]`, the rows of each rank for each expert.
        room: `[R]` rows.
        layer: for the error.

    Raises:
        MemoryError: they do not fit; on all ranks alike.
    """
    each = len(counts[0]) // len(counts)
    for rank, fits in enumerate(room):
        rows = [sum(row[e] for row in counts) for e in range(rank * each, (rank + 1) * each)]
        if sum(rows) > fits:
            hottest = max(range(each), key=rows.__getitem__)
            raise MemoryError(
                f"MoE layer {layer}: {sum(rows)} tokens go to the experts of rank {rank} of the "
                f"expert-parallel group, {rows[hottest]} of them to expert {rank * each + hottest}, and its "
                f"memory has room for {fits}: --moe-expert-capacity-factor bounds them"
            )
