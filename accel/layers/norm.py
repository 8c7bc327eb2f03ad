"""LayerNorm and RMSNorm that may be zero-centred and sequence-parallel.

They are torch's own modules with the missing parts: parameters are marked `sequence_parallel`, so
that Megatron all-reduces their gradients over the tensor-parallel group, and zero-centred weights
start at 0 and scale by `1 + weight`. State-dict keys are torch's. Where weights are 16 bit and x is fp32
(Megatron's `--fp32-residual-connection`), the norm is computed in fp32 and given in 16 bit, as by Apex.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.ops import layer_norm_ref, rms_norm_ref

__all__ = ["GatedRMSNorm", "LayerNorm", "RMSNorm", "normalize"]

rms_norm = rms_norm_ref
layer_norm = layer_norm_ref


class _MegatronNorm(torch.nn.Module):
    """What Megatron's norms have beside torch's: a mixin, to come before torch's class."""

    weight: torch.nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        zero_centered: bool = False,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.zero_centered = zero_centered
        self.sequence_parallel = sequence_parallel
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the first values, and the attributes that `to_empty` drops."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(_MegatronNorm, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` that may be zero-centred; x is `[..., hidden_size]` in any float dtype."""

    eps: float  # torch's may be None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, None, self.eps, self.zero_centered)


class LayerNorm(_MegatronNorm, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` that may be zero-centred; x is `[..., hidden_size]` in any float dtype."""

    def reset_parameters(self) -> None:
        """As `RMSNorm.reset_parameters`."""
        super().reset_parameters()
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.bias, self.eps, self.zero_centered)


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm of each group of columns, before or after they are multiplied by SiLU of a gate.

    State dict: `weight [hidden_size]`. Replaces `mamba_ssm`'s `RMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if group_size is not None and (group_size < 1 or hidden_size % group_size):
            raise ValueError(f"group_size {group_size} does not divide hidden_size {hidden_size}")
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and the gate z: `[..., hidden_size]`, or of other shapes with as many elements in a row."""
        dtype = x.dtype
        wide = torch.promote_types(dtype, torch.float32)
        gate = None if z is None else torch.nn.functional.silu(z.reshape(x.shape).to(wide))
        if gate is not None and not self.norm_before_gate:
            x, gate = x * gate, None
        parts = zip(x.split(self.group_size, -1), self.weight.split(self.group_size), strict=True)
        normed = [normalize(part, weight, None, self.eps, False) for part, weight in parts]
        y = normed[0] if len(normed) == 1 else torch.cat(normed, dim=-1)
        return (y if gate is None else y * gate).to(dtype)


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
) -> torch.Tensor:
    """LayerNorm, or without a bias RMSNorm; of an fp32 x with 16-bit weights in the dtype of these.

    Args:
        x: `[..., N]`.
        weight, bias: `[N]`.
    """
    dtype = x.dtype
    if x.dtype == torch.float32 and weight.dtype != torch.float32:
        dtype, weight = weight.dtype, weight.float()
        bias = None if bias is None else bias.float()
    if bias is None:
        return rms_norm(x, weight, eps, zero_centered=zero_centered).to(dtype)
    return layer_norm(x, weight, bias, eps, zero_centered=zero_centered).to(dtype)
