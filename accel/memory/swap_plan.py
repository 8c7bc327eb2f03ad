"""Which groups of a chain are swapped: those whose copies hide behind the kernels that follow.

    group i is saved        its copy to the host begins, when the link is free
    depth groups later      the kernels wait for its end

The link takes the copies one after the other. A group goes where its copy ends before the kernels come to
wait for it; the last groups stay, for their backward pass comes at once. The way back is as long, and the
backward pass that it hides behind takes longer than the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accel.memory.swap import Chain, Swap

__all__ = ["History", "what_hides"]

FIRST_TIMED = 2
"""Chains before this one warm up: kernels are compiled, and pinned memory is made."""


def what_hides(
    sizes: Sequence[int], seconds: Sequence[float], rate: float, depth: int = 1
) -> list[bool]:
    """Whether each group is swapped.

    Args:
        sizes: bytes of each group.
        seconds: of the kernels between the end of each group and that of the next, one fewer.
        rate: bytes per second of the link; 0: nothing hides.
        depth: how many groups later the kernels wait for a copy.
    """
    if rate == 0:
        return [False] * len(sizes)
    chosen = []
    now = free = 0.0
    for number, size in enumerate(sizes):
        begin = max(now, free)
        end = begin + size / rate
        last = number + depth >= len(sizes)
        hides = size > 0 and not last and end <= now + sum(seconds[number : number + depth])
        if hides:
            free = end
        chosen.append(hides)
        now += seconds[number] if number < len(seconds) else 0.0
    return chosen


class History:
    """What the chains of one chunk of a model have shown, and what its next chains do.

    Args:
        rate: measures the link, bytes per second; None: all groups but the last are swapped, hidden or not.
    """

    def __init__(self, swap: Swap, depth: int, rate: Callable[[], float] | None) -> None:
        self._swap = swap
        self._depth = depth
        self._rate = rate
        self._count = 0
        self.sizes: list[int] = []
        """Bytes of each group, of the newest chain that was closed."""
        self.plan: list[bool] | None = None
        """Whether each group is swapped; None as long as nothing was measured."""

    def chain(self) -> Chain:
        """The next chain."""
        timed = self._rate is not None and self._count == FIRST_TIMED
        return self._swap.chain(self._wanted, self._depth, timed)

    def close(self, chain: Chain) -> bool:
        """After a forward pass; returns whether the plan was made now."""
        chain.close()
        if not chain.sizes:  # no gradient was recorded
            return False
        self._count += 1
        self.sizes = chain.sizes
        if self._rate is None or self.plan is not None or len(chain.seconds) < len(self.sizes) - 1:
            return False
        self.plan = what_hides(self.sizes, chain.seconds, self._rate(), self._depth)
        return True

    def _wanted(self, number: int) -> bool:
        if self.plan is not None:
            return number < len(self.plan) and self.plan[number]
        return not self.sizes or number < len(self.sizes) - self._depth
