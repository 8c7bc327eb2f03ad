"""What a rank's device still has room for."""

from __future__ import annotations

import torch

from accel import machine
from accel.device.cpu import memory as host_memory

__all__ = ["free_bytes"]


def free_bytes(device: torch.device) -> int:
    """That a tensor may still take: what the allocator has kept free too; within the limit of
    `set_per_process_memory_fraction`. All of a host's memory is free to each of its ranks: which of them
    will take it is not known."""
    if device.type == "cpu":
        free, limit = machine.memory()[0], host_memory.below_limit()
        return free if limit is None else min(free, limit)
    module = torch.get_device_module(device)
    reserved = module.memory_reserved(device)
    free, total = module.mem_get_info(device)
    share = int(module.get_per_process_memory_fraction(device) * total)
    free = min(free, max(0, share - reserved))
    return free + reserved - module.memory_allocated(device)
