"""How long a schedule takes, where its ranks idle, and what of its transfers they wait for.

idle            makespan - time that a rank computes
bubble          of the rank that computes most: min(idle)
bubble share    bubble / makespan
exposed         time that a rank waits for a transfer whose value is made: a late value is idle, not exposed
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from accel.parallel.schedule.actions import Schedule, in_flight
from accel.parallel.schedule.engine import Event, Play, Real, Times
from accel.parallel.schedule.transfers import with_transfers
from accel.parallel.schedule.validate import validate

__all__ = ["Event", "Timeline", "Times", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """A schedule with its times, in seconds."""

    schedule: Schedule
    """With its transfers."""
    events: tuple[tuple[Event, ...], ...]
    """Of each rank, in the order of its actions."""
    exposed: tuple[Real, ...]
    """Of each rank: time that it waits for a transfer whose value is made."""

    @cached_property
    def makespan(self) -> Real:
        """From the first action of all ranks to the end of the last."""
        return max((own[-1].end for own in self._computed), default=0)

    @cached_property
    def busy(self) -> tuple[Real, ...]:
        """Time that each rank computes."""
        return tuple(sum(event.end - event.start for event in own) for own in self._computed)

    @property
    def idle(self) -> tuple[Real, ...]:
        """Time that each rank does not."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> Real:
        """Idle time of the rank that computes most."""
        return min(self.idle)

    @property
    def bubble_share(self) -> Real:
        """Of the makespan; 0 where that is 0."""
        return self.bubble / self.makespan if self.makespan else 0

    @property
    def mean_bubble_share(self) -> Real:
        """Idle time of all ranks, of theirs together; 0 where that is 0."""
        return sum(self.idle) / (self.makespan * len(self.idle)) if self.makespan else 0

    @property
    def span(self) -> Real:
        """The longest time from a rank's first computation to its last: what the zero-bubble papers count."""
        return max(own[-1].end - own[0].start for own in self._computed)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Most activations that each rank holds, in chunks of one micro-batch."""
        return tuple(in_flight(self.schedule))

    @property
    def _computed(self) -> list[list[Event]]:
        return [[event for event in own if event.action.kind.computes] for own in self.events]


def simulate(
    schedule: Schedule, times: Times, *, overlap: bool = True, paired: bool = False
) -> Timeline:
    """Runs a schedule against a clock; exact where the times are whole numbers or fractions.

    Args:
        schedule: with its transfers, or of computation only: then `with_transfers` gives it its transfers.
        overlap: transfers go on in the background, and a receive waits for what it takes. False: a transfer
            holds both its ranks, and those between two computations are posted together.
        paired: of `with_transfers`.

    Raises:
        ValueError: the schedule is not right, as `validate` says, or the times are of other stages.
        Deadlock: a ValueError; the schedule needs buffered sends, and `overlap` is False. An interleaved one
            does not where it is paired and its group size is p.
    """
    validate(schedule)
    times.check(schedule.num_stages)
    if schedule.compute_only:
        schedule = with_transfers(schedule, paired=paired)
    elif paired:
        raise ValueError("paired is for a schedule of computation only: this one has its transfers")
    play = Play(schedule, times, overlap)
    return Timeline(schedule, tuple(map(tuple, play.events)), tuple(play.exposed))
