"""The activations of Megatron's MLPs: SwiGLU, GEGLU, GELU and squared ReLU, each as one kernel.

    gated   y = f(min(g, c)) (clamp(u, -c, c) + o) p      [g | u] = x + bias, the halves of a row
    others  y = f(x + bias) p

    swiglu, silu        f(v) = v sigmoid(v)                  Shazeer 2020, arXiv:2002.05202
    geglu, bias_gelu    f(v) = v (1 + tanh(z)) / 2           z = sqrt(2 / pi) (v + 0.044715 v^3)
    geglu "quick"       f(v) = v sigmoid(1.702 v)            Hendrycks and Gimpel, arXiv:1606.08415
    squared_relu        f(v) = max(v, 0)^2                   So et al. 2021, arXiv:2109.08668

Letters     T  rows, the product of all dimensions of x but the last;   F  columns of y
            c  clamp value, rounded to the dtype of x, none by default
            o  offset of the linear half, 0 by default
            p  a factor per row, the routing probability of a MoE's token, 1 by default
Gradients   dx, dbias = sum of dx over rows, dp = sum over columns of dy y / p. The gradient of a
            clamped value is 0; at the clamp value itself as torch does (`gradient_limit`).
Dtypes      x, y, dy, dx, bias, dbias: float32, bfloat16 or float16, all the same. p and dp: that or
            float32. All arithmetic and every sum is fp32; rounded once, on the way out. For results
            of 16 bits e^v may be 2^-18 off.
Saved       x, bias and p, as they are; neither y nor the sum of x and bias.
Moved       gated: forward 3 T F elements, backward 5 T F; others: 2 T F and 3 T F.
In place    With `inplace_grad` dx overwrites x, the saved output of the layer before: 2 T F elements
            less at the peak. A second backward through the same graph, or any other node that saved
            x, then raises; x must not be a leaf that requires grad, or a view of one. Inside
            `torch.compile` the option has no effect: it plans the memory itself.
Order       dbias is summed in an order fixed by T alone: the number of threads changes no bit.
Limits      `unsupported_reason`. Non-contiguous x or dy is copied first; y is contiguous.
            A second derivative raises.
"""

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._dispatch import log_fallback, missing_kernel, unsupported_dtype
from accel.ops._overwriting import overwritable

__all__ = [
    "activation_ref",
    "bias_gelu",
    "geglu",
    "gradient_limit",
    "squared_relu",
    "swiglu",
    "unsupported_reason",
]

CLAMP_PASSES_AT_LIMIT = [int(part) for part in torch.__version__.split(".")[:2]] < [2, 14]


def _quick_gelu(v: Tensor) -> Tensor:
    return v * torch.sigmoid(1.702 * v)


def _squared_relu(v: Tensor) -> Tensor:
    return F.relu(v).square()


GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "quick_geglu": _quick_gelu,
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "squared_relu": _squared_relu,
}


def activation_ref(
    kind: str,
    x: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    clamp_value: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """The definition of correct, on any device; `kind` is a key of GATED or PLAIN."""
    v = x if bias is None else x + bias
    if kind in GATED:
        gate, up = v.chunk(2, dim=-1)
        if clamp_value is not None:
            gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
        y = GATED[kind](gate) * (up + offset if offset else up)
    else:
        y = PLAIN[kind](v)
    if probs is not None:
        y = y * probs.reshape(*x.shape[:-1], 1)
    return y.to(x.dtype)


def _nearest(value: float, dtype: torch.dtype) -> float:
    """`value` >= 0 as torch converts it to `dtype`, through fp32; what is out of its range as it is.

    By arithmetic alone, which torch.compile can trace; a tensor's `item` it cannot.
    """
    for info in (torch.finfo(torch.float32), torch.finfo(dtype)):
        if 0 < value <= info.max:
            _, exponent = math.frexp(value)
            step = info.eps * max(2.0 ** (exponent - 1), info.smallest_normal)
            value = round(value / step) * step
    return value


def gradient_limit(clamp_value: float | None) -> float:
    """The largest fp32 number that, clamped, passes its gradient on; infinity if nothing is clamped.

    At the clamp value itself torch passes it on before 2.14, and no longer.
    """
    if clamp_value is None or clamp_value > torch.finfo(torch.float32).max:
        return float("inf")
    if CLAMP_PASSES_AT_LIMIT:
        return clamp_value
    if clamp_value == 0:
        return -(2.0**-149)
    (word,) = struct.unpack("<i", struct.pack("<f", clamp_value))
    (below,) = struct.unpack("<f", struct.pack("<i", word - 1))
    return below


def unsupported_reason(x: Tensor, probs: Tensor | None = None) -> str | None:
    """Why the reference runs for valid inputs; None if the kernel does."""
    if reason := unsupported_dtype(x.dtype):
        return reason
    if probs is not None and probs.dtype == torch.float64:
        return f"probs of {probs.dtype} (the kernels take the dtype of x or float32)"
    return missing_kernel("accel::activation_fwd", x.device.type)


def _check_inputs(
    op: str, x: Tensor, gated: bool, bias: Tensor | None, probs: Tensor | None
) -> None:
    shape = "[..., 2F]" if gated else "[..., F]"
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be a floating dtype, got {x.dtype}")
    if x.ndim == 0 or (gated and x.shape[-1] % 2):
        raise ValueError(f"{op}: x must have shape {shape}, got {list(x.shape)}")
    width, rows = x.shape[-1], x.shape[:-1]
    if bias is not None:
        if bias.ndim != 1 or bias.shape[0] != width:
            raise ValueError(
                f"{op}: bias must have shape [{width}], the last dimension of x {list(x.shape)}, "
                f"got {list(bias.shape)}"
            )
        if bias.dtype != x.dtype:
            raise ValueError(f"{op}: bias must be {x.dtype} like x, got {bias.dtype}")
    if probs is not None:
        num_rows = rows.numel()
        if tuple(probs.shape) not in {(num_rows,), (num_rows, 1), (*rows,), (*rows, 1)}:
            raise ValueError(
                f"{op}: probs must have shape [{num_rows}] or [{num_rows}, 1], one for each row of "
                f"x {list(x.shape)}, got {list(probs.shape)}"
            )
        if probs.dtype not in (x.dtype, torch.float32, torch.float64):
            raise ValueError(
                f"{op}: probs must be {x.dtype} like x, torch.float32 or torch.float64, got {probs.dtype}"
            )
    for name, tensor in (("bias", bias), ("probs", probs)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} like x, got {tensor.device}")


_ARGUMENTS = "Tensor? bias, Tensor? probs, str kind, float? clamp_value, float offset"
torch.library.define(
    "accel::activation_fwd", f"(Tensor x, {_ARGUMENTS}, bool inplace_grad) -> Tensor y"
)
torch.library.define(
    "accel::activation_bwd",
    f"(Tensor dy, Tensor x, {_ARGUMENTS}) -> (Tensor dx, Tensor dbias, Tensor dprobs)",
)
torch.library.define(
    "accel::activation_bwd_inplace",
    f"(Tensor dy, Tensor(a!) x, {_ARGUMENTS}) -> (Tensor dbias, Tensor dprobs)",
)
_forward = torch.ops.accel.activation_fwd.default
_backward = torch.ops.accel.activation_bwd.default
_backward_inplace = torch.ops.accel.activation_bwd_inplace.default


@torch.library.register_fake("accel::activation_fwd")
def _forward_fake(
    x: Tensor, bias: Tensor | None, probs: Tensor | None, kind: str, *options: object
) -> Tensor:
    halves = 2 if kind in GATED else 1
    return x.new_empty((*x.shape[:-1], x.shape[-1] // halves))


def _empty_like(of: Tensor | None, x: Tensor) -> Tensor:
    """What stands for the gradient of `of`: empty where there is none to compute."""
    return x.new_empty(0) if of is None else of.new_empty(of.shape)


@torch.library.register_fake("accel::activation_bwd_inplace")
def _backward_inplace_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, probs: Tensor | None, *options: object
) -> tuple[Tensor, Tensor]:
    return _empty_like(bias, x), _empty_like(probs, x)


@torch.library.register_fake("accel::activation_bwd")
def _backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, probs: Tensor | None, *options: object
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _empty_like(bias, x), _empty_like(probs, x)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, bias, probs, *ctx.options, inplace_grad = inputs
    ctx.overwrites = inplace_grad and x.requires_grad and x.is_contiguous()
    ctx.spent = False
    ctx.save_for_backward(x, bias, probs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.spent:
        raise RuntimeError(
            f"{ctx.options[0]}: a second backward needs the input that inplace_grad=True has "
            "overwritten"
        )
    if ctx.overwrites and torch.is_grad_enabled():
        raise RuntimeError(
            f"{ctx.options[0]}: inplace_grad=True cannot be combined with create_graph=True"
        )
    x, bias, probs = ctx.saved_tensors
    if ctx.overwrites:
        ctx.spent = True
        dbias, dprobs = _backward_inplace(dy, x, bias, probs, *ctx.options)
        torch.autograd.graph.increment_version(x)  # whoever else saved x must hear of it
        dx = x.detach()
    else:
        dx, dbias, dprobs = _backward(dy, x, bias, probs, *ctx.options)
    return (
        dx,
        None if bias is None else dbias,
        None if probs is None else dprobs,
        *[None] * 4,
    )


torch.library.register_autograd("accel::activation_fwd", _gradients, setup_context=_save)


def _activation(
    op: str,
    kind: str,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    inplace_grad: bool,
    clamp_value: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    _check_inputs(op, x, kind in GATED, bias, probs)
    if clamp_value is not None and not clamp_value >= 0:
        raise ValueError(f"{op}: clamp_value must not be negative, got {clamp_value}")
    inplace_grad = inplace_grad and not torch.compiler.is_compiling()
    if inplace_grad and (reason := overwritable(x)):
        raise ValueError(f"{op}: inplace_grad=True would overwrite x, which is {reason}")
    if reason := unsupported_reason(x, probs):
        log_fallback(op, reason)
        return activation_ref(kind, x, bias, probs, clamp_value, offset)
    if clamp_value is not None:  # torch's clamp compares with what x's dtype holds of it
        clamp_value = _nearest(clamp_value, x.dtype)
    return _forward(x, bias, probs, kind, clamp_value, offset, inplace_grad)


def swiglu(
    x: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    clamp_value: float | None = None,
    offset: float = 0.0,
    inplace_grad: bool = False,
) -> Tensor:
    """`silu(gate) * (up + offset) * probs` with `[gate | up] = x + bias`, clamped.

    Args:
        x: `[..., 2F]`, any floating dtype.
        bias: `[2F]`, the dtype of x, on the device of x.
        probs: one factor per row, `[T]`, `[T, 1]` or the leading dimensions of x with or without a
            trailing 1; the dtype of x, `torch.float32` or `torch.float64`.
        clamp_value: `gate` at most this, `up` within plus and minus this.
        inplace_grad: the gradient of x overwrites x (module docstring).

    Returns:
        `[..., F]`, the dtype of x, contiguous.

    Raises:
        ValueError: an input of the wrong shape, dtype or device; a negative clamp value; a leaf
            or a view of one to be overwritten.
        RuntimeError: in backward, if a gradient needs what `inplace_grad` has overwritten.

    Where `unsupported_reason` has something to say, that is logged once and `activation_ref`
    computes instead.
    """
    return _activation("swiglu", "swiglu", x, bias, probs, inplace_grad, clamp_value, offset)


def geglu(
    x: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    approximate: str = "tanh",
    clamp_value: float | None = None,
    offset: float = 0.0,
    inplace_grad: bool = False,
) -> Tensor:
    """`gelu(gate) * (up + offset) * probs` with `[gate | up] = x + bias`, clamped.

    As `swiglu`, with GELU by its "tanh" approximation (Megatron's `geglu`) or by its "quick" one,
    `v * sigmoid(1.702 * v)` (Megatron's `quick_geglu`). Any other `approximate` is a ValueError.
    """
    kinds = {"tanh": "geglu", "quick": "quick_geglu"}
    if approximate not in kinds:
        raise ValueError(f"geglu: approximate must be one of {list(kinds)}, got {approximate!r}")
    kind = kinds[approximate]
    return _activation("geglu", kind, x, bias, probs, inplace_grad, clamp_value, offset)


def bias_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    inplace_grad: bool = False,
) -> Tensor:
    """`gelu(x + bias) * probs` with the tanh approximation; `[..., F]` in and out, else as `swiglu`."""
    return _activation("bias_gelu", "gelu", x, bias, probs, inplace_grad)


def squared_relu(
    x: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    inplace_grad: bool = False,
) -> Tensor:
    """`relu(x + bias)^2 * probs`; `[..., F]` in and out, else as `swiglu`."""
    return _activation("squared_relu", "squared_relu", x, bias, probs, inplace_grad)
