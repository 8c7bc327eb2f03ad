"""Memory figures of the host: bytes that the CPU allocator holds, and their real peak.

With the native library, an allocator that counts sits on top of PyTorch's
(``csrc/cpu/host_memory.cpp``). Without it, the figures are the resident set of the process, which
also holds the interpreter; :func:`source` says which.
"""

from __future__ import annotations

import resource
from typing import Any

import psutil
import torch

from accel.ops import _native

__all__ = ["install", "source", "uninstall"]

_KIB = 1024  # ru_maxrss is in KiB on Linux


def install() -> None:
    """Start counting, if the native library is there."""
    if _native.reason() is None:
        torch.ops.accel._host_memory_install()


def uninstall() -> None:
    """Give PyTorch its own allocator back; what was allocated meanwhile is still freed correctly."""
    if _native.reason() is None:
        torch.ops.accel._host_memory_uninstall()


def source() -> str:
    """Where the figures come from: ``allocator`` or ``resident set``."""
    return "allocator" if _native.reason() is None else "resident set"


def _figures() -> tuple[int, int, int, int]:
    """Current bytes, peak bytes, number of allocations, number of frees."""
    if _native.reason() is None:
        current, peak, allocations, frees = torch.ops.accel._host_memory_stats()
        return current, peak, allocations, frees
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    return psutil.Process().memory_info().rss, peak, 0, 0


def memory_allocated(device: Any = None) -> int:
    return _figures()[0]


def max_memory_allocated(device: Any = None) -> int:
    return _figures()[1]


def memory_reserved(device: Any = None) -> int:
    return _figures()[0]


def max_memory_reserved(device: Any = None) -> int:
    return _figures()[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    if _native.reason() is None:
        torch.ops.accel._host_memory_reset_peak()


def memory_stats(device: Any = None) -> dict[str, int]:
    """The keys of ``torch.cuda.memory_stats`` that have a meaning on the host."""
    current, peak, allocations, frees = _figures()
    stats = {
        "num_alloc_retries": 0,
        "num_ooms": 0,
        "num_device_alloc": allocations,
        "num_device_free": frees,
    }
    for pool in ("all", "large_pool"):
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
            stats[f"{kind}.{pool}.current"] = current
            stats[f"{kind}.{pool}.peak"] = peak
        stats[f"allocation.{pool}.current"] = allocations - frees
        stats[f"allocation.{pool}.allocated"] = allocations
        stats[f"allocation.{pool}.freed"] = frees
    return stats


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of the machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def device_memory_used(device: Any = None) -> int:
    return psutil.Process().memory_info().rss


def memory_snapshot(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    current, peak, allocations, frees = _figures()
    return (
        f"host memory ({source()}): {current / 2**20:.1f} MiB now, {peak / 2**20:.1f} MiB at peak, "
        f"{allocations} allocations, {frees} frees"
    )
