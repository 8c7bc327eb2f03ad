"""Whether devices get through what the runtime asks of them: that no rank waits for another in a circle.

A device does what it is asked for in streams: the passes, with their waits for values, in one, and transfers
in one for each neighbour and direction. A transfer begins when all is done that was asked of its own stream,
and of the passes' before it; a send and its receive end together. Two things order more than that:

    queues    streams share queues, and nothing in a queue begins before what was put there first. With
              ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron wants with tensor parallelism, there is one
    loading   a kernel that runs for the first time is loaded, which may wait for all that was asked of the
              device; so may an allocation that gives memory back. A receive in flight, for whose value
              another rank needs what this one is about to compute, would then never end

All of this says what comes before what, and there is a way through exactly if no circle is in it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any

import torch
from torch import Tensor

from accel.parallel.schedule.actions import Action, Kind, Schedule
from accel.parallel.schedule.link import SizedReceive
from accel.parallel.schedule.runtime import Posting, run

__all__ = ["gets_through", "posting"]

_POSTINGS = (Posting(1, early=False), Posting(0, early=False), Posting(1, early=True))
"""For devices, the best one first. A second receive ahead could keep the only queue from the passes before
it; one before the first computation waits, on the first ranks, for what these have yet to compute."""


def posting(schedule: Schedule, *, sized: bool, one_queue: bool, first: bool) -> Posting:
    """When a device's receives are to be posted.

    Args:
        schedule: a right one, with its transfers.
        sized: a value comes behind its sizes, for which the host waits.
        one_queue: the device has one; else several streams may share one all the same.
        first: kernels may have to be loaded. Where no posting is free of circles then, it is that of later
            steps.

    Raises:
        ValueError: there is none.
    """
    queues = (True,) if one_queue else (True, False)
    for loading, single in product((True, False) if first else (False,), queues):
        for each in _POSTINGS:
            if gets_through(schedule, each, sized=sized, one_queue=single, loading=loading):
                return each
    of_sizes = " whose values have sizes of their own" if sized else ""
    queue = " with one queue: leave out CUDA_DEVICE_MAX_CONNECTIONS=1 where Megatron allows it, or"
    raise ValueError(
        f"the ranks of this schedule{of_sizes} would wait for each other on a device"
        f"{queue if one_queue else ':'} take another schedule, as zb-h1"
    )


def gets_through(
    schedule: Schedule,
    posting: Posting,
    *,
    sized: bool = False,
    one_queue: bool = True,
    loading: bool = False,
) -> bool:
    """Whether no rank waits forever.

    Args:
        loading: the first pass of each kind, of each chunk, waits for its device.
    """
    order = _Order()
    channels: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for rank in range(schedule.num_ranks):
        asked = _Asked(order, rank, channels, sized=sized, one_queue=one_queue, loading=loading)
        run(schedule, rank, asked, asked, posting=posting)
    for sends, receives in channels.values():
        for send, receive in zip(sends, receives, strict=True):
            order.before(_begin(send), _end(receive))
            order.before(_begin(receive), _end(send))
    return order.is_without_circles()


class _Order:
    """What comes before what; each thing has a beginning and an end."""

    def __init__(self) -> None:
        self._sorter: TopologicalSorter[int] = TopologicalSorter()
        self._count = 0

    def new(self) -> int:
        """A thing, which ends after its beginning."""
        self._count += 1
        self.before(_begin(self._count), _end(self._count))
        return self._count

    def before(self, first: int, second: int) -> None:
        self._sorter.add(second, first)

    def is_without_circles(self) -> bool:
        try:
            self._sorter.prepare()
        except CycleError:
            return False
        return True


def _begin(thing: int) -> int:
    return 2 * thing


def _end(thing: int) -> int:
    return 2 * thing + 1


class _Asked:
    """`Stages` and `Link` of a rank that note in which order its device is asked for what."""

    def __init__(
        self,
        order: _Order,
        rank: int,
        channels: dict[tuple[int, int], tuple[list[int], list[int]]],
        *,
        sized: bool,
        one_queue: bool,
        loading: bool,
    ) -> None:
        self._order, self._rank, self._channels = order, rank, channels
        self._sized, self._one_queue, self._loading = sized, one_queue, loading
        self._value = torch.empty(0)
        self.dtype = self._value.dtype
        self._newest: dict[Any, int] = {}
        """Of each stream."""
        self._previous: int | None = None
        """What the device was asked for last."""
        self._host = order.new()
        """What the host has waited for when it asks for the next."""
        self._so_far = self._host
        """Is done when all is that was asked for."""
        self._loaded: set[tuple[Kind, int]] = set()
        self._incoming: dict[int, deque[SizedReceive]] = defaultdict(deque)

    def ask(self, stream: Any, *behind: int) -> int:
        """Something in a stream, which comes behind the ends of others."""
        thing, order = self._order.new(), self._order
        for other in (self._host, self._newest.get(stream), self._newest.get("passes"), *behind):
            if other is not None:
                order.before(_end(other), _begin(thing))
        if self._one_queue and self._previous is not None:
            order.before(_begin(self._previous), _begin(thing))
        self._newest[stream] = self._previous = thing
        so_far = order.new()
        for other in (self._so_far, thing):
            order.before(_end(other), _begin(so_far))
        self._so_far = so_far
        return thing

    def host_waits(self, thing: int) -> None:
        host = self._order.new()
        for other in (self._host, thing):
            self._order.before(_end(other), _begin(host))
        self._host = host

    def transfer(self, source: int, target: int) -> int:
        pair = min(source, target), max(source, target), source < target
        thing = self.ask(pair)
        self._channels[source, target][self._rank == target].append(thing)
        return thing

    # Stages

    def forward(self, action: Action, taken: Tensor | None) -> Tensor:
        return self._compute(action)

    def backward(
        self, action: Action, taken: Tensor | None, made: Tensor, grad: Tensor | None
    ) -> Tensor:
        return self._compute(action)

    def backward_weight(self, action: Action) -> None:
        self._compute(action)

    def sent(self, made: Tensor) -> None:
        pass

    def _compute(self, action: Action) -> Tensor:
        kind = action.kind, action.chunk
        if self._loading and kind not in self._loaded:
            self._loaded.add(kind)
            self.ask("passes")
            self.host_waits(self._so_far)
        self.ask("passes")
        return self._value

    # Link

    def send(self, target: int, value: Tensor) -> None:
        for _ in range(2 if self._sized else 1):
            self.transfer(self._rank, target)

    def expect(self, source: int) -> Callable[[], Tensor]:
        if self._sized:
            return SizedReceive(self, source, self._incoming[source]).wait
        value, work = self.receive(source, (), self.dtype)

        def wait() -> Tensor:
            work.wait()
            return value

        return wait

    def receive(
        self, source: int, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Any, _Received]:
        work = _Received(self, self.transfer(source, self._rank))
        return (self._value if dtype is self.dtype else work), work

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class _Received:
    """Sizes that are received, and the work of anything that is."""

    def __init__(self, asked: _Asked, thing: int) -> None:
        self._asked, self._thing = asked, thing

    def wait(self) -> None:
        self._asked.ask("passes", self._thing)

    def tolist(self) -> list[int]:
        """The host reads them."""
        self._asked.host_waits(self._thing)
        return [1, 0]
