"""Whether the native kernels can run here: what a feature built on one says as `unavailable`."""

from __future__ import annotations

from accel.feature import Context
from accel.ops import _native

__all__ = ["kernel_missing"]


def kernel_missing(context: Context) -> str | None:
    """Why a kernel that exists for CPUs only cannot run here; None if it can.

    Raises:
        RuntimeError, ValueError: ``ACCEL_CPU_ISA`` names what this CPU lacks, or nothing known. That
            is an error here and not in the first layer.
    """
    if context.device != "cpu":
        return f"no kernel for {context.device} yet"
    missing = _native.reason()
    if missing is None:
        _native.isa()
    return missing
