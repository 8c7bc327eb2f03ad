"""Copies and kernels in the order in which a device may run them.

A lane is a queue: what is put in runs one after the other. Across lanes nothing is in order but what a piece
of work is told to come after. On a GPU a lane is a stream; on the CPU work is done when the call returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "COMPUTE",
    "Home",
    "HostLanes",
    "Lanes",
    "StreamHome",
    "StreamLanes",
    "home_of",
    "lanes_of",
]

COMPUTE = "compute"
"""The lane of the kernels: on a GPU the stream that was current when the lanes were opened."""


class Lanes(Protocol):
    """Where a device does its work. `open` comes before the first `run`, `close` after the last."""

    shares_host_memory: bool
    """Whether the device's memory is the host's, so that the host works on it without a copy."""

    def open(self) -> None:
        """Everything that the device was told before comes first."""

    def computes_here(self) -> bool:
        """Whether kernels that are launched now are in the lane COMPUTE."""

    def run(self, lane: str, work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        """Do `work` in a lane after these events; returns the event of its end."""

    def lend(self, tensor: Tensor, event: Any) -> None:
        """Kernels that are launched now, in whatever stream, use a tensor of COMPUTE's after an event; its
        memory is used again after them."""

    def wait(self, event: Any) -> None:
        """Stop the host until an event."""

    def close(self) -> None:
        """Stop the host until all is done."""


class HostLanes:
    """All at once, in the order of the calls."""

    shares_host_memory = True

    def open(self) -> None: ...

    def computes_here(self) -> bool:
        return True

    def run(self, lane: str, work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        work()

    def lend(self, tensor: Tensor, event: Any) -> None: ...

    def wait(self, event: Any) -> None: ...

    def close(self) -> None: ...


class StreamLanes:
    """A stream for each lane, of a CUDA device or an NPU."""

    shares_host_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._streams: dict[str, Any] = {}
        self._opened: Any = None

    def open(self) -> None:
        self._streams[COMPUTE] = self._module.current_stream(self._device)
        self._opened = self._streams[COMPUTE].record_event()

    def computes_here(self) -> bool:
        return self._module.current_stream(self._device) == self._streams[COMPUTE]

    def run(self, lane: str, work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        if lane not in self._streams:
            self._streams[lane] = self._module.Stream(self._device)
        stream = self._streams[lane]
        with self._module.stream(stream):
            for event in (self._opened, *after):
                if event is not None:
                    stream.wait_event(event)
            work()
            return stream.record_event()

    def lend(self, tensor: Tensor, event: Any) -> None:
        if self.computes_here():
            return
        here = self._module.current_stream(self._device)
        if event is not None:
            here.wait_event(event)
        tensor.record_stream(here)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def lanes_of(device: torch.device) -> Lanes:
    """New lanes of a device; work in others is not waited for."""
    return HostLanes() if device.type == "cpu" else StreamLanes(device)


class Home(Protocol):
    """Where something is computed, and is to be computed again."""

    def at(self) -> AbstractContextManager[None]:
        """Kernels that are launched meanwhile run there, after all that were launched here, and before all
        that will be."""

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Kernels that are launched here from now on come after the last `at`, whose tensors they use."""


class _Anywhere:
    def at(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def lend(self, tensors: Iterable[Tensor]) -> None: ...


class StreamHome:
    """The stream that is current when this is made: autograd runs a backward pass, and what it calls, under
    the stream of the operation's forward pass, which is another one where shared experts overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.current_stream(device)
        self._done: Any = None

    @contextlib.contextmanager
    def at(self) -> Iterator[None]:
        here = self._module.current_stream(self._device)
        if here != self._stream:
            self._stream.wait_stream(here)
        with self._module.stream(self._stream):
            yield
        self._done = self._stream.record_event()
        if here != self._stream:
            here.wait_event(self._done)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        here = self._module.current_stream(self._device)
        if here != self._stream:
            here.wait_event(self._done)
            for tensor in tensors:
                if tensor.device == self._device:
                    tensor.record_stream(here)


def home_of(tensors: Iterable[Tensor]) -> Home:
    """The home of what is computed from these tensors now."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return StreamHome(tensor.device)
    return _Anywhere()
