"""RMSNorm on Ascend: see `accel/ops/rms_norm.py` for the formulas.

`npu_rms_norm` and `npu_rms_norm_backward` take x of 16 bits with a weight of the same dtype or fp32,
and give r and dweight in fp32. r comes as `[..., 1]`.
"""

import torch
from torch import Tensor

__all__ = ["KERNELS", "backward", "forward", "scale_of"]


def scale_of(weight: Tensor, zero_centered: bool) -> Tensor:
    """What the op multiplies with; `1 + weight` in fp32, where 16 bits would round it."""
    return weight.float() + 1 if zero_centered else weight


def forward(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_fwd`."""
    if x.numel() == 0:
        return x.new_empty(x.shape), x.new_full(x.shape[:-1], eps**-0.5, dtype=torch.float32)
    rows = x.reshape(-1, x.shape[-1])
    y, rstd = torch.ops.npu.npu_rms_norm(rows, scale_of(weight, zero_centered), epsilon=eps)
    return y.view(x.shape), rstd.view(x.shape[:-1])


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_bwd`."""
    if x.numel() == 0:
        return x.new_empty(x.shape), torch.zeros_like(weight)
    num_cols = x.shape[-1]
    dx, dscale = torch.ops.npu.npu_rms_norm_backward(
        dy.reshape(-1, num_cols),
        x.reshape(-1, num_cols),
        scale_of(weight, zero_centered),
        rstd.reshape(-1, 1),
    )
    return dx.view(x.shape), dscale.to(weight.dtype)


KERNELS = {"accel::rms_norm_fwd": forward, "accel::rms_norm_bwd": backward}
