"""Runs a schedule against a clock: each rank does its actions in order, each as soon as it can be.

    overlap     a send leaves its rank free at once. The link from one rank to another takes its transfers
                one after the other, bytes / bandwidth seconds each; a receive waits for the arrival, which is
                latency later
    blocking    the transfers between two computations are one group; each begins when both ranks are at it,
                and a rank goes on when its group is over

Time is what comes in: with whole numbers or fractions all results are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import cast

from accel.parallel.schedule.actions import Action, Kind, Message, Schedule

__all__ = ["Deadlock", "Event", "Play", "Real", "Times"]

Real = float | Fraction


@dataclass(frozen=True)
class Times:
    """Seconds of one chunk and one micro-batch, for all stages or for each stage of the model.

    Raises:
        ValueError: a time that is negative or not finite; the message names it.
    """

    forward: Real | Sequence[Real]
    backward: Real | Sequence[Real]
    """Whole: of the input and of the weights."""
    weight: Real | Sequence[Real]
    """Part of the backward that is the weights'."""
    latency: Real = 0
    """Seconds of a transfer beside those that it keeps the link busy."""
    bytes: Real = 0
    """Of a transfer."""
    bandwidth: Real = math.inf
    """Bytes per second, of each direction between two ranks."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for each in value if isinstance(value, Sequence) else [value]:
                finite = math.isfinite(each) or field.name == "bandwidth"
                if not (finite and each >= 0):
                    raise ValueError(f"{field.name} must be finite and not negative, got {each!r}")
        if self.bandwidth == 0:
            raise ValueError("bandwidth must be more than 0, got 0")

    @property
    def busy(self) -> Real:
        """Seconds that a transfer keeps its link busy."""
        return self.bytes / self.bandwidth if self.bytes else 0

    def check(self, num_stages: int) -> None:
        """Raises ValueError where there are times of another number of stages, or weight is over backward."""
        for name in ("forward", "backward", "weight"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ValueError(f"{name} has times of {len(value)} stages, not {num_stages}")
        for stage in range(num_stages):
            weight, backward = _of(self.weight, stage), _of(self.backward, stage)
            if weight > backward:
                raise ValueError(f"stage {stage}: weight {weight} is over backward {backward}")

    def seconds(self, kind: Kind, stage: int) -> Real:
        """Of a computation."""
        if kind is Kind.FORWARD:
            return _of(self.forward, stage)
        if kind is Kind.BACKWARD_WEIGHT:
            return _of(self.weight, stage)
        whole = _of(self.backward, stage)
        return whole if kind is Kind.BACKWARD else whole - _of(self.weight, stage)


def _of(value: Real | Sequence[Real], stage: int) -> Real:
    return value[stage] if isinstance(value, Sequence) else value


@dataclass(frozen=True, slots=True)
class Event:
    """When an action is: a computation's time, a send's on the link, a receive's wait."""

    action: Action
    start: Real
    end: Real


class Deadlock(ValueError):
    """Ranks wait for each other; the message names each, its action and whom it waits for."""


class Play:
    """One run of a schedule that has its transfers.

    Raises:
        Deadlock: no rank can go on.
    """

    def __init__(self, schedule: Schedule, times: Times, overlap: bool) -> None:
        self.schedule = schedule
        self.times = times
        self.clock: list[Real] = [0] * schedule.num_ranks
        self.events: list[list[Event]] = [[] for _ in schedule.ranks]
        """In the order of the actions."""
        self.exposed: list[Real] = [0] * schedule.num_ranks
        """Seconds that each rank waits for a transfer whose value is made: a late value is none."""
        self._posted: dict[Message, Real] = {}
        """When its sender, or the first of its ranks, was at a message."""
        self._flights: dict[Message, tuple[Real, Real]] = {}
        """From when the link has a message until it is there."""
        self._free: dict[tuple[int, int], Real] = {}
        self._group = [-1] * schedule.num_ranks
        """Where the newest group that was posted begins."""
        self._transfer = self._overlapped if overlap else self._blocked
        moved = True
        while moved:
            moved = sum(self._advance(rank) for rank in range(schedule.num_ranks)) > 0
        self._check_end()

    def _advance(self, rank: int) -> bool:
        """Goes on until the end or a wait; whether it went on at all."""
        actions, done = self.schedule.ranks[rank], self.events[rank]
        begin = len(done)
        while len(done) < len(actions):
            action = actions[len(done)]
            if action.kind.computes:
                self._compute(rank, action)
            elif not self._transfer(rank, action):
                break
        return len(done) > begin

    def _message(self, rank: int, action: Action) -> Message:
        of = self.schedule.makes if action.kind.sends else self.schedule.needs
        return cast(Message, of(rank, action))

    def _compute(self, rank: int, action: Action) -> None:
        start = self.clock[rank]
        stage = self.schedule.stage(rank, action.chunk)
        self.clock[rank] = start + self.times.seconds(action.kind, stage)
        self.events[rank].append(Event(action, start, self.clock[rank]))

    def _fly(self, message: Message, ready: Real) -> None:
        """The link takes the message when it is free."""
        channel = self.schedule.ends(message)
        start = max(ready, self._free.get(channel, 0))
        self._free[channel] = start + self.times.busy
        self._flights[message] = (start, self._free[channel] + self.times.latency)

    def _overlapped(self, rank: int, action: Action) -> bool:
        now = self.clock[rank]
        message = self._message(rank, action)
        if action.kind.sends:
            self._posted[message] = now
            self._fly(message, now)
            self.events[rank].append(Event(action, *self._flights[message]))
            return True
        if message not in self._flights:
            return False
        arrival = max(now, self._flights[message][1])
        self.exposed[rank] += arrival - max(now, min(arrival, self._posted[message]))
        self.events[rank].append(Event(action, now, arrival))
        self.clock[rank] = arrival
        return True

    def _blocked(self, rank: int, _: Action) -> bool:
        begin, actions = len(self.events[rank]), self.schedule.ranks[rank]
        end = begin
        while end < len(actions) and not actions[end].kind.computes:
            end += 1
        group = [self._message(rank, action) for action in actions[begin:end]]
        if self._group[rank] < begin:
            self._group[rank] = begin
            for message in group:
                if message in self._posted:
                    self._fly(message, max(self._posted[message], self.clock[rank]))
                self._posted[message] = self.clock[rank]
        if any(message not in self._flights for message in group):
            return False
        flights = [self._flights[message] for message in group]
        self.events[rank] += [
            Event(a, *flight) for a, flight in zip(actions[begin:end], flights, strict=True)
        ]
        self.exposed[rank] += _union(flights)
        self.clock[rank] = max(self.clock[rank], max(flight[1] for flight in flights))
        return True

    def _check_end(self) -> None:
        stuck = []
        for rank in range(self.schedule.num_ranks):
            actions = self.schedule.ranks[rank][len(self.events[rank]) :]
            for action in actions:
                message = self._message(rank, action)
                if message not in self._flights:
                    source, target = self.schedule.ends(message)
                    other = target if action.kind.sends else source
                    stuck.append(f"rank {rank}, {action}: waits for rank {other}")
                    break
        if stuck:
            raise Deadlock(f"{'; '.join(stuck)}: deadlock, each waits for the next")


def _union(intervals: Sequence[tuple[Real, Real]]) -> Real:
    """Seconds that at least one of them covers."""
    total: Real = 0
    until: Real = 0
    for start, end in sorted(intervals):
        total += max(end, until) - max(start, until)
        until = max(end, until)
    return total
