"""A residual addition and the RMSNorm of its result, in one pass.

    forward     t = x + residual (after x + bias)       y, r = RMSNorm(t)
    backward    dx = dresidual = dt + RMSNorm backward(dy)      dbias = sum over rows of dx

Each step is rounded to the dtype of x, as torch does it: every result has the very bits that
`t = residual + x` and then `accel.ops.rms_norm(t)` give, forward and backward.

Letters     T  rows, the product of all dimensions of x but the last;   N  columns, the last
Dtypes      as `accel.ops.rms_norm`; residual and bias are like x.
Saved       t and weight, which autograd keeps anyway, and r: 4 T bytes. Neither x nor residual.
Moved       forward 4 T N elements where the two steps move 5, backward 4 where they move 6.
Limits      `unsupported_reason`. Non-contiguous inputs are copied first; the outputs are contiguous.
            A second derivative raises.
"""

from typing import Any

import torch
from torch import Tensor

from accel.ops._dispatch import log_fallback, unsupported
from accel.ops._norm import check_norm_inputs
from accel.ops.rms_norm import rms_norm_ref

__all__ = ["add_rms_norm", "add_rms_norm_ref", "unsupported_reason"]


def add_rms_norm_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    bias: Tensor | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition of correct, on any device. Same contract as `add_rms_norm`."""
    total = residual + (x if bias is None else x + bias)
    return rms_norm_ref(total, weight, eps, zero_centered=zero_centered), total


def unsupported_reason(x: Tensor, residual: Tensor, weight: Tensor) -> str | None:
    """Why `add_rms_norm` takes the reference for valid inputs; None if it takes the kernel."""
    return unsupported("accel::add_rms_norm_fwd", x)


torch.library.define(
    "accel::add_rms_norm_fwd",
    "(Tensor x, Tensor residual, Tensor? bias, Tensor weight, float eps, bool zero_centered)"
    " -> (Tensor y, Tensor total, Tensor rstd)",
)
torch.library.define(
    "accel::add_rms_norm_bwd",
    "(Tensor dy, Tensor? dtotal, Tensor total, Tensor weight, Tensor rstd, bool zero_centered)"
    " -> (Tensor dx, Tensor dweight)",
)
_forward = torch.ops.accel.add_rms_norm_fwd.default
_backward = torch.ops.accel.add_rms_norm_bwd.default


@torch.library.register_fake("accel::add_rms_norm_fwd")
def _forward_fake(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


@torch.library.register_fake("accel::add_rms_norm_bwd")
def _backward_fake(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, _, bias, weight, _, ctx.zero_centered = inputs
    _, total, rstd = output
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(total, weight, rstd)


def _gradients(ctx: Any, dy: Tensor, dtotal: Tensor, _: object) -> tuple[Tensor | None, ...]:
    total, weight, rstd = ctx.saved_tensors
    dx, dweight = _backward(dy, dtotal, total, weight, rstd, ctx.zero_centered)
    dbias = None if ctx.bias_shape is None else dx.sum_to_size(ctx.bias_shape)
    return dx, dx, dbias, dweight, None, None


torch.library.register_autograd("accel::add_rms_norm_fwd", _gradients, setup_context=_save)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    bias: Tensor | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`total = residual + (x + bias)`, and its RMSNorm (`accel.ops.rms_norm`).

    Args:
        x: `[..., N]`, any floating dtype.
        residual: like x in shape, dtype and device.
        weight: `[N]`, the dtype of x or `torch.float32`.
        eps: added to the mean of squares.
        bias: `[N]`, the dtype of x: that of the linear layer which gave x.
        zero_centered: scale by `1 + weight` instead.

    Returns:
        The norm of total, and total; both like x and contiguous.

    Raises:
        ValueError: an input of the wrong shape, dtype or device.

    Where `unsupported_reason` has something to say, that is logged once and `add_rms_norm_ref`
    computes instead.
    """
    check_norm_inputs("add_rms_norm", x, weight=weight)
    if (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"add_rms_norm: residual must be like x, {x.dtype} {list(x.shape)} on {x.device}, got "
            f"{residual.dtype} {list(residual.shape)} on {residual.device}"
        )
    if bias is not None:
        check_norm_inputs("add_rms_norm", x, bias=bias)
        if bias.dtype != x.dtype:
            raise ValueError(f"add_rms_norm: bias must be {x.dtype} like x, got {bias.dtype}")
    if reason := unsupported_reason(x, residual, weight):
        log_fallback("add_rms_norm", reason)
        return add_rms_norm_ref(x, residual, weight, eps, bias=bias, zero_centered=zero_centered)
    return _forward(x, residual, bias, weight, eps, zero_centered)[:2]
