"""Runs the actions of one rank: computes through `Stages`, sends and receives through a `Link`.

    send       leaves the rank free; the value is kept until it is gone
    receive    is posted some transfers before its turn, and waited for where a computation takes its value
    within     a value for a stage of the same rank (where a V turns) is handed over

Transfers between two ranks go in the order of the schedule, so they match by order alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar

from torch import Tensor

from accel.parallel.schedule.actions import Action, Kind, Message, Schedule
from accel.parallel.schedule.engine import Event

__all__ = ["ON_HOST", "Link", "Posting", "Stages", "run"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Posting:
    """When the receives of one link are posted."""

    ahead: int
    """So many before their turn."""
    early: bool
    """Those that come before the first one's turn: before anything is computed, or at that turn."""


ON_HOST = Posting(2, early=True)
"""One that is on its way, one that comes next. Devices: `queues.posting`."""


class Stages(Protocol):
    """What a rank computes, for a micro-batch and one of its chunks."""

    def forward(self, action: Action, taken: Tensor | None) -> Tensor:
        """The chunk's output; of the last stage its loss. `taken`: its input, a leaf that wants a gradient;
        None at the first stage."""
        ...

    def backward(
        self, action: Action, taken: Tensor | None, made: Tensor, grad: Tensor | None
    ) -> Tensor | None:
        """The gradient of `taken`; for `BACKWARD_INPUT` that of the weights may be left for later. `grad`: of
        the output `made`, None at the last stage."""
        ...

    def backward_weight(self, action: Action) -> None:
        """Compute what `BACKWARD_INPUT` left of this micro-batch and chunk."""
        ...

    def sent(self, made: Tensor) -> None:
        """The output's values are not read again here: only its graph is."""
        ...


class Link(Protocol):
    """To the other ranks. Ranks are those of the schedule."""

    def send(self, target: int, value: Tensor) -> None:
        """Returns at once; `value` may be freed by the caller, but not changed."""
        ...

    def expect(self, source: int) -> Callable[[], Tensor]:
        """Posts a receive of the next value from `source`; what it returns waits for that value."""
        ...

    def finish(self) -> None:
        """Waits until all that was sent is gone."""
        ...

    def abandon(self) -> None:
        """An error ends the run."""
        ...


def run(
    schedule: Schedule,
    rank: int,
    stages: Stages,
    link: Link,
    *,
    posting: Posting = ON_HOST,
    record: Callable[[Event], object] | None = None,
) -> None:
    """Does what the schedule has for `rank`.

    Args:
        schedule: a right one (`validate`), with its transfers.
        posting: when receives are posted.
        record: is told of each action: a computation's time, a send's call, a receive's wait; in seconds of
            `time.perf_counter`.
    """
    try:
        _Run(schedule, rank, stages, link, posting, record).all()
    except BaseException:
        link.abandon()
        raise


class _Run:
    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Stages,
        link: Link,
        posting: Posting,
        record: Callable[[Event], object] | None,
    ) -> None:
        self.schedule, self.rank, self.stages, self.link = schedule, rank, stages, link
        self.posting, self.record = posting, record
        self.expected: dict[Message, tuple[Action, Callable[[], Tensor]]] = {}
        """Receives that are posted."""
        self.here: dict[Message, Tensor] = {}
        """Values that were made here, for a send or for a stage of this rank."""
        self.held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        """Input and output of each micro-batch and chunk until their backward."""
        self.turns: dict[int, list[tuple[Message, Action]]] = defaultdict(list)
        """Receives that are not posted yet, the last one first, by the rank that they come from."""
        for action in reversed(schedule.ranks[rank]):
            if action.kind.receives:
                message = self._message(action)
                self.turns[schedule.ends(message)[0]].append((message, action))
        self.due = dict.fromkeys(self.turns, posting.ahead)
        """Of each rank, how many are to be posted before their turn and are not."""

    def all(self) -> None:
        if self.posting.early:
            for source in self.turns:
                self._post(source, self.due.pop(source))
        for action in self.schedule.ranks[self.rank]:
            if action.kind.sends:
                self._send(action)
            elif action.kind.receives:
                self._receive(action)
            elif action.kind is Kind.FORWARD:
                self._forward(action)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                self._timed(action, partial(self.stages.backward_weight, action))
            else:
                self._backward(action)
        self.link.finish()

    def _message(self, action: Action) -> Message:
        of = self.schedule.makes if action.kind.sends else self.schedule.needs
        message = of(self.rank, action)
        assert message is not None, action
        return message

    def _post(self, source: int, count: int) -> None:
        turns = self.turns[source]
        for _ in range(min(count, len(turns))):
            message, action = turns.pop()
            self.expected[message] = action, self.link.expect(source)

    def _receive(self, action: Action) -> None:
        message = self._message(action)
        source, _ = self.schedule.ends(message)
        self._post(source, 1 + self.due.pop(source, 0))
        assert message in self.expected, f"{action} is out of turn"

    def _send(self, action: Action) -> None:
        message = self._message(action)
        value = self.here.pop(message)
        target = self.schedule.ends(message)[1]
        self._timed(action, lambda: self.link.send(target, value.detach()))
        if message.forward:
            self.stages.sent(value)

    def _take(self, action: Action) -> Tensor | None:
        """What a computation takes of another stage."""
        message = self.schedule.needs(self.rank, action)
        if message is None:
            return None
        if message in self.here:
            value = self.here.pop(message)
            taken = value.detach()
            if message.forward:
                self.stages.sent(value)
            return taken
        receive, wait = self.expected.pop(message)
        return self._timed(receive, wait)

    def _forward(self, action: Action) -> None:
        taken = self._take(action)
        if taken is not None and not self.schedule.forward_only:
            taken.requires_grad_()
        made = self._timed(action, lambda: self.stages.forward(action, taken))
        if not self.schedule.forward_only:
            self.held[action.micro_batch, action.chunk] = taken, made
        self._keep(action, made)

    def _backward(self, action: Action) -> None:
        grad = self._take(action)
        taken, made = self.held.pop((action.micro_batch, action.chunk))
        of_input = self._timed(action, lambda: self.stages.backward(action, taken, made, grad))
        self._keep(action, of_input)

    def _keep(self, action: Action, value: Tensor | None) -> None:
        message = self.schedule.makes(self.rank, action)
        if message is not None:
            if value is None:
                raise RuntimeError(f"rank {self.rank}, {action}: gave nothing for the next stage")
            self.here[message] = value

    def _timed(self, action: Action, work: Callable[[], _T]) -> _T:
        if self.record is None:
            return work()
        start = perf_counter()
        value = work()
        self.record(Event(action, start, perf_counter()))
        return value
