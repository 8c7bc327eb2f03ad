"""The activations on Ascend: see `accel/ops/activation.py` for the formulas.

    swiglu              npu_swiglu, npu_swiglu_backward
    geglu               npu_geglu with the tanh formula and the gate on the left, npu_geglu_grad
    gelu                npu_gelu, npu_gelu_backward
    swiglu, quick_geglu with a clamp: npu_clipped_swiglu forward; it has no backward

Everything else, the gradients of what is clamped among it, is plain PyTorch in fp32. To torch-npu's
ops go contiguous tensors: x + bias, rounded, and dy times the probability, rounded; their results
are rounded before the probability multiplies them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from accel.ops.activation import gradient_limit

__all__ = ["KERNELS", "backward", "backward_inplace", "forward"]

GATED = frozenset({"swiglu", "geglu", "quick_geglu"})
FUSED = frozenset({"swiglu", "geglu", "gelu"})
"""Have ops of torch-npu there and back, for what is neither clamped nor offset."""
SLOPE = {"swiglu": 1.0, "quick_geglu": 1.702}
"""Of the sigmoid's argument: alpha of `npu_clipped_swiglu`."""
TANH = 1
"""`approximate` of `npu_geglu`."""


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _factor(x: Tensor, probs: Tensor) -> Tensor:
    """fp32 `[..., 1]`."""
    return probs.float().reshape(*x.shape[:-1], 1)


def forward(
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
    inplace_grad: bool,
) -> Tensor:
    """`accel::activation_fwd`."""
    halves = 2 if kind in GATED else 1
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // halves))
    x = x.contiguous()
    y = _without_probs(x, bias, kind, clamp_value, offset)
    if probs is not None:
        y = y.float() * _factor(x, probs)
    return y.to(x.dtype)


def _without_probs(
    x: Tensor, bias: Tensor | None, kind: str, clamp_value: float | None, offset: float
) -> Tensor:
    """y before the probability, in the dtype of x or fp32."""
    if kind in FUSED and clamp_value is None and not offset:
        return _by_npu(_biased(x, bias), kind)
    if kind in SLOPE and clamp_value is not None and x.ndim > 1:
        return torch.ops.npu.npu_clipped_swiglu(
            _biased(x, bias),
            dim=-1,
            alpha=SLOPE[kind],
            limit=clamp_value,
            bias=offset,
            interleaved=False,
        )
    return _value(_wide(x, bias), kind, clamp_value, offset)


def _by_npu(v: Tensor, kind: str) -> Tensor:
    """y before the probability, of a kind that is FUSED."""
    if kind == "gelu":
        return torch.ops.npu.npu_gelu(v, approximate="tanh")
    if kind == "swiglu":
        return torch.ops.npu.npu_swiglu(v, dim=-1)
    return torch.ops.npu.npu_geglu(v, dim=-1, approximate=TANH, activate_left=True)[0]


def backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::activation_bwd`."""
    if x.numel() == 0:
        dbias, dprobs = (
            x.new_empty(0) if t is None else torch.zeros_like(t) for t in (bias, probs)
        )
        return x.new_empty(x.shape), dbias, dprobs
    dy, x = dy.contiguous(), x.contiguous()
    dv = dy if probs is None else dy.float() * _factor(x, probs)
    y: Tensor | None
    if kind in FUSED and clamp_value is None and not offset:
        dx, y = _gradient_by_npu(dv.to(x.dtype), _biased(x, bias), kind)
    else:
        dx, y = _gradient(dv.float(), _wide(x, bias), kind, clamp_value, offset)
    dbias = x.new_empty(0)
    if bias is not None:
        dbias = dx.reshape(-1, x.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)
    dprobs = x.new_empty(0)
    if probs is not None:
        if y is None:
            y = _without_probs(x, bias, kind, clamp_value, offset)
        dprobs = (dy.float() * y.float()).sum(-1).reshape(probs.shape).to(probs.dtype)
    return dx.to(x.dtype), dbias, dprobs


def _gradient_by_npu(dv: Tensor, v: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """dx of a kind that is FUSED, and y where it is there."""
    if kind == "gelu":
        return torch.ops.npu.npu_gelu_backward(dv, v, approximate="tanh"), None
    if kind == "swiglu":
        return torch.ops.npu.npu_swiglu_backward(dv, v, dim=-1), None
    options = {"dim": -1, "approximate": TANH, "activate_left": True}
    y, gelu = torch.ops.npu.npu_geglu(v, **options)
    return torch.ops.npu.npu_geglu_grad(dv, v, gelu, **options), y


def _wide(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() if bias is None else x.float() + bias.float()


def _swish(slope: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def swish(v: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(slope * v)
        return v * s, s * (1 + slope * v * (1 - s))

    return swish


def _gelu(v: Tensor) -> tuple[Tensor, Tensor]:
    root = math.sqrt(2 / math.pi)
    t = torch.tanh(root * (v + 0.044715 * v * v * v))
    slope = root * (1 + 3 * 0.044715 * v * v)
    return 0.5 * v * (1 + t), 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * slope


def _squared_relu(v: Tensor) -> tuple[Tensor, Tensor]:
    rectified = torch.relu(v)
    return rectified * rectified, 2 * rectified


CURVES = {
    "swiglu": _swish(SLOPE["swiglu"]),
    "quick_geglu": _swish(SLOPE["quick_geglu"]),
    "geglu": _gelu,
    "gelu": _gelu,
    "squared_relu": _squared_relu,
}
"""f(v) and its derivative, by plain PyTorch."""


def _value(v: Tensor, kind: str, clamp_value: float | None, offset: float) -> Tensor:
    """y before the probability, fp32."""
    if kind not in GATED:
        return CURVES[kind](v)[0]
    gate, up = v.chunk(2, dim=-1)
    if clamp_value is not None:
        gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
    return CURVES[kind](gate)[0] * (up + offset)


def _gradient(
    dv: Tensor, v: Tensor, kind: str, clamp_value: float | None, offset: float
) -> tuple[Tensor, Tensor]:
    """dx and y, fp32; dv is dy times the probability."""
    if kind not in GATED:
        y, slope = CURVES[kind](v)
        return dv * slope, y
    gate, up = v.chunk(2, dim=-1)
    cut_gate = cut_up = None
    if clamp_value is not None:
        limit = gradient_limit(clamp_value)
        cut_gate, cut_up = gate > limit, up.abs() > limit
        gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
    f, slope = CURVES[kind](gate)
    dgate, dup = dv * (up + offset) * slope, dv * f
    if cut_gate is not None and cut_up is not None:
        dgate, dup = dgate.masked_fill(cut_gate, 0.0), dup.masked_fill(cut_up, 0.0)
    return torch.cat((dgate, dup), dim=-1), f * (up + offset)


def backward_inplace(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """`accel::activation_bwd_inplace`."""
    dx, dbias, dprobs = backward(dy, x, bias, probs, kind, clamp_value, offset)
    x.copy_(dx)
    return dbias, dprobs


KERNELS = {
    "accel::activation_fwd": forward,
    "accel::activation_bwd": backward,
    "accel::activation_bwd_inplace": backward_inplace,
}
