"""The lab as a benchmark sees it: launches of its ranks' program, each at a rate of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accel.testing import bench
from benchmarks.lab import launch, network
from benchmarks.lab.limited import Limit

__all__ = ["Link", "hosts_of"]

PAYLOAD = 0.956
"""Of the link's rate, what is not the frames' heads."""


@dataclass(frozen=True)
class Link:
    """Hosts whose links take a new rate for each launch; without them, the wrapper.

    Args:
        module: the ranks' program. It takes what to do, `--quick` and, for the wrapper, `--limit` in bytes
            per second, and rank 0 prints a JSON object as its last line.
    """

    module: str
    ranks: int
    hosts: Any
    why: str | None
    """Why there are no hosts."""

    def run(
        self, what: Sequence[str], quick: bool, payload: float | None = None
    ) -> tuple[dict[str, Any], str]:
        """What rank 0 found, and the link; `payload`: bytes of messages per second, None for full speed."""
        command = ["-m", self.module, *what, *["--quick"] * quick]
        kind = "full speed"
        if self.hosts is not None:
            self.hosts.shape(None if payload is None else payload / PAYLOAD)
            if payload is not None:
                kind = f"{self.hosts.kind} of {payload / PAYLOAD / 1e6:.1f} MB/s"
        elif payload is not None:
            command.append(f"--limit={payload}")
            kind = f"{Limit.kind} of {payload / 1e6:.1f} MB/s ({self.why})"
        environment = {**launch.CHECKOUT_FIRST, **bench.MALLOC_REUSE}
        outputs = launch.run(self.hosts, command, self.ranks, 900, environment)
        return json.loads(outputs[0].splitlines()[-1]), kind


@contextmanager
def hosts_of(module: str, ranks: int) -> Iterator[Link]:
    """The link between `ranks` hosts, taken down at the end."""
    why = network.reason()
    if why is not None:
        yield Link(module, ranks, None, why)
        return
    with network.hosts(ranks) as hosts:
        yield Link(module, ranks, hosts, None)
