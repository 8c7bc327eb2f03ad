"""A residual addition and RMSNorm on Ascend: see `accel/ops/add_rms_norm.py`.

That op promises the bits of an addition and `rms_norm`. `npu_add_rms_norm` gives them in fp32 alone:
of bf16 it norms the sum before it is rounded, and of fp16 it rounds `x r` before it multiplies by the
weight (hicann/ops-nn, norm/add_rms_norm/op_kernel/add_rms_norm.h). There the two are two calls.
"""

import torch
from torch import Tensor

from accel._npu import rms_norm

__all__ = ["KERNELS", "backward", "forward"]


def forward(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::add_rms_norm_fwd`."""
    if bias is not None:
        x = x + bias
    if x.dtype != torch.float32 or x.numel() == 0:
        total = (residual + x).contiguous()
        y, rstd = rms_norm.forward(total, weight, eps, zero_centered)
        return y, total, rstd
    num_cols = x.shape[-1]
    y, rstd, total = torch.ops.npu.npu_add_rms_norm(
        residual.reshape(-1, num_cols),
        x.reshape(-1, num_cols),
        rms_norm.scale_of(weight, zero_centered),
        epsilon=eps,
    )
    return y.view(x.shape), total.view(x.shape), rstd.view(x.shape[:-1])


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """`accel::add_rms_norm_bwd`."""
    dx, dweight = rms_norm.backward(dy, total, weight, rstd, zero_centered)
    return (dx if dtotal is None else dx.add_(dtotal)), dweight


KERNELS = {"accel::add_rms_norm_fwd": forward, "accel::add_rms_norm_bwd": backward}
