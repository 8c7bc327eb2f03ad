"""Apex's CUDA kernels of norms, the extension `fused_layer_norm_cuda`.

Written from its source at 6424da3 (csrc/layer_norm_cuda.cpp), whose checks and results a stand-in repeats
in our tests: not run with Apex itself so far, whose kernels need a GPU. Weights are of the dtype of x, and
not zero-centred. What else Apex has for Megatron, weight gradients added to `main_grad` and masked softmax,
Megatron takes by itself where it is installed, and our features leave it there.
"""

import fused_layer_norm_cuda
from torch import Tensor

from accel._peers.limits import require

__all__ = ["OPS"]

NO_CLAMP = 0.0
"""The backward's eps: a larger one would be the least size of a weight, by which it computes h from y where
`memory_efficient` is set."""
MAX_ELEMENTS = 2**31 - 1
"""Its offsets are of 32 bits."""


def _require_plain(x: Tensor, weight: Tensor, zero_centered: bool) -> None:
    require(x.numel() > 0, "no elements")
    require(x.numel() <= MAX_ELEMENTS, f"{x.numel()} elements, more than {MAX_ELEMENTS}")
    require(weight.dtype == x.dtype, f"weights of {weight.dtype} for x of {x.dtype}")
    require(not zero_centered, "zero-centred weights")


def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_fwd`."""
    _require_plain(x, weight, zero_centered)
    y, rstd_T = fused_layer_norm_cuda.rms_forward_affine(
        x.contiguous(), weight.shape, weight.contiguous(), eps
    )
    return y, rstd_T.view(x.shape[:-1])


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_bwd`."""
    _require_plain(x, weight, zero_centered)
    dx, dweight = fused_layer_norm_cuda.rms_backward_affine(
        dy.contiguous(), rstd.reshape(-1), x.contiguous(), weight.shape, weight.contiguous(),
        NO_CLAMP, False,
    )  # fmt: skip
    return dx, dweight


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_fwd`."""
    _require_plain(x, weight, zero_centered)
    y, mean_T, rstd_T = fused_layer_norm_cuda.forward_affine(
        x.contiguous(), weight.shape, weight.contiguous(), bias.contiguous(), eps
    )
    return y, mean_T.view(x.shape[:-1]), rstd_T.view(x.shape[:-1])


def layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_bwd`. Of the bias it wants only shape and dtype, which are weight's."""
    _require_plain(x, weight, zero_centered)
    weight = weight.contiguous()
    dx, dweight, dbias = fused_layer_norm_cuda.backward_affine(
        dy.contiguous(), mean.reshape(-1), rstd.reshape(-1), x.contiguous(), weight.shape, weight,
        weight, NO_CLAMP, False,
    )  # fmt: skip
    return dx, dweight, dbias


OPS = {
    "layer_norm": {
        "accel::layer_norm_fwd": layer_norm_fwd,
        "accel::layer_norm_bwd": layer_norm_bwd,
    },
    "rms_norm": {"accel::rms_norm_fwd": rms_norm_fwd, "accel::rms_norm_bwd": rms_norm_bwd},
}
