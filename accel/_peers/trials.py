"""Small calls of the ops that other libraries may serve, beside their references.

A trial takes the functions that serve an op's parts, a dtype and a device, and yields what each result is,
the result, and what the reference gives in fp32 on the CPU: PyTorch's settings for CUDA are the user's.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from accel.ops.activation import activation_ref
from accel.ops.add_rms_norm import add_rms_norm_ref
from accel.ops.layer_norm import layer_norm_ref
from accel.ops.rms_norm import rms_norm_ref

__all__ = ["DTYPES", "STATISTICS", "TRIALS"]

DTYPES = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Tried in these, and the error allowed: its norm over the result's. Right ones have some 1e-7 and 0.004."""

STATISTICS = ("mean", "rstd")
"""Of rows, fp32 always."""

Functions = Mapping[str, Callable[..., Any]]
Results = Iterator[tuple[str, Tensor, Tensor]]
ROWS, COLS = 37, 320
"""Neither a power of two nor a whole number of any block's rows."""
MANY, FEW = 32771, 64
"""Rows and columns of a norm of heads, for which a library may have another kernel."""
EPS = 1e-5


def _inputs(
    dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Random tensors there, and leaves of fp32 on the CPU with the same values."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [t.to(device) for t in tensors], [t.float().requires_grad_() for t in tensors]


def rms_norm(functions: Functions, dtype: torch.dtype, device: torch.device) -> Results:
    """Also of the norm of many heads, and last zero-centred, which not every library takes."""
    forward, backward = functions["accel::rms_norm_fwd"], functions["accel::rms_norm_bwd"]
    for rows, cols, centred in ((ROWS, COLS, False), (MANY, FEW, False), (ROWS, COLS, True)):
        shapes = ((rows, cols), (cols,), (rows, cols))
        (x, weight, dy), (x32, weight32, dy32) = _inputs(dtype, device, *shapes)
        wanted = rms_norm_ref(x32, weight32, EPS, zero_centered=centred)
        y, rstd = forward(x, weight, EPS, centred)
        yield "y", y, wanted
        yield "rstd", rstd, (x32.square().mean(-1) + EPS).rsqrt()
        found = backward(dy, x, weight, rstd, centred)
        gradients = torch.autograd.grad(wanted, (x32, weight32), dy32)
        yield from zip(("dx", "dweight"), found, gradients, strict=True)


def layer_norm(functions: Functions, dtype: torch.dtype, device: torch.device) -> Results:
    forward, backward = functions["accel::layer_norm_fwd"], functions["accel::layer_norm_bwd"]
    shapes = ((ROWS, COLS), (COLS,), (COLS,), (ROWS, COLS))
    (x, weight, bias, dy), (x32, weight32, bias32, dy32) = _inputs(dtype, device, *shapes)
    wanted = layer_norm_ref(x32, weight32, bias32, EPS)
    y, mean, rstd = forward(x, weight, bias, EPS, False)
    yield "y", y, wanted
    yield "mean", mean, x32.mean(-1)
    yield "rstd", rstd, (x32.var(-1, correction=0) + EPS).rsqrt()
    found = backward(dy, x, weight, mean, rstd, False)
    gradients = torch.autograd.grad(wanted, (x32, weight32, bias32), dy32)
    yield from zip(("dx", "dweight", "dbias"), found, gradients, strict=True)


def add_rms_norm(functions: Functions, dtype: torch.dtype, device: torch.device) -> Results:
    forward, backward = functions["accel::add_rms_norm_fwd"], functions["accel::add_rms_norm_bwd"]
    shapes = ((ROWS, COLS), (ROWS, COLS), (COLS,), (ROWS, COLS), (ROWS, COLS))
    (x, residual, weight, *grads), (x32, residual32, weight32, *grads32) = _inputs(
        dtype, device, *shapes
    )
    wanted = add_rms_norm_ref(x32, residual32, weight32, EPS)
    y, total, rstd = forward(x, residual, None, weight, EPS, False)
    yield from (("y", y, wanted[0]), ("total", total, wanted[1]))
    yield "rstd", rstd, (wanted[1].square().mean(-1) + EPS).rsqrt()
    found = backward(*grads, total, weight, rstd, False)
    gradients = torch.autograd.grad(wanted, (x32, weight32), grads32)  # of residual as of x
    yield from zip(("dx", "dweight"), found, gradients, strict=True)


def activation(functions: Functions, dtype: torch.dtype, device: torch.device) -> Results:
    """SwiGLU, the kind that a library takes."""
    (x, dy), (x32, dy32) = _inputs(dtype, device, (ROWS, 2 * COLS), (ROWS, COLS))
    wanted = activation_ref("swiglu", x32)
    (gradient,) = torch.autograd.grad(wanted, x32, dy32)
    options = (None, None, "swiglu", None, 0.0)
    yield "y", functions["accel::activation_fwd"](x, *options, False), wanted
    yield "dx", functions["accel::activation_bwd"](dy, x, *options)[0], gradient
    functions["accel::activation_bwd_inplace"](dy, x, *options)
    yield "dx in place", x, gradient


TRIALS = {
    "activation": activation,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}
