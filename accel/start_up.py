"""What rank 0 prints: once the features are chosen their table, and what some of them find out later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["print_table", "say", "table"]


def table(status: dict[str, Any], notes: Sequence[str] = ()) -> str:
    """Render ``accel.status()`` as plain text, one line for each feature that was asked for.

    >>> norm = {"asked": "preset", "state": "active", "reason": ""}
    >>> print(table({"device": "cpu", "device_reason": "asked for", "megatron": "0.19.2",
    ...              "preset": "off", "features": {"norm": norm}, "patches": [1]}))
    [accel] device cpu (asked for) | megatron-core 0.19.2 | preset off | 1 patch
    [accel]   norm                          active    preset
    """
    count = len(status["patches"])
    head = (
        f"device {status['device']} ({status['device_reason']}) | megatron-core {status['megatron']} | "
        f"preset {status['preset']} | {count} patch{'' if count == 1 else 'es'}"
    )
    rows = [
        f"  {name:<28}  {f['state']:<8}  {f['asked']}" + (f": {f['reason']}" if f["reason"] else "")
        for name, f in status["features"].items()
        if f["asked"] != "no"
    ]
    return "\n".join("[accel] " + line for line in (head, *notes, *rows))


def print_table(status: dict[str, Any], notes: Sequence[str] = ()) -> None:
    print(table(status, notes), flush=True)


def say(line: str) -> None:
    """On the first rank, what a feature that was asked for has decided while it ran."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"accel: {line}", flush=True)
