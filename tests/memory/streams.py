"""A device whose streams know what their next kernel comes after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["Device", "Stream"]

Event = dict["Stream", int]
"""How many kernels of each stream have run by then."""


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.after: Event = {self: 0}

    def launch(self) -> Event:
        """A kernel; returns its end."""
        self.after[self] += 1
        return dict(self.after)

    record_event = launch

    def wait_event(self, event: Event) -> None:
        for stream, count in event.items():
            self.after[stream] = max(count, self.after.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.after)

    def follows(self, event: Event) -> bool:
        """Whether the next kernel does."""
        return all(self.after.get(stream, 0) >= count for stream, count in event.items())


class Device:
    """In the place of ``torch.cuda``, for tensors of the host."""

    Stream = Stream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream()
        self.recorded: list[tuple[int, Stream]] = []
        """What ``record_stream`` was told: the address of a tensor's memory."""

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self.recorded.append((tensor.data_ptr(), stream))

        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
