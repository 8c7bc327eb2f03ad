"""A rank of `bench host_collectives` on its own host: gloo with and without `host_batch_scheduling`."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from accel.testing.bench import OURS
from benchmarks._ranks import Call, Scheduled, around, run
from benchmarks.host_collectives import GLOO

PRODUCT = 256
"""Rows and columns of the products between or beside collectives: 1.4 ms or so of them for each."""


def all_reduces(kib: int, products: int, beside: bool) -> Call:
    x = torch.randn(kib * 256)
    matrix = torch.randn(PRODUCT, PRODUCT)

    def call() -> None:
        work = dist.all_reduce(x, async_op=True)
        if not beside:
            work.wait()
        for _ in range(products):
            matrix @ matrix
        work.wait()
        x.div_(dist.get_world_size())

    return call


CASES = {
    f"all-reduce {size} fp32, {what}": (kib, products, beside)
    for size, kib in (("4 KiB", 4), ("1 MiB", 1024))
    for what, products, beside in (
        ("one after the other", 0, False),
        ("products between them", 4, False),
        ("products beside them", 4, True),
    )
}


def cases(quick: bool) -> dict[str, Any]:
    """Milliseconds of a call, for each case and side."""
    rounds, calls = (2, 3) if quick else (15, 40)
    found = {}
    for name, what in CASES.items():
        call = all_reduces(*what)

        def calls_of(call: Call = call) -> None:
            for _ in range(calls):
                call()

        sides: dict[str, Call] = {OURS: Scheduled(calls_of), GLOO: calls_of}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(rounds + 1):
            for side, all_calls in sides.items():
                with around(all_calls):
                    dist.barrier()
                    start = time.perf_counter()
                    all_calls()
                    seconds[side] += [(time.perf_counter() - start) / calls] * (turn > 0)
        found[name] = {side: 1e3 * statistics.median(of) for side, of in seconds.items()}
    return {"milliseconds": found, "rounds": rounds, "calls": calls}


if __name__ == "__main__":
    sys.exit(run({"cases": cases}))
