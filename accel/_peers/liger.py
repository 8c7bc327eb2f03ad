"""Liger-Kernel's Triton kernels (arXiv:2410.10989), read at 0.8.5 and run in its tests' interpreter.

    activation      SwiGLU as it is: no bias, clamp value, offset or factor per row
    add_rms_norm    without a bias
    layer_norm      not zero-centred
    rms_norm        all of them

A row has at most 65536 elements. The norms compute in fp32 (its casting mode "gemma"), as ours do, but
add_rms_norm's two gradients are added there, so that its bits are not those of the two steps; SwiGLU rounds
silu(gate) before the product. The backwards of layer_norm and add_rms_norm are compiled anew for each number
of rows that a processor gets, which packs of many lengths pay for.

Not offered: its squared ReLU, which makes 0 of NaN; its GEGLU, which takes two tensors, so two copies; its
cross entropy, which keeps the logits' exponentials in fp32, four bytes for each where ours keeps none.
"""

from liger_kernel.ops.fused_add_rms_norm import (
    fused_add_rms_norm_backward,
    fused_add_rms_norm_forward,
)
from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward
from liger_kernel.ops.rms_norm import _CASTING_MODE_GEMMA, rms_norm_backward, rms_norm_forward
from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward, swiglu_fused_gate_up_forward
from liger_kernel.ops.utils import calculate_settings
from torch import Tensor

from accel._peers.limits import require

__all__ = ["OPS"]

MAX_COLS = 65536
IN_FP32 = _CASTING_MODE_GEMMA.value
STAGES = 2
"""Of the software pipeline of fused_add_rms_norm, as its forward sets them."""


def _require_rows(x: Tensor) -> None:
    require(x.numel() > 0, "no elements")
    require(x.shape[-1] <= MAX_COLS, f"rows of {x.shape[-1]} elements, more than {MAX_COLS}")


def _offset(zero_centered: bool) -> float:
    return 1.0 if zero_centered else 0.0


def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_fwd`."""
    _require_rows(x)
    y, _, rstd_T, *_ = rms_norm_forward(
        x.contiguous(), weight.contiguous(), eps, _offset(zero_centered), IN_FP32, row_mode=None
    )
    return y, rstd_T.view(x.shape[:-1])


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_bwd`."""
    _require_rows(x)
    block_size, num_warps = calculate_settings(x.shape[-1])
    dx, dweight = rms_norm_backward(
        dy.contiguous(), _rows(x), weight.contiguous(), rstd.reshape(-1), _offset(zero_centered),
        IN_FP32, block_size, num_warps, in_place=False, row_mode=None,
    )  # fmt: skip
    return dx, dweight


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def add_rms_norm_fwd(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::add_rms_norm_fwd`."""
    _require_rows(x)
    require(bias is None, "a bias")
    y, total, rstd_T, *_ = fused_add_rms_norm_forward(
        x.contiguous(), residual.contiguous(), weight.contiguous(), eps, _offset(zero_centered),
        IN_FP32,
    )  # fmt: skip
    return y, total, rstd_T.view(x.shape[:-1])


def add_rms_norm_bwd(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """`accel::add_rms_norm_bwd`. Without dtotal it is RMSNorm's."""
    if dtotal is None:
        return rms_norm_bwd(dy, total, weight, rstd, zero_centered)
    _require_rows(total)
    block_size, num_warps = calculate_settings(total.shape[-1])
    dx, _, dweight = fused_add_rms_norm_backward(
        dy.contiguous(), dtotal.contiguous(), total.contiguous(), weight.contiguous(),
        rstd.reshape(-1), _offset(zero_centered), IN_FP32, block_size, num_warps, STAGES,
        in_place=False,
    )  # fmt: skip
    return dx, dweight


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_fwd`."""
    _require_rows(x)
    require(not zero_centered, "zero-centred weights")
    y, _, mean_T, rstd_T, *_ = layer_norm_forward(
        x.contiguous(), weight.contiguous(), bias.contiguous(), eps
    )
    return y, mean_T.view(x.shape[:-1]), rstd_T.view(x.shape[:-1])


def layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_bwd`. Of the bias it wants only the dtype, which is weight's."""
    _require_rows(x)
    require(not zero_centered, "zero-centred weights")
    weight = weight.contiguous()
    return layer_norm_backward(
        dy.contiguous(), _rows(x), weight, weight, mean.reshape(-1), rstd.reshape(-1)
    )


def _require_plain(
    x: Tensor, bias: Tensor | None, probs: Tensor | None, kind: str, clamp_value: float | None, offset: float
) -> None:  # fmt: skip
    _require_rows(x)
    require(kind == "swiglu", kind)
    require(bias is None, "a bias")
    require(probs is None, "a factor for each row")
    require(clamp_value is None, "a clamp value")
    require(offset == 0, "an offset")


def activation_fwd(
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
    inplace_grad: bool,
) -> Tensor:
    """`accel::activation_fwd`."""
    _require_plain(x, bias, probs, kind, clamp_value, offset)
    return swiglu_fused_gate_up_forward(x.contiguous())[1]


def activation_bwd(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::activation_bwd`."""
    _require_plain(x, bias, probs, kind, clamp_value, offset)
    none, another = x.new_empty(0), x.new_empty(0)
    dx = swiglu_fused_gate_up_backward(x.contiguous(), dy.contiguous())
    return dx.view(x.shape), none, another


def activation_bwd_inplace(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """`accel::activation_bwd_inplace`."""
    _require_plain(x, bias, probs, kind, clamp_value, offset)
    require(x.is_contiguous(), "an x to overwrite that is not contiguous")
    swiglu_fused_gate_up_backward(x, dy.contiguous(), in_place=True)
    return x.new_empty(0), x.new_empty(0)


OPS = {
    "activation": {
        "accel::activation_fwd": activation_fwd,
        "accel::activation_bwd": activation_bwd,
        "accel::activation_bwd_inplace": activation_bwd_inplace,
    },
    "add_rms_norm": {
        "accel::add_rms_norm_fwd": add_rms_norm_fwd,
        "accel::add_rms_norm_bwd": add_rms_norm_bwd,
    },
    "layer_norm": {
        "accel::layer_norm_fwd": layer_norm_fwd,
        "accel::layer_norm_bwd": layer_norm_bwd,
    },
    "rms_norm": {"accel::rms_norm_fwd": rms_norm_fwd, "accel::rms_norm_bwd": rms_norm_bwd},
}
