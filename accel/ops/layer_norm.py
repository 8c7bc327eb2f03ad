"""LayerNorm (Ba, Kiros and Hinton 2016, arXiv:1607.06450) over the last dimension.

    forward     m = mean(x)                        r = 1 / sqrt(mean((x - m)^2) + eps)
                h = (x - m) r                      y = h s + bias     s = weight, or 1 + weight
    backward    g = dy s                           dx = r (g - mean(g) - h mean(g h))
                                                   dweight = sum over rows of dy h,  dbias = of dy

Letters     T  rows, the product of all dimensions of x but the last;   N  columns, the last
Dtypes      x, y, dy, dx: float32, bfloat16 or float16. weight, bias and their gradients: the same,
            or float32. All arithmetic and every sum is fp32; rounded once, on the way out.
Saved       x, weight and bias, as autograd does anyway, and m and r: 8 T bytes. Not y, not h.
Moved       forward 2 T N elements, backward 3 T N: nothing is read twice from memory.
Order       dweight and dbias are summed in an order fixed by T alone: the number of threads changes
            no bit.
Limits      `unsupported_reason`. Non-contiguous x or dy is copied first; y is contiguous.
            A second derivative raises.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._dispatch import log_fallback, unsupported
from accel.ops._norm import check_norm_inputs

__all__ = ["layer_norm", "layer_norm_ref", "unsupported_reason"]


def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, zero_centered: bool = False
) -> Tensor:
    """The definition of correct: `F.layer_norm`, on any device. Same contract as `layer_norm`."""
    scale = weight + 1 if zero_centered else weight
    return F.layer_norm(x, weight.shape, scale, bias, eps)


def unsupported_reason(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Why `layer_norm` takes the reference for valid inputs; None if it takes the kernel."""
    return unsupported("accel::layer_norm_fwd", x)


torch.library.define(
    "accel::layer_norm_fwd",
    "(Tensor x, Tensor weight, Tensor bias, float eps, bool zero_centered)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
)
torch.library.define(
    "accel::layer_norm_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool zero_centered)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
)
_forward = torch.ops.accel.layer_norm_fwd.default
_backward = torch.ops.accel.layer_norm_bwd.default


@torch.library.register_fake("accel::layer_norm_fwd")
def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@torch.library.register_fake("accel::layer_norm_bwd")
def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight, _, _, ctx.zero_centered = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)


def _gradients(ctx: Any, dy: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = _backward(dy, x, weight, mean, rstd, ctx.zero_centered)
    return dx, dweight, dbias, None, None


torch.library.register_autograd("accel::layer_norm_fwd", _gradients, setup_context=_save)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, zero_centered: bool = False
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension.

    Args:
        x: `[..., N]`, any floating dtype.
        weight: `[N]`, the dtype of x or `torch.float32`, on the device of x.
        bias: `[N]`, the dtype of weight.
        eps: added to the variance, which is the mean square (biased).
        zero_centered: scale by `1 + weight` instead (Megatron's `--apply-layernorm-1p`).

    Returns:
        `[..., N]`, the dtype of x, contiguous.

    Raises:
        ValueError: an input of the wrong shape, dtype or device.

    Where `unsupported_reason` has something to say, that is logged once and `layer_norm_ref`
    computes instead.
    """
    check_norm_inputs("layer_norm", x, weight=weight, bias=bias)
    if reason := unsupported_reason(x, weight, bias):
        log_fallback("layer_norm", reason)
        return layer_norm_ref(x, weight, bias, eps, zero_centered=zero_centered)
    return _forward(x, weight, bias, eps, zero_centered)[0]
