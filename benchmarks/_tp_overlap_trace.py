"""Of a rank of `docs/record_overlap.py`: when layers compute and communicate.

The products are seen by a dispatch mode, transfers from where they are asked for until they are there, which
a thread of each waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["recorded"]

Event = tuple[str, float, float]
"""Lane, start and end."""
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor")


class _Products(TorchDispatchMode):
    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.monotonic()
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self.events.append(("computes", start, time.monotonic()))
        return result


class _Watched:
    """A work that a thread of its own waits for."""

    def __init__(self, works: list[Any], events: list[Event]) -> None:
        start = time.monotonic()

        def wait() -> None:
            for work in works:
                work.wait()
            events.append(("communicates", start, time.monotonic()))

        self._thread = threading.Thread(target=wait)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()


@contextmanager
def _transfers(events: list[Event]) -> Iterator[None]:
    exchange = dist.batch_isend_irecv

    def collective(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            work = _Watched([original(*args, async_op=True, **kwargs)], events)
            return work if async_op else work.wait()

        return watched

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(
                dist, "batch_isend_irecv", lambda ops: [_Watched(exchange(ops), events)]
            )
        )
        for name in _COLLECTIVES:
            original = getattr(dist, name)
            stack.enter_context(mock.patch.object(dist, name, collective(original)))
        yield


def recorded(call: Callable[[], object]) -> list[Event]:
    """What happens in this rank, in seconds from where both begin."""
    events: list[Event] = []
    dist.barrier()
    begin = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.all_reduce(begin, dist.ReduceOp.MAX)  # one machine: all ranks read the same clock
    with _Products(events), _transfers(events):
        call()
    return sorted((lane, start - float(begin), end - float(begin)) for lane, start, end in events)
