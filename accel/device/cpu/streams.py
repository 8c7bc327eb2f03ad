"""Streams and events on the host: work is done when the call returns, but for collectives.

A CUDA stream orders work that runs later; on the host there is no later. Every stream is therefore
always idle and every event has happened; events still carry the time of :meth:`Event.record`, so
Megatron's timers are right.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from accel.device.cpu.shared_memory import finish_all

__all__ = ["Event", "Stream"]


class Stream:
    """Stands in for ``torch.cuda.Stream``; all methods return at once."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", _CURRENT.device)
        self.device_index = self.device.index
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)

    def wait_stream(self, stream: Any) -> None:
        """The other stream is idle."""

    def wait_event(self, event: Any) -> None:
        """The event has happened."""

    def synchronize(self) -> None:
        """Only collectives are pending."""
        finish_all()

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        _CURRENT.entered.append(_CURRENT.stream)
        _CURRENT.stream = self
        return self

    def __exit__(self, *exc: object) -> None:
        _CURRENT.stream = _CURRENT.entered.pop()


class Event:
    """Stands in for ``torch.cuda.Event``; ``elapsed_time`` is wall-clock milliseconds."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **kwargs: Any,
    ) -> None:
        self.seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Already happened."""

    def synchronize(self) -> None:
        """Already happened, but for collectives."""
        finish_all()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        if self.seconds is None or end_event.seconds is None:
            raise RuntimeError("both events must be recorded before elapsed_time()")
        return 1e3 * (end_event.seconds - self.seconds)


class _Current:
    def __init__(self) -> None:
        self.device = 0
        self.entered: list[Any] = []
        self.stream: Any = None


_CURRENT = _Current()
_DEFAULT = Stream()
_CURRENT.stream = _DEFAULT


def set_device(device: Any) -> None:
    """Remember the index; every index is this host."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index is not None and index >= 0:
        _CURRENT.device = int(index)


def current_device() -> int:
    return _CURRENT.device


def current_stream(device: Any = None) -> Any:
    return _CURRENT.stream


def default_stream(device: Any = None) -> Stream:
    return _DEFAULT


def set_stream(stream: Any) -> None:
    _CURRENT.stream = stream


def stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return stream if isinstance(stream, Stream) else contextlib.nullcontext()


class device:
    """Stands in for the context manager ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self.idx = device
        self.prev_idx = _CURRENT.device

    def __enter__(self) -> None:
        self.prev_idx = _CURRENT.device
        set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        _CURRENT.device = self.prev_idx


def accelerator_device_index() -> int:
    """``torch.accelerator.current_device_index``."""
    return _CURRENT.device


def set_accelerator_device_index(device: Any, /) -> None:
    """``torch.accelerator.set_device_index``."""
    set_device(device)


def accelerator_stream(device: Any = None, /) -> Any:
    """``torch.accelerator.current_stream``."""
    return _CURRENT.stream


def synchronize(device: Any = None) -> None:
    """``torch.cuda.synchronize``: only collectives are pending."""
    finish_all()


def accelerator_synchronize(device: Any = None, /) -> None:
    """``torch.accelerator.synchronize``."""
    finish_all()
