"""What the runs say: losses, memory and accel's start-up table from Megatron's own log, times of steps
from ``examples/take_turns.py``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from accel.testing.turns import Ratio, compare_turns

__all__ = ["Comparison", "Interval", "Run", "compare", "parse"]

_ITERATION = re.compile(r"iteration\s+(?P<iteration>\d+)/\s*\d+ \|.*lm loss: (?P<loss>\S+) \|")
# The ranks write into one log: what two of them say may stand on one line.
_MEMORY = re.compile(
    r"\[Rank (?P<rank>\d+)\] \(after (?:(?!\[Rank ).)*max allocated: (?P<mib>[\d.]+)"
)
_PARAMETERS = re.compile(
    r"number of parameters on \(tensor,[ \w,]* pipeline\) model parallel rank "
    r"(?P<rank>\([\d, ]+\)): (?P<count>\d+)"
)
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


@dataclass
class Run:
    """What one side logged."""

    intervals: list[Interval] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each step, in order."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """Rank -> the most that its allocator held at once."""
    num_parameters: dict[str, int] = field(default_factory=dict)
    """Tensor- and pipeline-parallel rank, as Megatron writes it -> its parameters."""
    head: str = ""
    """First line of accel's start-up table."""
    notes: list[str] = field(default_factory=list)
    features: list[dict[str, str]] = field(default_factory=list)
    """The start-up table: ``name``, ``state``, ``asked``."""
    patches: list[dict[str, str]] = field(default_factory=list)
    """``target`` in Megatron and its ``replacement`` in accel."""


def parse(lines: Iterable[str]) -> Run:
    """Read one side's log; the times of its steps are elsewhere."""
    run = Run()
    for line in map(str.rstrip, lines):
        for m in _MEMORY.finditer(line):
            rank, num_bytes = int(m["rank"]), round(float(m["mib"]) * _MIB)
            run.peak_bytes[rank] = max(num_bytes, run.peak_bytes.get(rank, 0))
        for m in _PARAMETERS.finditer(line):
            run.num_parameters[m["rank"]] = int(m["count"])
        if m := _ITERATION.search(line):
            run.intervals.append(Interval(int(m["iteration"]), float(m["loss"])))
        elif m := _FEATURE.match(line):
            run.features.append(m.groupdict())
        elif m := _HEAD.match(line):
            run.head = m["head"]
        elif m := _NOTE.match(line):
            run.notes.append(m["note"])
        elif (m := _PATCH.search(line)) and m.groupdict() not in run.patches:
            run.patches.append(m.groupdict())  # every rank logs them
    return run


@dataclass(frozen=True)
class Comparison:
    """Both sides, and what lies between them."""

    stock: Run
    accel: Run
    ratio: Ratio
    """Times of stock over times of accel."""
    tokens_per_iteration: int

    @property
    def sides(self) -> dict[str, Run]:
        return {"stock": self.stock, "accel": self.accel}

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
    def tokens_per_second(self) -> dict[str, float]:
        """From the median step of each side."""
        accel, stock = (self.tokens_per_iteration / s for s in self.ratio.step_seconds)
        return {"stock": stock, "accel": accel}

    def to_json(self) -> dict[str, Any]:
        return {
            "max_loss_difference": self.max_loss_difference,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.ratio.median,
            "speedup_quartiles": list(self.ratio.quartiles),
            "speedup_spread": self.ratio.spread,
            "num_turns": self.ratio.num_turns,
            # Each rank's peak, summed over ranks.
            "peak_memory_bytes": {n: sum(r.peak_bytes.values()) for n, r in self.sides.items()},
            "peak_memory_bytes_of_ranks": {
                n: [r.peak_bytes[rank] for rank in sorted(r.peak_bytes)]
                for n, r in self.sides.items()
            },
            "losses": {
                "iteration": self.iterations,
                **{n: [i.loss for i in r.intervals] for n, r in self.sides.items()},
                "difference": self.differences,
            },
        }


def compare(stock: Run, accel: Run, tokens_per_iteration: int, turn_steps: int) -> Comparison:
    """Put both sides together.

    Args:
        tokens_per_iteration: global batch size times sequence length.
        turn_steps: iterations that one side trained before it handed over.

    Raises:
        ValueError: the sides did not log the same iterations, a loss is not a finite number, or there
            are too few turns.
    """
    ratio = compare_turns(accel.seconds, stock.seconds, turn_steps)
    result = Comparison(stock, accel, ratio, tokens_per_iteration)
    logged = [i.iteration for i in accel.intervals]
    if logged != result.iterations:
        raise ValueError(f"the sides logged other iterations: {result.iterations} and {logged}")
    if not all(map(math.isfinite, result.differences)):
        raise ValueError("a loss is not a finite number")
    return result
