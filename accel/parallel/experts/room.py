"""Whether the rows that go to a rank fit its memory, told to all ranks before any of them sets out.

Each rank says how many rows it has room for, beside its counts. So where the rows of one do not fit, every
rank raises the same error, and none waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel import machine
from accel.device.cpu import memory as host_memory

__all__ = ["check_room", "free_bytes"]


def free_bytes(device: torch.device) -> int:
    """That a tensor may still take: what the allocator has kept free too; on CPUs and CUDA within the limit
    of `set_per_process_memory_fraction`. Ranks of one host each count its free memory as theirs."""
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
