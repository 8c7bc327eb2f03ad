"""Memory of the device that the host plays: bytes that the CPU allocator holds, their real peak, and a limit.

With the native library, on x86-64, an allocator that counts sits on top of PyTorch's
(``csrc/cpu/host_memory.cpp``). Without it, the figures are the resident set of the process, which
also holds the interpreter; :func:`source` says which. Then there is no limit either.

Pinned memory is the host's and not the device's: it is neither counted nor limited (:func:`uncounted`). Nor
is what does not come from PyTorch's allocator: numpy's, memory that processes share, an ``UntypedStorage``.
"""

from __future__ import annotations

import contextlib
import platform
import resource
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from accel import machine
from accel.ops import _native

__all__ = [
    "huge_pages",
    "install",
    "is_pinned",
    "limit",
    "missing",
    "pins",
    "set_limit",
    "source",
    "uncounted",
    "uninstall",
]

_KIB = 1024  # ru_maxrss is in KiB on Linux
_OF_MALLOC = ("x86_64", "AMD64")
"""On these PyTorch's memory is malloc's, which tells the size of a block; on AArch64 it is mimalloc's."""


def missing() -> str | None:
    """Why nothing counts allocations; None if something does."""
    if (machine_type := platform.machine()) not in _OF_MALLOC:
        return f"PyTorch's allocator on {machine_type} does not tell the size of its blocks"
    return _native.reason()


def install() -> None:
    """Start counting, if the native library is there."""
    if missing() is None:
        torch.ops.accel._host_memory_install()


def uninstall() -> None:
    """Give PyTorch its own allocator back; what was allocated meanwhile is still freed correctly.

    A limit ends here.
    """
    if missing() is None:
        torch.ops.accel._host_memory_uninstall()


def source() -> str:
    """Where the figures come from: ``allocator`` or ``resident set``."""
    return "allocator" if missing() is None else "resident set"


def set_limit(num_bytes: int | None) -> None:
    """Refuse what would make the allocated bytes exceed ``num_bytes``; None lifts the limit.

    A refused allocation raises ``torch.OutOfMemoryError`` and leaves everything as it was. Blocks that
    are there already stay, even where they are more.

    Raises:
        ValueError: ``num_bytes`` is less than 1.
        RuntimeError: nothing counts allocations: no native library, or not installed.
    """
    if num_bytes is not None and num_bytes < 1:
        raise ValueError(
            f"a memory limit is at least 1 byte, or None for no limit, got {num_bytes}"
        )
    if why := missing():
        if num_bytes is None:
            return
        raise RuntimeError(f"a limit of {num_bytes} bytes of host memory cannot be enforced: {why}")
    torch.ops.accel._host_memory_limit(num_bytes or 0)


@contextlib.contextmanager
def limit(num_bytes: int | None) -> Iterator[None]:
    """:func:`set_limit` for a while; the limit before is back afterwards, also after an exception."""
    before = _limit()
    set_limit(num_bytes)
    try:
        yield
    finally:
        set_limit(before)


def below_limit() -> int | None:
    """Bytes that may still be allocated under the limit; None where there is none."""
    limit = _limit()
    return None if limit is None else max(0, limit - memory_allocated())


def _limit() -> int | None:
    return torch.ops.accel._host_memory_stats()[5] or None if missing() is None else None


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """The limit as a share of what `mem_get_info` says; 1.0 is none. Ranks on a machine have one each."""
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _, total = mem_get_info()
    set_limit(None if fraction == 1 else max(1, int(fraction * total)))  # a byte holds no tensor


def get_per_process_memory_fraction(device: Any = None) -> float:
    _, total = mem_get_info()
    return min(1.0, (_limit() or total) / total)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """What this thread allocates inside is pinned memory: never counted nor limited."""
    if missing() is not None:
        yield
        return
    before = torch.ops.accel._host_memory_uncounted(True)
    try:
        yield
    finally:
        torch.ops.accel._host_memory_uncounted(before)


def huge_pages(on: bool) -> None:
    """Whether blocks of 2 MiB and more ask the kernel for huge pages from now on. Those that have asked keep
    them, and what malloc gives in the same place after them has them too."""
    torch.ops.accel._host_memory_huge_pages(on)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in memory that :func:`uncounted` gave, as a view too."""
    return missing() is None and torch.ops.accel._host_memory_is_pinned(tensor)


def pins() -> bool:
    """Whether pinned memory differs from other memory here: an allocator counts the other."""
    return missing() is None and torch.ops.accel._host_memory_installed()


def _figures() -> tuple[int, int, int, int, int]:
    """Current bytes, peak bytes, number of allocations, of frees, and of refusals by the limit."""
    if missing() is None:
        current, peak, allocations, frees, refusals, _ = torch.ops.accel._host_memory_stats()
        return current, peak, allocations, frees, refusals
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    return psutil.Process().memory_info().rss, peak, 0, 0, 0


def memory_allocated(device: Any = None) -> int:
    return _figures()[0]


def max_memory_allocated(device: Any = None) -> int:
    return _figures()[1]


def memory_reserved(device: Any = None) -> int:
    return _figures()[0]


def max_memory_reserved(device: Any = None) -> int:
    return _figures()[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    if missing() is None:
        torch.ops.accel._host_memory_reset_peak()


def memory_stats(device: Any = None) -> dict[str, int]:
    """The keys of ``torch.cuda.memory_stats`` that have a meaning on the host."""
    current, peak, allocations, frees, refusals = _figures()
    stats = {
        "num_alloc_retries": 0,
        "num_ooms": refusals,
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
    """Free and total bytes of the machine, or of what a container may use of it."""
    return machine.memory()


def device_memory_used(device: Any = None) -> int:
    return psutil.Process().memory_info().rss


def memory_snapshot(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    current, peak, allocations, frees, _ = _figures()
    return (
        f"host memory ({source()}): {current / 2**20:.1f} MiB now, {peak / 2**20:.1f} MiB at peak, "
        f"{allocations} allocations, {frees} frees"
    )
