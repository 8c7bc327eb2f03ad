"""Activations as modules without parameters, on `accel.ops`; x is `[..., F]`, or `[..., 2F]` where gated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel import ops
from accel.layers.base import refuse_options

__all__ = [
    "GEGLU",
    "GELU",
    "ReGLU",
    "ReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "SiLU",
    "SwiGLU",
]


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


class _Scaled(torch.nn.Module):
    """An activation times one scale for each row, in fp32, rounded once.

    Args:
        glu_interleave_size: gate and up alternate in blocks of that many features.
        activation_recompute_in_mlp: refused. It has a name here, since Megatron passes it, and says what it
            has asked for, only where it finds the name in the signature.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_options(
            type(self).__name__,
            {"activation_recompute_in_mlp": activation_recompute_in_mlp, **options},
        )
        self.glu_interleave_size = glu_interleave_size

    def halves(self, x: Tensor) -> Tensor:
        """`[..., 2F]` -> `[gate | up]`."""
        if self.glu_interleave_size is None:
            return x
        blocks = x.unflatten(-1, (-1, 2, self.glu_interleave_size))
        return blocks.transpose(-3, -2).flatten(-3)


class ScaledSwiGLU(_Scaled):
    """`silu(gate) * up * s`; `[T, 2F]` and `[T]` -> `[T, F]`."""

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        return ops.swiglu(self.halves(x), None, scales)


class ScaledClampedQGeGLU(_Scaled):
    """`quick_gelu(gate) * (up + 1) * s`, the gate clamped from above and up from both sides at `limit`;
    `[T, 2F]` and `[T]` -> `[T, F]`."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        **options: Any,
    ) -> None:
        options["activation_recompute_in_mlp"] = activation_recompute_in_mlp
        super().__init__(glu_interleave_size, **options)
        self.limit = limit

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        x = self.halves(x)
        return ops.geglu(x, None, scales, approximate="quick", clamp_value=self.limit, offset=1.0)


class ScaledSReLU(_Scaled):
    """`relu(x)^2 * s`; `[T, F]` and `[T]` -> `[T, F]`."""

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        return ops.squared_relu(x, None, scales)
