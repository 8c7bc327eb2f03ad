"""Activations as modules without parameters, on `accel.ops`; x is `[..., F]`, or `[..., 2F]` where gated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel import ops
from accel.layers.base import refuse_options

__all__ = ["GEGLU", "GELU", "ReGLU", "ReLU", "SiLU", "SwiGLU"]


class _Activation(torch.nn.Module):
    def __init__(self, *, cache_quantized_input: bool = False, **options: Any) -> None:
        super().__init__()
        refuse_options(
            type(self).__name__, {"cache_quantized_input": cache_quantized_input, **options}
        )


class SwiGLU(_Activation):
    """`silu(gate) * up` with `[gate | up] = x`."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.swiglu(x)


class GEGLU(_Activation):
    """`gelu(gate) * up` with `[gate | up] = x`, GELU by its tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.geglu(x)


class ReGLU(_Activation):
    """`relu(gate) * up` with `[gate | up] = x`."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.relu(gate) * up


class GELU(_Activation):
    """GELU by its tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.bias_gelu(x)


class SiLU(_Activation):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)


class ReLU(_Activation):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)
