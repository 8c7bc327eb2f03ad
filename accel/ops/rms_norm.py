"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension.

    forward     r = 1 / sqrt(mean(x^2) + eps)      y = x r s          s = weight, or 1 + weight
    backward    h = x r,  g = dy s                 dx = r (g - h mean(g h))
                                                   dweight = sum over rows of dy h

Letters     T  rows, the product of all dimensions of x but the last;   N  columns, the last
Dtypes      x, y, dy, dx: float32, bfloat16 or float16. weight, dweight: the same, or float32.
            All arithmetic and every sum is fp32; rounded once, on the way out.
Saved       x and weight, as autograd does anyway, and r: 4 T bytes. Not y.
Moved       forward 2 T N elements, backward 3 T N: nothing is read twice from memory.
Order       dweight is summed in an order fixed by T alone: the number of threads changes no bit.
Limits      `unsupported_reason`. Non-contiguous x or dy is copied first; y is contiguous.
            A second derivative raises.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._dispatch import log_fallback, unsupported
from accel.ops._norm import check_norm_inputs

__all__ = ["rms_norm", "rms_norm_ref", "unsupported_reason"]


def rms_norm_ref(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered: bool = False
) -> Tensor:
    """The definition of correct: `F.rms_norm`, on any device. Same contract as `rms_norm`."""
    scale = weight + 1 if zero_centered else weight
    return F.rms_norm(x, weight.shape, scale, eps)


def unsupported_reason(x: Tensor, weight: Tensor) -> str | None:
    """Why `rms_norm` takes the reference for valid inputs; None if it takes the kernel."""
    return unsupported("accel::rms_norm_fwd", x)


torch.library.define(
    "accel::rms_norm_fwd",
    "(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor y, Tensor rstd)",
)
torch.library.define(
    "accel::rms_norm_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool zero_centered)"
    " -> (Tensor dx, Tensor dweight)",
)
_forward = torch.ops.accel.rms_norm_fwd.default
_backward = torch.ops.accel.rms_norm_bwd.default


@torch.library.register_fake("accel::rms_norm_fwd")
def _forward_fake(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("accel::rms_norm_bwd")
def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight, _, ctx.zero_centered = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, rstd)


def _gradients(ctx: Any, dy: Tensor, _: object) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = _backward(dy, x, weight, rstd, ctx.zero_centered)
    return dx, dweight, None, None


torch.library.register_autograd("accel::rms_norm_fwd", _gradients, setup_context=_save)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered: bool = False
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        x: `[..., N]`, any floating dtype.
        weight: `[N]`, the dtype of x or `torch.float32`, on the device of x.
        eps: added to the mean of squares.
        zero_centered: scale by `1 + weight` instead (Megatron's `--apply-layernorm-1p`).

    Returns:
        `[..., N]`, the dtype of x, contiguous.

    Raises:
        ValueError: an input of the wrong shape, dtype or device.

    Where `unsupported_reason` has something to say, that is logged once and `rms_norm_ref` computes
    instead.
    """
    check_norm_inputs("rms_norm", x, weight=weight)
    if reason := unsupported_reason(x, weight):
        log_fallback("rms_norm", reason)
        return rms_norm_ref(x, weight, eps, zero_centered=zero_centered)
    return _forward(x, weight, eps, zero_centered)[0]
