"""The link of a pipeline's ranks: `torch.distributed` point to point, one group for each direction.

With one group the sends of two neighbours would wait for each other where a backend does them in one order
(NCCL). Values to higher ranks go through `up`, those to lower ranks through `down`; `connect` makes the
connections of both, which on NCCL waits for the other rank, before any rank waits for another thing.

    sized       each value is sent behind its sizes (16 int64); else all have one shape
    kept        a sent value until it is gone. Gloo tells that only to one who waits: a thread does
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GroupLink", "SizedReceive"]

_SIZES = 16
"""Numbers before a value: how many sizes it has, and these."""


class GroupLink:
    """`runtime.Link` over two groups with the pipeline's ranks, in their order.

    Args:
        shape, dtype, device: of all values; the shape of a usual one where they are `sized`.
        sized: each value comes with its sizes.
    """

    def __init__(
        self,
        up: dist.ProcessGroup,
        down: dist.ProcessGroup,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        sized: bool = False,
    ) -> None:
        self.up, self.down = up, down
        self.shape, self.dtype, self.device, self.sized = tuple(shape), dtype, device, sized
        self.rank = dist.get_rank(up)
        self._incoming: dict[int, deque[SizedReceive]] = {}
        self._sent = _Threaded() if device.type == "cpu" else _Polled()

    def send(self, target: int, value: Tensor) -> None:
        if value.dtype is not self.dtype:
            raise ValueError(f"a stage's output is {value.dtype}, the pipeline sends {self.dtype}")
        if self.sized:
            self._isend(target, self._sizes(value))
        elif tuple(value.shape) != self.shape:
            raise ValueError(
                f"a stage's output has the shape {list(value.shape)}, the pipeline sends {list(self.shape)}: "
                "outputs of other lengths want variable_seq_lengths"
            )
        self._isend(target, value.contiguous())

    def expect(self, source: int) -> Callable[[], Tensor]:
        if self.sized:
            return SizedReceive(self, source, self._incoming.setdefault(source, deque())).wait
        value, work = self.receive(source, self.shape, self.dtype)

        def wait() -> Tensor:
            work.wait()
            return value

        return wait

    def finish(self) -> None:
        self._sent.finish()

    def abandon(self) -> None:
        """After an error: what was sent is waited for no longer."""
        self._sent.abandon()

    def connect(self) -> None:
        """One element there and back between each two neighbours, the last rank and the first too, in one
        order. All ranks call it, once for their groups."""
        ranks = dist.get_world_size(self.up)
        pairs = {(r, r + 1) for r in range(ranks - 1)} | ({(0, ranks - 1)} if ranks > 2 else set())
        for lower, upper in sorted(pairs):
            if self.rank in (lower, upper):
                self._round_trip(lower, upper, 1)

    def round_trips(self) -> tuple[float, float]:
        """Half of the quickest of three round trips with the next rank, in seconds: of one element, and of
        `shape`. All ranks call it; the last one gets zeros."""
        sizes = 1, math.prod(self.shape)
        found = {1: 0.0, sizes[1]: 0.0}
        for lower in range(dist.get_world_size(self.up) - 1):
            dist.barrier(self.up)
            if self.rank in (lower, lower + 1):
                for size in sizes:
                    seconds = min(self._round_trip(lower, lower + 1, size) for _ in range(3))
                    found[size] = seconds / 2 if self.rank == lower else found[size]
        return found[sizes[0]], found[sizes[1]]

    def _round_trip(self, lower: int, upper: int, size: int) -> float:
        value = torch.empty(size, dtype=self.dtype, device=self.device)
        synchronize(self.device)
        start = perf_counter()
        if self.rank == lower:
            dist.send(value, group=self.up, group_dst=upper)
            dist.recv(value, group=self.down, group_src=upper)
        else:
            dist.recv(value, group=self.up, group_src=lower)
            dist.send(value, group=self.down, group_dst=lower)
        synchronize(self.device)
        return perf_counter() - start

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self.up if source < target else self.down

    def _isend(self, target: int, value: Tensor) -> None:
        group = self._group(self.rank, target)
        work = dist.isend(value, group=group, group_dst=target)
        self._sent.add(work, value)

    def receive(self, source: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Any]:
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        work = dist.irecv(value, group=self._group(source, self.rank), group_src=source)
        return value, work

    def _sizes(self, value: Tensor) -> Tensor:
        if value.ndim >= _SIZES:
            raise ValueError(f"a value with {value.ndim} dimensions: {_SIZES - 1} at most are sent")
        sizes = [value.ndim, *value.shape]
        return torch.tensor(sizes + [0] * (_SIZES - len(sizes)), device=self.device)


def synchronize(device: torch.device) -> None:
    """Waits for the device, where that is another than the host."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


class Receiver(Protocol):
    """What a `SizedReceive` asks for values and their sizes."""

    dtype: torch.dtype

    def receive(self, source: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[Any, Any]:
        """What comes, a tensor, and the work that is to be waited for."""
        ...


class SizedReceive:
    """A value behind its sizes: posted when these are known, in the order of the link."""

    def __init__(self, link: Receiver, source: int, queue: deque[SizedReceive]) -> None:
        self._link, self._source, self._queue = link, source, queue
        self._sizes: tuple[Any, Any] | None = None
        self._value: tuple[Any, Any] | None = None
        queue.append(self)
        if len(queue) == 1:
            self._post_sizes()

    def wait(self) -> Tensor:
        while self._value is None:
            self._queue[0]._post_value()
        value, work = self._value
        work.wait()
        return value

    def _post_sizes(self) -> None:
        self._sizes = self._link.receive(self._source, [_SIZES], torch.int64)

    def _post_value(self) -> None:
        assert self._sizes is not None
        self._queue.popleft()
        sizes, work = self._sizes
        work.wait()
        ndim, *shape = sizes.tolist()
        self._value = self._link.receive(self._source, shape[:ndim], self._link.dtype)
        if self._queue:
            self._queue[0]._post_sizes()


class _Polled:
    """Keeps what was sent until the device has done so."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def add(self, work: Any, value: Tensor) -> None:
        self._sent.append((work, value))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def finish(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()

    def abandon(self) -> None:
        self._sent.clear()


class _Threaded:
    """The same, where only waiting tells: a thread waits for the oldest, from the first send to `finish`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Tensor] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._failed: list[BaseException] = []

    def add(self, work: Any, value: Tensor) -> None:
        if self._thread is None:
            # a rank that fails does not wait for sends that nobody takes
            self._thread = Thread(target=self._wait, name="accel-pipeline-sends", daemon=True)
            self._thread.start()
        self._queue.put((work, value))

    def finish(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()

    def abandon(self) -> None:
        self._queue.put(None)

    def _wait(self) -> None:
        while (sent := self._queue.get()) is not None:
            try:
                sent[0].wait()
            except BaseException as error:  # raised again by `finish`
                self._failed[:] = self._failed or [error]
            del sent
