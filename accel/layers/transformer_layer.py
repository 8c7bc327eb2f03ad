"""Transformer Engine's `TransformerLayer`, self-attention and an MLP, on one rank of a tensor-parallel group.

Megatron-LM builds its own layers; this one is for what shards or wraps models of Transformer Engine's, such
as Megatron FSDP. Names of parameters are Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.layers import activation
from accel.layers.attention import DotProductAttention
from accel.layers.base import ParallelLayer, draw_normal, refuse_options
from accel.layers.linear import LayerNormLinear, Linear
from accel.layers.norm import normalize
from accel.parallel.linear import parallel_linear

__all__ = ["TransformerLayer"]

_ACTIVATIONS = {
    "gelu": activation.GELU,
    "relu": activation.ReLU,
    "silu": activation.SiLU,
    "geglu": activation.GEGLU,
    "reglu": activation.ReGLU,
    "swiglu": activation.SwiGLU,
}
_GATED = ("geglu", "reglu", "swiglu")


class _LayerNormQKV(LayerNormLinear):
    """State dict: those of the norm; `query_weight`, `key_weight`, `value_weight` and their biases."""

    def __init__(self, hidden_size: int, sizes: dict[str, int], **shared: Any) -> None:
        self.sizes = sizes
        super().__init__(hidden_size, sum(sizes.values()), **shared)

    def new_weight(self, name: str) -> None:
        for part, size in self.sizes.items():
            self.new_parameter(f"{part}_{name}", (size, self.in_features), self._draw)

    def new_bias(self, name: str) -> None:
        for part, size in self.sizes.items():
            self.new_parameter(f"{part}_{name}", (size,), torch.nn.init.zeros_)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        weight = torch.cat([self.get_parameter(f"{part}_weight") for part in self.sizes])
        bias = None
        if self.use_bias:
            bias = torch.cat([self.get_parameter(f"{part}_bias") for part in self.sizes])
        return parallel_linear(self._norm(x), weight, bias, self.layout)


class _SelfAttention(torch.nn.Module):
    """A norm, queries, keys and values, attention, and a projection: `[S, B, H]` to `[S, B, H]`."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        head_size: int,
        num_gqa_groups: int,
        *,
        attention: dict[str, Any],
        norm: dict[str, Any],
        fuse_qkv_params: bool,
        interleaved: bool,
        output_init_method: Callable[[Tensor], Any] | None,
        **shared: Any,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.groups = num_gqa_groups if interleaved else None
        width, shared_width = head_size * num_attention_heads, head_size * num_gqa_groups
        self.sizes = {"query": width, "key": shared_width, "value": shared_width}
        self.layernorm_qkv: LayerNormLinear = (
            LayerNormLinear(hidden_size, width + 2 * shared_width, **norm, **shared)
            if fuse_qkv_params
            else _LayerNormQKV(hidden_size, self.sizes, **norm, **shared)
        )
        self.core_attention = DotProductAttention(
            num_attention_heads, head_size, num_gqa_groups, **attention
        )
        shared["init_method"] = output_init_method
        self.proj = Linear(width, hidden_size, **shared)

    def forward(self, x: Tensor, attention_mask: Tensor | None, **options: Any) -> Tensor:
        rows, per_head = self.layernorm_qkv(x), (-1, self.head_size)
        if self.groups is None:  # all queries, all keys, all values
            parts = rows.split(list(self.sizes.values()), dim=-1)
            heads = [part.unflatten(-1, per_head) for part in parts]
        else:  # for each group its queries, its key and its value
            grouped = rows.unflatten(-1, (self.groups, *per_head))
            parts = grouped.split([grouped.shape[-2] - 2, 1, 1], dim=-2)
            heads = [part.flatten(-3, -2) for part in parts]
        return self.proj(self.core_attention(*heads, attention_mask, **options))


class _LayerNormMLP(ParallelLayer):
    """A norm and two linear layers with an activation between them; x is `[..., hidden_size]`.

    State dict: `layer_norm_weight`, `layer_norm_bias` (LayerNorm alone), `fc1_weight`, `fc1_bias`,
    `fc2_weight`, `fc2_bias`, `_extra_state` (empty).
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(hidden_size, ffn_hidden_size, **shared)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: use one of {', '.join(_ACTIVATIONS)}")
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.activation = _ACTIVATIONS[activation]()
        init = torch.nn.init
        self.new_parameter(
            "layer_norm_weight", (hidden_size,), init.zeros_ if zero_centered_gamma else init.ones_
        )
        if normalization == "LayerNorm":
            self.new_parameter("layer_norm_bias", (hidden_size,), init.zeros_)
        elif normalization == "RMSNorm":
            self.layer_norm_bias = None
        else:
            raise ValueError(f"normalization={normalization!r}: use LayerNorm or RMSNorm")
        first = ffn_hidden_size * (2 if activation in _GATED else 1)
        init_last = output_layer_init_method or draw_normal

        def last(weight: Tensor) -> None:
            with self._fork():
                init_last(weight)

        sizes = {
            "fc1": (first, hidden_size, self._draw),
            "fc2": (hidden_size, ffn_hidden_size, last),
        }
        for name, (rows, columns, fill) in sizes.items():
            self.new_parameter(f"{name}_weight", (rows, columns), fill)
            if self.use_bias:
                self.new_parameter(f"{name}_bias", (rows,), init.zeros_)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.get_parameter("layer_norm_weight"), self.layer_norm_bias
        x = normalize(x, weight, bias, self.eps, self.zero_centered_gamma)
        return self._linear("fc2", self.activation(self._linear("fc1", x)))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.get_parameter(f"{name}_bias") if self.use_bias else None
        return parallel_linear(x, self.get_parameter(f"{name}_weight"), bias, self.layout)


class TransformerLayer(torch.nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; x is `[S, B, hidden_size]`, or as attn_input_format
    says.

    Args:
        kv_channels: size of a head.
        self_attn_mask_type, window_size, attn_input_format: see `DotProductAttention`.
        fuse_qkv_params: one parameter for queries, keys and values; else one for each.
        qkv_weight_interleaved: whether that one has, group by group, the rows of its queries, its key and its
            value; else those of all queries come first, then of all keys.
        activation: of the MLP: gelu, relu, silu, or gated geglu, reglu, swiglu.
        options: what else Transformer Engine takes: refused if set.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: Any = "cuda",
        attn_input_format: str = "sbhd",
        layer_type: str = "encoder",
        **options: Any,
    ) -> None:
        refuse_options(type(self).__name__, options)
        if layer_type != "encoder":
            raise ValueError(f"layer_type={layer_type!r}: accel's layer has no cross attention")
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError("fuse_wgrad_accumulation needs one parameter: set fuse_qkv_params")
        super().__init__()
        self.hidden_dropout = hidden_dropout
        shared: dict[str, Any] = {
            "init_method": init_method,
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
        }
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
        }
        self.self_attention = _SelfAttention(
            hidden_size,
            num_attention_heads,
            kv_channels or hidden_size // num_attention_heads,
            num_gqa_groups or num_attention_heads,
            attention={
                "attention_dropout": attention_dropout,
                "attn_mask_type": self_attn_mask_type,
                "window_size": window_size,
                "qkv_format": attn_input_format,
                "get_rng_state_tracker": get_rng_state_tracker,
                "layer_number": layer_number,
            },
            norm=norm,
            fuse_qkv_params=fuse_qkv_params,
            interleaved=fuse_qkv_params and qkv_weight_interleaved,
            output_init_method=output_layer_init_method,
            **shared,
        )
        self.layernorm_mlp = _LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            activation=activation,
            output_layer_init_method=output_layer_init_method,
            **norm,
            **shared,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The mask and the options are those of `DotProductAttention.forward`."""
        attended = self.self_attention(hidden_states, attention_mask, **options)
        hidden_states = hidden_states + self._dropped(attended)
        return hidden_states + self._dropped(self.layernorm_mlp(hidden_states))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training)
