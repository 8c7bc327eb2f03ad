"""Where a tensor is made: every ``device="cuda"``, ``cuda:i`` or integer means the host.

Wraps, for ``accel.device.cpu``: torch's factory functions (the table that
``torch.set_default_device`` uses), the ``*_like`` and ``new_*`` families, ``Tensor.to`` / ``cuda``
/ ``cpu`` / ``type``, ``torch.load``, device contexts and autocast. There is no CUDA device to
reach, so the mapping holds for every caller; only what a tensor says *of itself* (``is_cuda``,
``type()``) depends on who asks.

Pinned memory is memory that does not count as the device's (``memory.uncounted``). It is the one host
memory that is apart: a move to the device copies it, as programs that use a pinned buffer again expect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from accel.device.audience import addressed
from accel.device.cpu import memory

__all__ = ["host"]


def host(device: Any) -> Any:
    """Map a device argument to the host: ``"cuda:1"``, ``torch.device("cuda")`` and ``1`` become
    ``cpu``."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


_CPU = torch.device("cpu")


def factory(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with ``device=`` and perhaps ``pin_memory=``; pinned memory is not counted."""

    @functools.wraps(fn)
    def made_on_host(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if (device := kwargs.get("device")) is not None:
                kwargs["device"] = host(device)
            if kwargs.pop("pin_memory", False):
                with memory.uncounted():
                    return fn(*args, **kwargs)
        return fn(*args, **kwargs)

    return made_on_host


def tensor_to(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def to_on_host(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            asked = kwargs["device"]
            kwargs["device"] = host(asked)
        else:
            asked = args[0] if args else None
            if isinstance(asked, (str, int, torch.device)):
                args = (host(asked), *args[1:])
        if _is_cpu(asked) and addressed():
            return _own_copy(self, functools.partial(to, self, *args, **kwargs))
        out = to(self, *args, **kwargs)
        if _is_cpu(asked):
            return out
        like = kwargs.get("tensor", asked)
        if isinstance(like, torch.Tensor) and not memory.is_pinned(like):
            return _unpinned(out)
        if not isinstance(asked, (str, int, torch.device)):
            return out
        out = _unpinned(out)
        return _unrepeated(out) if addressed() else out

    return to_on_host


def tensor_cpu(cpu: Callable[..., Any]) -> Callable[..., Any]:
    """From a device, ``.cpu()`` is a copy; checkpoint writers that run beside the next step rely on
    it."""

    @functools.wraps(cpu)
    def copy_to_host(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not addressed():
            return cpu(self, *args, **kwargs)
        return _own_copy(self, functools.partial(cpu, self, *args, **kwargs))

    return copy_to_host


def tensor_cuda(cuda: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(cuda)
    def stay_on_host(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return _unrepeated(_unpinned(self.to(_CPU, memory_format=memory_format)))

    return stay_on_host


def _unpinned(tensor: torch.Tensor) -> torch.Tensor:
    """On a device nothing is pinned."""
    return tensor.clone() if memory.is_pinned(tensor) else tensor


def _unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    """What an expanded tensor is once it is on a device: every element has a place of its own."""
    repeats = any(
        step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)
    )
    return tensor.contiguous() if repeats else tensor


def tensor_type(type_: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.FloatTensor`` is called ``torch.cuda.FloatTensor`` when the audience asks."""

    @functools.wraps(type_)
    def type_on_host(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = type_(self)
            return name.replace("torch.", "torch.cuda.", 1) if addressed() else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return type_(self, dtype, *args, **kwargs)

    return type_on_host


def is_cuda(original: Any) -> property:
    def get(self: torch.Tensor) -> bool:
        return self.device.type == "cpu" if addressed() else original.__get__(self)

    return property(get)


def record_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def nothing_to_record(self: torch.Tensor, stream: Any) -> None:
        """Host memory is not freed behind a stream's back."""

    return nothing_to_record


def pin_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def copy_uncounted(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        plain = self.device.type == "cpu" and self.layout == torch.strided
        if not plain or not memory.pins() or memory.is_pinned(self):
            return self
        with memory.uncounted():
            return self.clone()

    return copy_uncounted


class _Locations(dict[str, str]):
    """``map_location``'s dict: to the host what goes to a device, and what it does not name."""

    def get(self, location: str, default: Any = None) -> str:
        return str(host(super().get(location, default)))


def load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_on_host(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        location = _CPU if map_location is None else host(map_location)
        if isinstance(location, dict):
            location = _Locations(location)
        return original(f, location, *args, **kwargs)

    return load_on_host


def device_context(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def enter_host(self: Any, device: Any) -> None:
        init(self, host(device))

    return enter_host


def device_type(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def init_for_host(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_for_host


def autocast(init: Callable[..., Any]) -> Callable[..., Any]:
    """Without a dtype, CUDA's: a CPU's own is another."""

    @functools.wraps(init)
    def init_for_host(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    return init_for_host


def function_under_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    """``custom_fwd`` and ``custom_bwd`` of an ``autograd.Function``."""

    @functools.wraps(original)
    def for_host(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return original(
            *args, device_type="cpu" if device_type == "cuda" else device_type, **kwargs
        )

    return for_host


def data_loader(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def without_pinning(self: Any, *args: Any, **kwargs: Any) -> None:
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        init(self, *args, **kwargs)

    return without_pinning


def _is_cpu(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "cpu") or device == "cpu"


def _own_copy(source: torch.Tensor, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
    with memory.uncounted():  # not the device's: from there .cuda() is a copy again
        out = copy()
        return out.clone() if out is source else out
