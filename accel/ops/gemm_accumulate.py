r"""A matrix product added to an fp32 matrix: what a linear layer's weight gradient is.

    out_MN += a_KM^T b_KN          dW_OI += dY_TO^T X_TI   for Y = X W^T

Dtypes      out fp32; a and b bf16: products and sums are fp32, nothing is rounded to bf16 on its way
            into the sum. Other dtypes take the reference.
Saved       nothing: it has no gradient of its own.
Layouts     a may be the transpose of a matrix with contiguous rows; nothing is copied whole for that.
            Rows of a, b and out may be any distance apart.
Moved       a and b once, out once read and once written for every 512 of K.
Memory      a copy of b, in the layout of the kernel, and one of 64 columns of a for each thread.
Order       along K, in pieces of 512; the number of threads changes no bit.
Limits      `unsupported_reason`. On the CPU: oneDNN's bf16 kernels, hence AVX-512 or better.

Replaces Apex's ``fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32``.
"""

import functools

import torch
from torch import Tensor

from accel.ops._dispatch import log_fallback, missing_kernel

__all__ = ["gemm_accumulate", "gemm_accumulate_ref", "unsupported_reason"]


def gemm_accumulate_ref(out_MN: Tensor, a_KM: Tensor, b_KN: Tensor) -> None:
    """The definition of correct: a product in the dtype of out. Holds copies of both operands."""
    out_MN.addmm_(a_KM.t().to(out_MN.dtype), b_KN.to(out_MN.dtype))


def unsupported_reason(out_MN: Tensor, a_KM: Tensor, b_KN: Tensor) -> str | None:
    """Why `gemm_accumulate` takes the reference for valid inputs; None if it takes the kernel."""
    dtypes = (out_MN.dtype, a_KM.dtype, b_KN.dtype)
    if dtypes != (torch.float32, torch.bfloat16, torch.bfloat16):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"dtypes {names} of out, a, b (the kernel takes float32, bfloat16, bfloat16)"
    if out_MN.stride(-1) != 1:
        return f"the rows of out are not contiguous: strides {out_MN.stride()}"
    return device_reason(out_MN.device.type)


@functools.cache
def _device_reason(device_type: str) -> str | None:
    if reason := missing_kernel("accel::gemm_accumulate", device_type):
        return reason
    if device_type == "cpu" and not torch.ops.accel._has_gemm_accumulate():
        return "oneDNN has no bf16 kernel for this CPU"
    return None


def device_reason(device_type: str) -> str | None:
    """Why no kernel can run on devices of this type; None if one can."""
    return _device_reason(device_type)


device_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see _dispatch.py


torch.library.define("accel::gemm_accumulate", "(Tensor(a!) out, Tensor a, Tensor b) -> ()")
_accumulate = torch.ops.accel.gemm_accumulate.default


@torch.library.register_fake("accel::gemm_accumulate")
def _fake(out: Tensor, a: Tensor, b: Tensor) -> None:
    return None


def gemm_accumulate(out_MN: Tensor, a_KM: Tensor, b_KN: Tensor) -> None:
    """`out += a^T @ b`, in place.

    Args:
        out_MN: `[M, N]`; fp32 for the kernel.
        a_KM: `[K, M]`; bf16 for the kernel.
        b_KN: `[K, N]`, the dtype of a.

    Not recorded by autograd: it is part of a backward.

    Raises:
        ValueError: shapes that do not fit each other.

    Where `unsupported_reason` has something to say, that is logged once and `gemm_accumulate_ref`
    computes instead.
    """
    sizes = [list(t.shape) for t in (out_MN, a_KM, b_KN)]
    fits = all(len(size) == 2 for size in sizes) and (
        sizes[1][0] == sizes[2][0] and sizes[0] == [sizes[1][1], sizes[2][1]]
    )
    if not fits:
        raise ValueError(
            "gemm_accumulate: needs out [M, N], a [K, M] and b [K, N], "
            f"got {sizes[0]}, {sizes[1]} and {sizes[2]}"
        )
    if reason := unsupported_reason(out_MN, a_KM, b_KN):
        log_fallback("gemm_accumulate", reason)
    with torch.no_grad():
        (gemm_accumulate_ref if reason else _accumulate)(out_MN, a_KM, b_KN)


def add_product(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """`out += a @ b` in place, with `gemm_accumulate` where that has a kernel; not for autograd.

    Elsewhere in the dtype of out, from copies of the operands.
    """
    if unsupported_reason(out_MN, a_MK, b_KN) is None:
        _accumulate(out_MN, a_MK.t(), b_KN)
    else:
        gemm_accumulate_ref(out_MN, a_MK.t(), b_KN)
