"""The small rest of ``torch.cuda``: presence, identity, compilation."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from accel import machine
from accel.device.audience import addressed, addressed_fuser

CAPABILITY = (8, 0)
"""Compute capability told to Megatron: bf16 yes, FP8 (8.9) no; nothing that needs Hopper is chosen."""

_OURS = ("accel.device", "accel.device.cpu")


def is_available(original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def available_to_audience() -> bool:
        return addressed() or original()

    return available_to_audience


def is_initialized(original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def initialized_for_audience() -> bool:
        return addressed() or original()

    return initialized_for_audience


def device_count(original: Callable[[], int]) -> Callable[[], int]:
    """One "device" for each rank on this host."""

    @functools.wraps(original)
    def ranks_on_this_host() -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if addressed() else original()

    return ranks_on_this_host


def lazy_init() -> None:
    """There is no CUDA context to create."""


def lazy_call(callable_: Callable[[], None], **kwargs: Any) -> None:
    """Run at once: nothing is deferred to a CUDA initialisation that never comes."""
    callable_()


def get_device_name(device: Any = None) -> str:
    return f"host CPU ({platform.processor() or platform.machine()})"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return CAPABILITY


def get_device_properties(device: Any = None) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=get_device_name(),
        major=major,
        minor=minor,
        total_memory=machine.memory()[1],
        multi_processor_count=os.cpu_count() or 1,
        warp_size=1,
        is_integrated=1,
    )


def current_accelerator(check_available: bool = False) -> None:
    """None: a CUDA build of torch names cuda even where there is no driver."""


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_current_stream_capturing() -> bool:
    return False


def compile_(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``jit_fuser`` is ``torch.compile``: tens of seconds per shape on a CPU, so off by
    default.

    Only calls from the audience's packages are concerned; a script's own ``torch.compile`` works as
    ever. ``ACCEL_CPU_COMPILE=1`` leaves the fusers on.
    """

    @functools.wraps(original)
    def compile_unless_fuser(model: Any = None, **kwargs: Any) -> Any:
        if not addressed_fuser() or os.environ.get("ACCEL_CPU_COMPILE") == "1":
            return original(model, **kwargs)
        return model if model is not None else (lambda fn: fn)

    return compile_unless_fuser


def traced(load_object: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo finds its rule for a torch function by the function itself, in a table that
    ``init_process_group`` empties and the next compilation fills by name. The table must hold
    torch's own functions: programs that imported one by name still call it, and so does everybody
    after :meth:`~accel.patching.Applied.undo`. Our wrappers need no rule, Dynamo traces into them.
    """

    @functools.wraps(load_object)
    def torchs_own(name: str) -> Any:
        found = load_object(name)
        while getattr(found, "__globals__", {}).get("__package__") in _OURS:
            found = getattr(found, "__wrapped__", None)
        return found

    return torchs_own
