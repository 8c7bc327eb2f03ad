"""LayerNorm on Ascend: see `accel/ops/layer_norm.py` for the formulas.

ATen's own op, which torch-npu serves (aclnnLayerNorm). Its vectors go in as fp32: then m, r and the
gradients of the vectors come out in fp32 too, whatever x is.
"""

import torch
from torch import Tensor

from accel._npu.rms_norm import scale_of

__all__ = ["KERNELS", "backward", "forward"]


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_fwd`."""
    num_cols = x.shape[-1]
    if x.numel() == 0:
        mean = x.new_zeros(x.shape[:-1], dtype=torch.float32)
        return x.new_empty(x.shape), mean, torch.full_like(mean, eps**-0.5)
    scale = scale_of(weight.float(), zero_centered)
    y, mean, rstd = torch.native_layer_norm(
        x.reshape(-1, num_cols), [num_cols], scale, bias.float(), eps
    )
    return y.view(x.shape), mean.view(x.shape[:-1]), rstd.view(x.shape[:-1])


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_bwd`."""
    if x.numel() == 0:
        return x.new_empty(x.shape), torch.zeros_like(weight), torch.zeros_like(weight)
    num_cols = x.shape[-1]
    scale = scale_of(weight.float(), zero_centered)
    dx, dscale, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.reshape(-1, num_cols),
        x.reshape(-1, num_cols),
        [num_cols],
        mean.reshape(-1, 1),
        rstd.reshape(-1, 1),
        scale,
        torch.zeros_like(scale),
        [True, True, True],
    )
    return dx.view(x.shape), dscale.to(weight.dtype), dbias.to(weight.dtype)


KERNELS = {"accel::layer_norm_fwd": forward, "accel::layer_norm_bwd": backward}
