"""Pieces of a mixture of experts in two streams of a device, for the matrix units to have work while rows are
copied and activations computed.

Kernels of one stream run one after the other. Pieces depend on nothing of each other's, so they take turns:
what is vector work in one, its rows' copies and its activation, runs beside the products of the next. A
backward pass takes the turns of its forward, as autograd would have it.

fork     the second stream goes on after what the first was told before, and at the end the first goes on
         after the second, whatever happened between
share    memory that a stream allocated is its own again as soon as nobody holds the tensor; of what the other
         uses too, the allocator is told

Source: the order of a stream's work and `record_stream` are PyTorch's CUDA semantics, which torch-npu takes
over. tests/distributed/test_expert_streams.py follows both in a model of them, on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["OneStream", "Streams", "TwoStreams"]


class Streams(Protocol):
    """Where the pieces of a layer are computed."""

    def fork(self) -> AbstractContextManager[None]:
        """Turns are taken in it alone."""

    def turn(self, number: int) -> AbstractContextManager[None]:
        """Kernels that are launched meanwhile are of the piece of this number."""

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Pieces of other turns use these too, or what comes after all pieces does."""


class OneStream:
    """One piece after the other."""

    def fork(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def turn(self, number: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def share(self, tensors: Iterable[Tensor]) -> None: ...


class TwoStreams:
    """Pieces of even numbers in the stream that is current when this is made, odd ones in another.

    Args:
        second: a stream of `device`; the same for all layers, as memory that it has freed is its own.
        module: what has `current_stream` and `stream`.
    """

    def __init__(self, second: Any, device: torch.device, module: Any = None) -> None:
        self._module = module or torch.get_device_module(device)
        self._streams = (self._module.current_stream(device), second)

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        first, second = self._streams
        second.wait_stream(first)
        try:
            yield
        finally:
            first.wait_stream(second)

    def turn(self, number: int) -> AbstractContextManager[None]:
        turn: AbstractContextManager[None] = self._module.stream(self._streams[number % 2])
        return turn

    def share(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for stream in self._streams:
                tensor.record_stream(stream)
