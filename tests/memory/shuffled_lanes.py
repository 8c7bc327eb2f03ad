"""A device whose lanes run in any order that they may: what is in order by luck on a GPU fails here."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class ShuffledLanes:
    """Work waits until somebody waits for it, and is then done in an order drawn from `seed`."""

    shares_host_memory = False

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._queues = collections.defaultdict[str, collections.deque](collections.deque)
        self.done: set[int] = set()
        self.log: list[str] = []
        """The lanes of what was done, in that order."""
        self.count = 0

    def open(self) -> None:
        assert not any(self._queues.values())

    def computes_here(self) -> bool:
        return True

    def run(self, lane: str, work: Callable[[], None], after: Iterable[Any] = ()) -> int:
        self.count += 1
        self._queues[lane].append((self.count, work, [e for e in after if e is not None]))
        return self.count

    def lend(self, tensor: Tensor, event: int | None) -> None: ...

    def wait(self, event: int) -> None:
        while event not in self.done:
            self._advance()

    def close(self) -> None:
        while any(self._queues.values()):
            self._advance()

    def _advance(self) -> None:
        ready = [n for n, q in self._queues.items() if q and self.done.issuperset(q[0][2])]
        assert ready, "work waits for what nobody does"
        lane = self._draw.choice(ready)
        number, work, _ = self._queues[lane].popleft()
        work()
        self.log.append(lane)
        self.done.add(number)
