"""What the ranks of a benchmark share: their program, and calls that are timed together, in turn."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import accel
from accel.patches import host_batch_scheduling
from benchmarks.lab.limited import limit

__all__ = [
    "SCHEDULED",
    "Call",
    "Scheduled",
    "around",
    "begin_megatron",
    "enabled",
    "group",
    "in_turn",
    "run",
    "timed",
]

Call = Callable[[], object]


def run(whats: Mapping[str, Callable[[bool], dict[str, Any]]], begin: Call = lambda: None) -> int:
    """A rank's program as :class:`benchmarks.lab.link.Link` starts it.

    Args:
        whats: what it can do, `quick` or not; rank 0 prints what that finds.
        begin: once there is a process group.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=whats)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    begin()
    with contextlib.nullcontext() if args.limit is None else limit(args.limit):
        found = whats[args.what](args.quick)
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


NORMS = {"norm": True}
"""Of every side of a GPT: torch's do not know sequence parallelism."""


def begin_megatron(**sizes: int) -> None:
    """Once there is a process group: Megatron's groups, of the sizes that it is given."""
    import accel.megatron_adaptor

    logging.disable(logging.INFO)
    accel.enable(preset="off", **NORMS)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)


@contextlib.contextmanager
def enabled(options: Mapping[str, Any]) -> Iterator[None]:
    """With options of `accel.enable`, after which a GPT is stock's again."""
    accel.enable(**{"preset": "off", **NORMS, **options})
    try:
        yield
    finally:
        accel.enable(preset="off", **NORMS)


SCHEDULED = {"host_batch_scheduling": True}
"""As in preset fast."""


@dataclass(frozen=True)
class Scheduled:
    """A call in which gloo's threads do not interrupt: as `SCHEDULED` has it, switched on beforehand."""

    call: Call

    def __call__(self) -> object:
        return self.call()


@contextlib.contextmanager
def around(call: Call) -> Iterator[None]:
    """With what the call wants on, which a training run switches on once and not in each step."""
    off = host_batch_scheduling.switch_on() if isinstance(call, Scheduled) else lambda: None
    try:
        yield
    finally:
        off()


def group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def timed(call: Call) -> float:
    """Seconds of the slowest rank; all begin together."""
    with around(call):
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
