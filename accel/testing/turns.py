"""Two training runs that live side by side and take turns, so that both meet the same machine.

Sides that run one after the other meet different machines: on a shared one, equal runs differ by
tens of percent within minutes. Here both are started together, and every few steps one hands over
to the other; whoever waits sleeps. `around()` wraps the function that trains one step, times each
step and writes the times down.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ratio", "Turns", "compare_turns"]

POLL_SECONDS = 0.002
WARM_UP = 2


@dataclass(frozen=True)
class Ratio:
    """How many times faster one side is, from turns that stood side by side."""

    median: float
    quartiles: tuple[float, float]
    step_seconds: tuple[float, float]
    """Median step of each side: ours, theirs."""
    num_turns: int

    @property
    def spread(self) -> float:
        """The middle half of the turns lies this far apart, as a fraction of the median: on a machine
        at rest a few percent."""
        low, high = self.quartiles
        return (high - low) / self.median


def compare_turns(ours: Sequence[float], theirs: Sequence[float], every: int) -> Ratio:
    """Pair turn n of one side with turn n of the other, and take the median of their ratios.

    The first `WARM_UP` turns are not counted: first touch of memory, choice of kernels.

    Args:
        ours, theirs: seconds of each step, as `Turns` writes them.
        every: steps in a turn; an incomplete last turn is left out.

    Raises:
        ValueError: fewer than three turns are left.
    """

    def turns(seconds: Sequence[float]) -> list[float]:
        starts = range(0, len(seconds) - every + 1, every)
        return [statistics.median(seconds[i : i + every]) for i in starts][WARM_UP:]

    pairs = list(zip(turns(ours), turns(theirs), strict=False))
    if len(pairs) < 3:
        raise ValueError(
            f"{len(ours)} and {len(theirs)} steps make {len(pairs)} pairs of turns of {every} steps "
            f"after the first {WARM_UP}; at least 3 are needed"
        )
    ratios = [b / a for a, b in pairs]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Ratio(median, (low, high), (a, b), len(pairs))


class Turns:
    """One side's view.

    Args:
        folder: empty, shared by both sides, one for each comparison.
        me: name of this side.
        other: name of the other side, or the same name to run alone.
        first: whether this side starts.
        every: steps in a turn.
        barrier: returns when every rank of this side has called it; the turn passes on rank 0.
        rank: of this process within its side.
    """

    def __init__(
        self,
        folder: Path,
        me: str,
        other: str,
        *,
        first: bool,
        every: int,
        barrier: Callable[[], object] = lambda: None,
        rank: int = 0,
    ) -> None:
        self.me, self.other, self.every = me, other, every
        self._turn = folder / "turn"
        self._folder, self._barrier, self._leads = folder, barrier, rank == 0
        self.seconds: list[float] = []
        if first and self._leads:
            self._hand_to(me)

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step` that waits for its turn, is timed, and hands over after every few calls."""

        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if len(self.seconds) % self.every == 0:
                self._await_turn()
            self._barrier()
            start = time.perf_counter()
            result = step(*args, **kwargs)
            self._barrier()
            self.seconds.append(time.perf_counter() - start)
            if len(self.seconds) % self.every == 0 and self._leads:
                self._hand_to(self.other)
            return result

        return timed

    def finish(self) -> None:
        """Leave: the other side need not wait any more, and finds the times of all steps in
        `<folder>/<me>.json`, seconds."""
        if self._leads:
            written = self._folder / f"{self.me}.tmp"
            written.write_text(json.dumps(self.seconds))
            written.replace(self._folder / f"{self.me}.json")
            self._hand_to(self.other)

    def _await_turn(self) -> None:
        gone = self._folder / f"{self.other}.json"
        while self._leads and not self._is_mine() and not gone.exists():
            time.sleep(POLL_SECONDS)
        self._barrier()

    def _is_mine(self) -> bool:
        try:
            return self._turn.read_text() == self.me
        except FileNotFoundError:  # nobody has started
            return False

    def _hand_to(self, side: str) -> None:
        written = self._folder / f"turn.{self.me}"
        written.write_text(side)
        written.replace(self._turn)
