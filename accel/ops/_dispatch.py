"""Is there a kernel for this op on this device, and who hears about it when there is none.

`missing_kernel` and `log_fallback` are constants to `torch.compile`: it calls them while it traces and keeps
the answer. `_dynamo_marked_constant` is all that `torch.compiler.assume_constant_result` sets, but that
takes a second, because it imports the compiler.
"""

import functools

import torch
from torch import Tensor

from accel.log import log_once
from accel.ops import _native, _npu, _triton

__all__ = [
    "KERNEL_DTYPES",
    "forget",
    "log_fallback",
    "missing_kernel",
    "refuse_derivative",
    "unsupported",
    "unsupported_dtype",
]

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What the kernels of most ops take."""

# PyTorch's dispatch key for each device. "npu" is an out-of-tree backend on the key kept for those.
DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1", "meta": "Meta"}


def _not_loaded(device_type: str) -> str | None:
    """Load what registers kernels for this device; why that cannot be, or None."""
    if device_type == "cpu":
        return _native.reason()
    if device_type == "cuda":
        return _triton.reason()
    if device_type == "npu":
        return _npu.reason()
    return None


@functools.cache
def _missing_kernel(op: str, device_type: str) -> str | None:
    if device_type == "meta":
        return None  # every op has a fake
    reason = _not_loaded(device_type)
    if reason and device_type != "cuda":  # there, Triton may be missing and CUDA C++ serve the op
        return reason
    key = DISPATCH_KEYS.get(device_type)
    if key and torch._C._dispatch_has_kernel_for_dispatch_key(op, key):
        return None
    return reason or f"no kernel for device {device_type!r}"


def missing_kernel(op: str, device_type: str) -> str | None:
    """Why `op`, say "accel::rms_norm_fwd", cannot run on a device of this type; None if it can."""
    return _missing_kernel(op, device_type)


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take tensors of `dtype`; None if they can."""
    if dtype in KERNEL_DTYPES:
        return None
    return f"dtype {dtype} (the kernels take float32, bfloat16 and float16)"


def unsupported(op: str, x: Tensor) -> str | None:
    """Why `op` has no kernel for the dtype or the device of a valid `x`; None if it has one."""
    return unsupported_dtype(x.dtype) or missing_kernel(op, x.device.type)


def forget() -> None:
    """Ask anew which kernels there are: they have changed."""
    _missing_kernel.cache_clear()


def log_fallback(op: str, reason: str) -> None:
    """Say once per distinct reason that `op` takes the slow way."""
    log_once(op, f"using plain PyTorch: {reason}")


def refuse_derivative(op: str) -> None:
    """Make the derivative of `op`, itself a gradient, an error; PyTorch would warn and return none."""

    def refuse(ctx: object, *grads: object) -> None:
        raise RuntimeError(
            f"{op} has no derivative: accel's ops can be differentiated once, their references (*_ref) twice"
        )

    torch.library.register_autograd(op, refuse)


missing_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]
log_fallback._dynamo_marked_constant = True  # type: ignore[attr-defined]
