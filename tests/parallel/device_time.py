"""A model of the time that a device takes for what it is asked for, on the CPU.

Operations are computed at once, as ever; when a device would be done with each is noted. Kernels run in one
stream and messages in another, in the order in which they were asked for; a message begins when all kernels
asked for before it are done, and one that is waited for ends before kernels asked for later begin.

one queue    nothing begins before what was asked for earlier has begun, a wait included

All ranks do alike, so that a message takes what its own bytes do. Use with a process group of the `fake`
backend, which sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DeviceTime"]


class DeviceTime(TorchDispatchMode):
    """Args:
    seconds: of an operation, by its name and arguments.
    per_byte: seconds of a message.
    """

    def __init__(
        self, seconds: Callable[[str, Sequence[Any]], float], per_byte: float, *, one_queue: bool
    ) -> None:
        super().__init__()
        self._seconds, self._per_byte, self._one_queue = seconds, per_byte, one_queue
        self._newest = {"kernels": 0.0, "link": 0.0}
        """When a stream is done."""
        self._begun = 0.0
        self.computing = 0.0
        """Seconds of kernels alone."""
        self.travelling = 0.0

    def ask(self, stream: str, seconds: float, behind: float = 0.0) -> float:
        """Returns when it is done."""
        begin = max(self._newest[stream], behind)
        if self._one_queue:
            begin = self._begun = max(begin, self._begun)
        self._newest[stream] = begin + seconds
        return self._newest[stream]

    @property
    def end(self) -> float:
        return self._newest["kernels"]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if seconds := self._seconds(func.overloadpacket.__name__, args):
            self.compute(seconds)
        return func(*args, **(kwargs or {}))

    def compute(self, seconds: float) -> None:
        self.computing += seconds
        self.ask("kernels", seconds)

    def batch_isend_irecv(self, ops: Sequence[dist.P2POp]) -> list[_Work]:
        """In place of torch.distributed's: one kernel, as NCCL has it."""
        return [self._send(sum(op.tensor.nbytes for op in ops if op.op is dist.irecv))]

    def all_gather_into_tensor(
        self, out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> _Work:
        return self._send(out.nbytes - x.nbytes)

    def _send(self, nbytes: int) -> _Work:
        seconds = nbytes * self._per_byte
        self.travelling += seconds
        return _Work(self, self.ask("link", seconds, behind=self._newest["kernels"]))


class _Work:
    def __init__(self, device: DeviceTime, end: float) -> None:
        self._device, self._end = device, end

    def wait(self) -> None:
        self._device.ask("kernels", 0.0, behind=self._end)
