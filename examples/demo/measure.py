"""What Megatron's own log says: losses, times, memory, and accel's start-up table.

Everything in the report comes from here; nothing is measured by the demo itself.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Comparison", "Interval", "Segment", "compare", "parse"]

_ITERATION = re.compile(
    r"iteration\s+(?P<iteration>\d+)/\s*\d+ \|"
    r".*elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r".*lm loss: (?P<loss>\S+) \|"
)
_MEMORY = re.compile(r"\[Rank (?P<rank>\d+)\] \(after .*max allocated: (?P<mib>[\d.]+)")
_HEAD = re.compile(r"^\[accel\] device (?P<head>.*)$")
_FEATURE = re.compile(r"^\[accel\]   (?P<name>\w+) +(?P<state>\w+) +(?P<asked>.*)$")
_NOTE = re.compile(r"^\[accel\] (?P<note>\S.*)$")
_PATCH = re.compile(r"INFO:accel:(?P<target>\S+) -> (?P<replacement>.+)$")

_MIB = 1024 * 1024  # Megatron calls it MB


@dataclass(frozen=True)
class Interval:
    """One line of Megatron's log: means over ``--log-interval`` iterations."""

    iteration: int
    """The last of them."""
    loss: float
    """Mean cross-entropy, nats per token."""
    milliseconds: float
    """For one iteration."""


@dataclass
class Segment:
    """What one launch logged."""

    intervals: list[Interval] = field(default_factory=list)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """Rank -> the most that its allocator held at once."""
    head: str = ""
    """First line of accel's start-up table."""
    notes: list[str] = field(default_factory=list)
    features: list[dict[str, str]] = field(default_factory=list)
    """The start-up table: ``name``, ``state``, ``asked``."""
    patches: list[dict[str, str]] = field(default_factory=list)
    """``target`` in Megatron and its ``replacement`` in accel."""


def parse(lines: Iterable[str]) -> Segment:
    """Read one launch's log."""
    segment = Segment()
    for line in map(str.rstrip, lines):
        if m := _ITERATION.search(line):
            segment.intervals.append(
                Interval(int(m["iteration"]), float(m["loss"]), float(m["ms"]))
            )
        elif m := _MEMORY.search(line):
            rank, num_bytes = int(m["rank"]), round(float(m["mib"]) * _MIB)
            segment.peak_bytes[rank] = max(num_bytes, segment.peak_bytes.get(rank, 0))
        elif m := _FEATURE.match(line):
            segment.features.append(m.groupdict())
        elif m := _HEAD.match(line):
            segment.head = m["head"]
        elif m := _NOTE.match(line):
            segment.notes.append(m["note"])
        elif (m := _PATCH.search(line)) and m.groupdict() not in segment.patches:
            segment.patches.append(m.groupdict())  # every rank logs them
    return segment


@dataclass(frozen=True)
class SideResult:
    """One side, over all of its segments."""

    intervals: list[Interval]
    """Iteration 1, then every ``--log-interval``."""
    tokens_per_second: float
    """From the median time of an iteration."""
    tokens_per_second_quartiles: tuple[float, float]
    tokens_per_second_of_segments: list[float]
    peak_bytes: int
    """Sum over ranks of each rank's peak."""
    peak_bytes_of_ranks: list[int]


@dataclass(frozen=True)
class Comparison:
    """Both sides, and what lies between them."""

    stock: SideResult
    accel: SideResult

    @property
    def iterations(self) -> list[int]:
        return [i.iteration for i in self.stock.intervals]

    @property
    def differences(self) -> list[float]:
        """Loss of accel minus loss of stock, for each logged interval."""
        pairs = zip(self.accel.intervals, self.stock.intervals, strict=True)
        return [a.loss - s.loss for a, s in pairs]

    @property
    def max_loss_difference(self) -> float:
        return max(map(abs, self.differences))

    @property
    def speedup(self) -> float:
        return self.accel.tokens_per_second / self.stock.tokens_per_second

    @property
    def unrest(self) -> float:
        """How far apart the segments of one side are in speed, as a fraction; the larger of both
        sides.

        They do the same work, so a difference comes from the machine, and the speed-up is no more
        certain than this.
        """
        sides = (self.stock.tokens_per_second_of_segments, self.accel.tokens_per_second_of_segments)
        return max(max(rates) / min(rates) - 1 for rates in sides)

    def to_json(self) -> dict[str, Any]:
        sides = {"stock": self.stock, "accel": self.accel}
        return {
            "max_loss_difference": self.max_loss_difference,
            "tokens_per_second": {n: s.tokens_per_second for n, s in sides.items()},
            "tokens_per_second_quartiles": {
                n: list(s.tokens_per_second_quartiles) for n, s in sides.items()
            },
            "tokens_per_second_of_segments": {
                n: s.tokens_per_second_of_segments for n, s in sides.items()
            },
            "speedup": self.speedup,
            "unrest": self.unrest,
            "peak_memory_bytes": {n: s.peak_bytes for n, s in sides.items()},
            "peak_memory_bytes_of_ranks": {n: s.peak_bytes_of_ranks for n, s in sides.items()},
            "losses": {
                "iteration": self.iterations,
                **{n: [i.loss for i in s.intervals] for n, s in sides.items()},
                "difference": self.differences,
            },
        }


def compare(
    stock: Sequence[Segment], accel: Sequence[Segment], tokens_per_iteration: int
) -> Comparison:
    """Put the segments of both sides together.

    Args:
        stock: its segments in the order of training, each with three logged lines or more.
        accel: likewise.
        tokens_per_iteration: global batch size times sequence length.

    Raises:
        ValueError: the sides did not log the same iterations, or a loss is not a finite number.
    """
    result = Comparison(_side(stock, tokens_per_iteration), _side(accel, tokens_per_iteration))
    logged = [i.iteration for i in result.accel.intervals]
    if logged != result.iterations:
        raise ValueError(f"the sides logged other iterations: {result.iterations} and {logged}")
    if not all(map(math.isfinite, result.differences)):
        raise ValueError("a loss is not a finite number")
    return result


def _side(segments: Sequence[Segment], tokens_per_iteration: int) -> SideResult:
    # Of each launch Megatron logs the first iteration by itself; that line and the rest of its
    # interval hold the warm-up: first touch of memory, oneDNN's choice of kernels.
    times = [[i.milliseconds for i in s.intervals[2:]] for s in segments]
    if not times or not all(times):
        raise ValueError("each segment needs three logged lines or more")

    def rate(milliseconds: float) -> float:
        return tokens_per_iteration * 1000 / milliseconds

    all_times = [t for of_segment in times for t in of_segment]
    enough = len(all_times) > 1
    quartiles = statistics.quantiles(all_times, method="inclusive") if enough else all_times * 3
    ranks = sorted({rank for s in segments for rank in s.peak_bytes})
    peaks = [max(s.peak_bytes.get(rank, 0) for s in segments) for rank in ranks]
    return SideResult(
        intervals=[*segments[0].intervals, *(i for s in segments[1:] for i in s.intervals[1:])],
        tokens_per_second=rate(statistics.median(all_times)),
        tokens_per_second_quartiles=(rate(quartiles[2]), rate(quartiles[0])),
        tokens_per_second_of_segments=[rate(statistics.median(t)) for t in times],
        peak_bytes=sum(peaks),
        peak_bytes_of_ranks=peaks,
    )
