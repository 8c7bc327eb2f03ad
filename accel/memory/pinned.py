"""Host memory that a device copies from and to without stopping the host.

On CUDA it is ordinary memory that is registered with the driver: torch's own pinned memory comes in powers of
two, up to twice what was asked for. On the CPU device runtime it is memory that does not count as the
device's.
"""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from accel.device.cpu.memory import uncounted

__all__ = ["PinnedMemory", "not_on_device"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class PinnedMemory:
    """Tensors on the host, pinned for a device as long as this object lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: list[Tensor] = []  # unpinned before they are freed

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of one dimension with anything in it.

        Raises:
            RuntimeError: the driver cannot pin as much.
        """
        if self.device.type == "cpu":
            with not_on_device(self.device):
                return torch.empty(numel, dtype=dtype)
        if self.device.type != "cuda":
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        tensor = torch.empty(numel, dtype=dtype, device="cpu")
        if tensor.nbytes:
            self._register(tensor)
        return tensor

    def _register(self, tensor: Tensor) -> None:
        cudart = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE))
        if error:
            raise RuntimeError(
                f"cannot pin {tensor.nbytes / 2**30:.2f} GiB of host memory (CUDA error {error}): see "
                "`ulimit -l`, or keep less on the host"
            )
        self._tensors.append(tensor)
        weakref.finalize(self, cudart.cudaHostUnregister, tensor.data_ptr())


def not_on_device(device: torch.device) -> AbstractContextManager[None]:
    """What this thread allocates on the host meanwhile is not the device's, where the host is the device."""
    return uncounted() if device.type == "cpu" else contextlib.nullcontext()
