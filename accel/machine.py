"""Memory of the machine, or of the part of it that a container or a batch job may use.

Linux limits it by control groups, each within those above it; the tightest counts. What a group uses includes
files that the kernel may drop, which are free as the machine's own are (as ``docker stats`` counts).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

__all__ = ["memory"]

_MOUNTED = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_FILES = {  # version of control groups -> limit, usage, and of its statistics what may be dropped
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory(mounted: Path = _MOUNTED, own: Path = _OWN) -> tuple[int, int]:
    """Bytes that are free and bytes in all.

    Args:
        mounted: where the system shows its control groups.
        own: the file that says which this process is in.
    """
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for group, version in _groups(mounted, own):
        limit_file, usage_file, droppable = _FILES[version]
        limit = _number(group / limit_file)
        if limit is not None and limit < machine.total:
            used = (_number(group / usage_file) or 0) - _statistic(group / "memory.stat", droppable)
            free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def _groups(mounted: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """Directories of this process's groups and of those above, with the version they are of."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            root, version = (mounted, 2) if not controllers else (mounted / "memory", 1)
            path = PurePosixPath(name.lstrip("/"))
            # in a container the name may be the host's, of which only the root is seen here
            for group in (path, *path.parents):
                yield root / group, version


def _number(file: Path) -> int | None:
    """None: no such file, or ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(file: Path, name: str) -> int:
    try:
        words = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(words.get(name, 0))
