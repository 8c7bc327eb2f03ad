"""What the ranks of a benchmark share: calls that are timed together, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

__all__ = ["Call", "group", "in_turn", "timed"]

Call = Callable[[], object]


def group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def timed(call: Call) -> float:
    """Seconds of the slowest rank; all begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def in_turn(sides: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):  # the first warms up, connects and measures
        for side, call in sides.items():
            seconds[side] += [timed(call)] * (turn > 0)
    return seconds
