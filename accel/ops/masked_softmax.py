"""Softmax over the last dimension of scaled, masked attention scores.

    forward     z_j = scale x_j, or -10000 where the mask hides j       p_j = e^(z_j) / sum e^z
    backward    dx_j = scale p_j (dp_j - sum over k of p_k dp_k), or 0 where it hides j

Letters     B  batch;  H  heads;  Q  queries;  K  keys
Mask        a bool tensor (True is hidden), or causal: query i of Q sees the first i + 1 of Q keys. -10000
            and not minus infinity, as Megatron has it: a query that sees no key spreads evenly.
            A causal row sees at least one key, so its hidden ones are exactly 0.
Dtypes      x, p, dp, dx: one of float32, bfloat16, float16. Arithmetic is fp32, rounded once.
Saved       p, and the mask.
Moved       forward 2 tensors of B H Q K, backward 3: nothing is read twice from memory.
Limits      `unsupported_reason`. Non-contiguous x or dp is copied first. A second derivative raises.

Where `accel.ops.attention` can serve the mask, it needs none of these tensors.
"""

from typing import Any

import torch
from torch import Tensor

from accel.ops._dispatch import log_fallback, refuse_derivative, unsupported

__all__ = ["masked_softmax", "masked_softmax_ref", "unsupported_reason"]

HIDDEN = -10000.0


def masked_softmax_ref(
    x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """The definition of correct: the steps of Megatron's `forward_torch_softmax` with its softmax in
    fp32, on any device. Same contract as `masked_softmax`."""
    z = (x if x.dtype == torch.float64 else x.float()) * scale
    if causal:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    if mask is not None:
        z = z.masked_fill(mask, HIDDEN)
    return torch.softmax(z, dim=-1).to(x.dtype)


def unsupported_reason(x: Tensor) -> str | None:
    """Why `masked_softmax` takes the reference for valid inputs; None if it takes the kernel."""
    return unsupported("accel::masked_softmax_fwd", x)


torch.library.define(
    "accel::masked_softmax_fwd", "(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor"
)
torch.library.define(
    "accel::masked_softmax_bwd",
    "(Tensor dprobs, Tensor probs, Tensor? mask, float scale, bool causal) -> Tensor",
)
_forward = torch.ops.accel.masked_softmax_fwd.default
_backward = torch.ops.accel.masked_softmax_bwd.default


@torch.library.register_fake("accel::masked_softmax_fwd")
def _forward_fake(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("accel::masked_softmax_bwd")
def _backward_fake(
    dprobs: Tensor, probs: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    return probs.new_empty(probs.shape)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, mask, *ctx.options = inputs
    ctx.save_for_backward(output, mask)


def _gradients(ctx: Any, dprobs: Tensor) -> tuple[Tensor | None, ...]:
    return _backward(dprobs, *ctx.saved_tensors, *ctx.options), None, None, None


torch.library.register_autograd("accel::masked_softmax_fwd", _gradients, setup_context=_save)
refuse_derivative("accel::masked_softmax_bwd")


def masked_softmax(
    x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """`softmax(scale * x)` over the last dimension, without what the mask hides.

    Args:
        x: `[B, H, Q, K]`, any floating dtype.
        mask: bool, True is hidden, broadcastable to x; or None.
        scale: multiplies x.
        causal: hide later keys; then Q = K and there is no mask.

    Returns:
        `[B, H, Q, K]`, the dtype of x, contiguous.

    Raises:
        ValueError: an input of the wrong rank, dtype, shape or device.

    Where `unsupported_reason` has something to say, that is logged once and `masked_softmax_ref`
    computes instead.
    """
    _check(x, mask, causal)
    if reason := unsupported_reason(x):
        log_fallback("masked_softmax", reason)
        return masked_softmax_ref(x, mask, scale=scale, causal=causal)
    return _forward(x, mask, scale, causal)


def _check(x: Tensor, mask: Tensor | None, causal: bool) -> None:
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"masked_softmax: x must be floating, [B, H, Q, K], got {x.dtype} {list(x.shape)}"
        )
    if causal and (mask is not None or x.shape[2] != x.shape[3]):
        raise ValueError(
            f"masked_softmax: causal takes no mask and as many queries as keys, got x {list(x.shape)}"
        )
    if mask is None:
        return
    fits = mask.ndim <= 4 and all(
        m in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if mask.dtype != torch.bool or not fits:
        raise ValueError(
            f"masked_softmax: mask must be bool and broadcastable to {list(x.shape)}, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    if mask.device != x.device:
        raise ValueError(f"masked_softmax: mask must be on {x.device} like x, got {mask.device}")
