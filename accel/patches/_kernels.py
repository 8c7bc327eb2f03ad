"""Whether the kernels of a feature's ops can run here: what it says as `unavailable`."""

from __future__ import annotations

from collections.abc import Callable

from accel.feature import Context
from accel.ops import _native
from accel.ops._dispatch import missing_kernel

__all__ = ["kernels"]


def kernels(*ops: str) -> Callable[[Context], str | None]:
    """Why there are no kernels for these ops on the device of a context; None if there are.

    Args:
        ops: names in the namespace of accel, say "rms_norm_fwd"; none for what needs of the native
            library only what serves every device, and on the CPU all of it.

    The returned function raises `RuntimeError` or `ValueError` where ``ACCEL_CPU_ISA`` names what this
    CPU lacks, or nothing known. That is an error here and not in the first layer.
    """

    def reason(context: Context) -> str | None:
        if context.device == "cpu":
            if why := _native.reason():
                return why
            _native.isa()
        missing = (missing_kernel(f"accel::{op}", context.device) for op in ops)
        return next(filter(None, missing), None)

    return reason
