"""What a schedule costs where it runs: measured in two steps, beside another schedule by the same times.

time      of a chunk's forward, backward and weights' part: medians over the micro-batches
transfer  half of a round trip between neighbours, of one value and of one element: the slowest pair
bytes     that a chunk's forward leaves allocated, times the chunks in flight
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accel.parallel.schedule.actions import Action, Kind, Schedule, in_flight
from accel.parallel.schedule.engine import Times
from accel.parallel.schedule.link import GroupLink, synchronize
from accel.parallel.schedule.runtime import Posting, Stages, run
from accel.parallel.schedule.simulate import Timeline, simulate

__all__ = ["Clock", "Found", "Measurement"]

_MIB = 1 << 20

Stamp = Any
"""A point of time on the stream of the passes."""


class Clock(Protocol):
    """Of a device. It waits for nothing: receives that are posted ahead are in flight."""

    def stamp(self) -> Stamp: ...

    def seconds(self, start: Stamp, end: Stamp) -> float:
        """Between two stamps; once the device is done with both."""
        ...

    def allocated(self) -> int:
        """Bytes."""
        ...


@dataclass(frozen=True)
class Found:
    """What was measured of a pipeline."""

    times: Times
    num_bytes: tuple[tuple[float, ...], ...]
    """That a chunk of each rank's keeps of one micro-batch."""
    step: float
    """Seconds of the passes of one step: the slowest rank, the mean of the steps."""

    def compare(
        self,
        name: str,
        schedule: Schedule,
        stock: Schedule | None,
        others: Mapping[str, Schedule] = {},
    ) -> list[str]:
        """Lines to print.

        Args:
            stock: Megatron's order with the same counts, if there is one.
            others: what could be had in place of `schedule`, and how.
        """
        ours = simulate(schedule, self.times)
        lines = [
            f"{name}: {_ms(self.step)} ms a step were measured, {_ms(ours.makespan)} ms are predicted by the "
            f"times of its parts; ranks wait {float(ours.mean_bubble_share):.1%} of it"
        ]
        if stock is None:
            return lines
        theirs = simulate(stock, self.times)
        gain = 1 - float(ours.makespan) / float(theirs.makespan)
        more = [
            (a - b) * max(kept)
            for a, b, kept in zip(
                in_flight(schedule), in_flight(stock), self.num_bytes, strict=True
            )
        ]
        rank = max(range(len(more)), key=lambda r: abs(more[r]))
        held = f"rank {rank} holds {in_flight(schedule)[rank]} chunks at most, Megatron's order "
        held += f"{in_flight(stock)[rank]}: {more[rank] / _MIB:+.1f} MiB"
        if gain < 0.005:
            verdict = f"no gain is predicted over Megatron's own order ({_ms(theirs.makespan)} ms)"
        else:
            verdict = f"{gain:.1%} less than Megatron's own order ({_ms(theirs.makespan)} ms) is predicted"
        return [*lines, f"{verdict}; {held}", *self._better(ours, others)]

    def _better(self, ours: Timeline, others: Mapping[str, Schedule]) -> list[str]:
        """A line on what would be quicker by 1 % or more."""
        timed = {how: simulate(other, self.times) for how, other in others.items()}
        if not timed:
            return []
        how = min(timed, key=lambda each: (timed[each].makespan, max(timed[each].in_flight)))
        best = timed[how]
        if best.makespan > 0.99 * float(ours.makespan):
            return []
        more = max(best.in_flight) - max(ours.in_flight)
        return [f"{how}: {_ms(best.makespan)} ms are predicted, with {more:+d} chunks in flight"]


class Measurement:
    """Runs a pipeline's steps, and measures two of them.

    Args:
        clock: of a device.
        tell: is given what was found, once, on every rank.
        skipped: steps before these.
        steps: that are measured.
    """

    def __init__(
        self,
        clock: Callable[[torch.device], Clock],
        tell: Callable[[Schedule, Found], object],
        *,
        skipped: int = 2,
        steps: int = 2,
    ) -> None:
        self._clock, self._tell = clock, tell
        self._before, self._left = skipped, steps
        self._of: Schedule | None = None
        self._samples: _Samples = defaultdict(list)
        self._seconds: list[float] = []

    def run(
        self, schedule: Schedule, rank: int, stages: Stages, link: GroupLink, *, posting: Posting
    ) -> None:
        """`runtime.run`. All ranks of the pipeline count the same steps."""
        if self._before > 0 or self._left == 0:
            self._before -= self._before > 0
            return run(schedule, rank, stages, link, posting=posting)
        if self._of is not schedule:  # another number of micro-batches: begin anew
            self._of, self._seconds = schedule, []
            self._samples.clear()
        clock = self._clock(link.device)
        passes = _Passes(stages, clock)
        dist.barrier(link.up)
        synchronize(link.device)
        start = perf_counter()
        run(schedule, rank, passes, link, posting=posting)
        synchronize(link.device)
        self._seconds.append(perf_counter() - start)
        for key, noted in passes.noted.items():
            self._samples[key] += [(clock.seconds(a, b), kept) for a, b, kept in noted]
        if len(self._seconds) == self._left:
            found = self._found(schedule, link)
            self._left, self._of = 0, None
            self._samples.clear()
            self._tell(schedule, found)

    def _found(self, schedule: Schedule, link: GroupLink) -> Found:
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        samples = self._samples
        chunks = range(schedule.num_chunks)
        seconds = [_median(samples[kind, c], 0) for c in chunks for kind in kinds]
        kept = [_median(samples[Kind.FORWARD, c], 1) for c in chunks]
        small, whole = link.round_trips()
        row = [*seconds, *kept, statistics.mean(self._seconds), small, whole]
        rows = _gathered(row, link)
        stages = schedule.num_stages
        times: dict[int, list[float]] = {}
        for r in range(schedule.num_ranks):
            for c in chunks:
                times[schedule.stage(r, c)] = rows[r][len(kinds) * c : len(kinds) * (c + 1)]
        at = len(kinds) * schedule.num_chunks
        backward = [max(b, i + w) for _, b, i, w in (times[s] for s in range(stages))]
        latency = max(row[-2] for row in rows)
        return Found(
            Times(
                forward=[times[s][0] for s in range(stages)],
                backward=backward,
                weight=[times[s][3] for s in range(stages)],
                latency=latency,
                bytes=max(max(row[-1] for row in rows) - latency, 0.0),
                bandwidth=1.0,
            ),
            tuple(tuple(row[at : at + schedule.num_chunks]) for row in rows),
            max(row[-3] for row in rows),
        )


_Samples = dict[tuple[Kind, int], list[tuple[float, int]]]
"""Of each kind and chunk: seconds, and bytes that stayed allocated."""


class _Passes:
    """`Stages` that are timed."""

    def __init__(self, stages: Stages, clock: Clock) -> None:
        self._stages, self._clock = stages, clock
        self.noted: dict[tuple[Kind, int], list[tuple[Stamp, Stamp, int]]] = defaultdict(list)

    def forward(self, action: Action, taken: Tensor | None) -> Tensor:
        made: Tensor = self._timed(action, self._stages.forward, taken)
        return made

    def backward(
        self, action: Action, taken: Tensor | None, made: Tensor, grad: Tensor | None
    ) -> Tensor | None:
        of_input: Tensor | None = self._timed(action, self._stages.backward, taken, made, grad)
        return of_input

    def backward_weight(self, action: Action) -> None:
        self._timed(action, self._stages.backward_weight)

    def sent(self, made: Tensor) -> None:
        self._stages.sent(made)

    def _timed(self, action: Action, work: Callable[..., Any], *args: Any) -> Any:
        held, start = self._clock.allocated(), self._clock.stamp()
        value = work(action, *args)
        end, now = self._clock.stamp(), self._clock.allocated()
        self.noted[action.kind, action.chunk].append((start, end, now - held))
        return value


def _median(samples: list[tuple[float, int]], at: int) -> float:
    return statistics.median(sample[at] for sample in samples) if samples else 0.0


def _gathered(row: list[float], link: GroupLink) -> list[list[float]]:
    """The rows of all ranks."""
    own = torch.tensor(row, dtype=torch.float64, device=link.device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(link.up))]
    dist.all_gather(rows, own, group=link.up)
    return [each.tolist() for each in rows]


def _ms(seconds: Any) -> str:
    return f"{float(seconds) * 1e3:.4g}"
