"""What "cuda" means on this machine.

Megatron-LM is written against ``torch.cuda``. A :class:`Device` makes those calls mean something
here:

* ``cuda``: nothing to do;
* ``npu``: torch-npu's own ``transfer_to_npu`` redirects ``torch.cuda`` to the Ascend card;
* ``cpu``: ``accel.device.cpu`` serves the calls from the host, on gloo.

``ACCEL_DEVICE=auto|cpu|cuda|npu`` chooses; ``auto`` takes a CUDA device if there is one, then an
NPU, then the CPU. Nothing in this package names Megatron: the packages that shall be told "yes,
there is a cuda device" are passed to :meth:`Device.install`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accel.patching import Applied

__all__ = ["NAMES", "Device", "select"]

_log = logging.getLogger("accel")

NAMES = ("cpu", "cuda", "npu")


@dataclass(frozen=True)
class Device:
    """A device runtime that has been chosen but not yet installed."""

    name: str
    """``cpu``, ``cuda`` or ``npu``."""
    reason: str
    """Why this one: what was asked for or found."""
    install: Callable[[Sequence[str]], Applied]
    """Called with the top-level packages that are to see a cuda device; returns what undoes it."""


def select(name: str | None = None) -> Device:
    """Choose the device runtime.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` or ``npu``; ``None`` reads ``ACCEL_DEVICE`` (``auto``).

    Raises:
        ValueError: for an unknown name, or a device that is asked for by name and is not there.
    """
    asked = name or os.environ.get("ACCEL_DEVICE") or "auto"
    if asked not in (*NAMES, "auto"):
        raise ValueError(f"ACCEL_DEVICE={asked!r}: use auto, {', '.join(NAMES)}")
    found = {"cuda": _has_cuda, "npu": _has_npu, "cpu": lambda: True}
    if asked == "auto":
        chosen = next(n for n in ("cuda", "npu", "cpu") if found[n]())
        reason = (
            "no CUDA device and no torch-npu found" if chosen == "cpu" else f"{chosen} device found"
        )
    elif found[asked]():
        chosen, reason = asked, f"ACCEL_DEVICE={asked}" if name is None else f"{asked} asked for"
    else:
        raise ValueError(
            f"ACCEL_DEVICE={asked}: no {asked} device on this machine; "
            "use ACCEL_DEVICE=cpu to run on the host"
        )
    return Device(chosen, reason, _INSTALL[chosen])


def _has_cuda() -> bool:
    import torch

    if _REDIRECT in sys.modules:
        return False
    return torch.backends.cuda.is_built() and torch.cuda.is_available()


_REDIRECT = "torch_npu.contrib.transfer_to_npu"
"""Where a script has imported it first, it says that NPUs are available as CUDA."""


def _has_npu() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        import torch_npu
    except (ImportError, OSError) as e:  # without CANN, say
        _log.warning("torch-npu is installed, and cannot be imported: %s", e)
        return False
    return bool(torch_npu.npu.is_available())


def _install_cpu(audience: Sequence[str]) -> Applied:
    from accel.device import cpu

    return cpu.install(audience)


def _install_cuda(audience: Sequence[str]) -> Applied:
    from accel.device import cuda

    return cuda.install(audience)


def _install_npu(audience: Sequence[str]) -> Applied:
    from accel.device import npu

    return npu.install(audience)


_INSTALL: dict[str, Callable[[Sequence[str]], Applied]] = {
    "cpu": _install_cpu,
    "cuda": _install_cuda,
    "npu": _install_npu,
}
