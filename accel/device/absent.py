"""What only CUDA's driver and tools serve, on devices that lack them: marks, sensors, the profiler."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from accel.patching import Patch, table

__all__ = ["patches"]

_HERE = "accel.device.absent"
_MARKS = ("nvtx:range_push", "nvtx:range_pop", "nvtx:mark", "profiler:start", "profiler:stop")
_SENSORS = ("temperature", "power_draw", "clock_rate")


def patches() -> tuple[Patch, ...]:
    """The functions of ``torch.cuda`` that no other device has anything for."""
    marks = {f"torch.cuda.{mark}": "silent" for mark in _MARKS}
    sensors = {f"torch.cuda:{name}": "unmeasured" for name in _SENSORS}
    profiler = {"torch.cuda.nvtx:range": "nvtx_range", "torch.cuda:cudart": "cudart"}
    emit_nvtx = "torch.autograd.profiler:emit_nvtx"
    emitted = {f"{emit_nvtx}.__enter__": "itself", f"{emit_nvtx}.__exit__": "silent"}
    return (
        *table(_HERE, marks, "Marks are for CUDA's profiler."),
        *table(
            _HERE, {"torch.cuda:check_error": "silent"}, "CUDA's profiler has nothing to report."
        ),
        *table(_HERE, profiler, "CUDA's profiler is not there.", how="replace"),
        *table(_HERE, emitted, "Torch without CUDA refuses to mark what runs for its profiler."),
        *table(_HERE, sensors, "NVML reads GPUs alone."),
    )


def cudart() -> SimpleNamespace:
    """The profiler calls of the CUDA run-time library, as no-ops."""
    return SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)


def silent(original: Callable[..., Any]) -> Callable[..., None]:
    """A call with nothing to do there: NVTX marks, and on the host what empties caches."""

    @functools.wraps(original)
    def nothing_to_do(*args: Any, **kwargs: Any) -> None:
        pass

    return nothing_to_do


def itself(original: Callable[..., Any]) -> Callable[[Any], Any]:
    """``__enter__`` of what has nothing to do there."""

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        return self

    return enter


def unmeasured(original: Callable[..., Any]) -> Callable[..., int]:
    """Temperature, power and clock of a GPU that is not there: 0."""

    @functools.wraps(original)
    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    return zero


@contextlib.contextmanager
def nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    yield
