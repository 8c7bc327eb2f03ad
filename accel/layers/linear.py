"""`Linear` and `LayerNormLinear`: one weight, split by column or row, with a norm before it or not."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from accel.layers import norm
from accel.layers.base import ParallelLayer
from accel.memory.recompute import Recomputed
from accel.parallel.linear import parallel_linear

__all__ = ["LayerNormLinear", "Linear"]


class Linear(ParallelLayer):
    """`y = x W^T + b`, tensor-parallel. Arguments: `ParallelLayer`.

    State dict: `weight [N, K]`, `bias [N]`, `_extra_state` (empty).
    """

    def __init__(self, in_features: int, out_features: int, **shared: Any) -> None:
        super().__init__(in_features, out_features, **shared)
        self.register_norm()
        self.new_weight("weight")
        if self.use_bias:
            self.new_bias("bias")
        else:
            self.bias = None

    def register_norm(self) -> None:
        """For `LayerNormLinear`: its parameters come first in the state dict."""

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[..., K]` -> `[..., N]` (see `accel.parallel.parallel_linear` for what the ranks hold).

        `is_first_microbatch` tells Transformer Engine when its FP8 weights are stale: no meaning here.
        """
        weight: Any = self.weight
        y = parallel_linear(x, weight, None if self.return_bias else self.bias, self.layout)
        return (y, self.bias) if self.return_bias else y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, TP={self.tp_size}"
        )


class LayerNormLinear(Linear):
    """A norm over the features, then `Linear`.

    Args:
        normalization: `LayerNorm` or `RMSNorm`.
        return_layernorm_output: also return what the norm gave (the rows of this rank).

    State dict: `layer_norm_weight [K]`, `layer_norm_bias [K]` (LayerNorm alone), then those of `Linear`.
    """

    recompute_norm = False
    """Whether what the norm gives is freed until the backward pass, where nobody asks for it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **shared: Any,
    ) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={normalization!r}: use LayerNorm or RMSNorm")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        super().__init__(in_features, out_features, **shared)

    def register_norm(self) -> None:
        init = torch.nn.init
        size, marks = (self.in_features,), {"sequence_parallel": self.sequence_parallel}
        fill = init.zeros_ if self.zero_centered_gamma else init.ones_
        self.new_parameter("layer_norm_weight", size, fill, **marks)
        if self.normalization == "RMSNorm":
            self.layer_norm_bias = None
        else:
            self.new_parameter("layer_norm_bias", size, init.zeros_, **marks)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As `Linear.forward`; with `return_layernorm_output`, that is appended to the result."""
        if self.return_layernorm_output or not self.recompute_norm:
            normed = self._norm(x)
            y = super().forward(normed, is_first_microbatch)
        else:
            call = Recomputed(generators=lambda: contextlib.nullcontext)
            y = super().forward(call(self._norm, x), is_first_microbatch)
            call.free(y[0] if isinstance(y, tuple) else y)
        if not self.return_layernorm_output:
            return y
        return (*y, normed) if self.return_bias else (y, normed)

    def _norm(self, x: Tensor) -> Tensor:
        weight: Any = self.layer_norm_weight
        bias: Any = self.layer_norm_bias
        return norm.normalize(x, weight, bias, self.eps, self.zero_centered_gamma)
