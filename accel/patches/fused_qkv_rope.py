"""Queries, keys and values in one pass out of their product, rotated on the way; and one pass back.

Megatron cuts the product into views, copies the queries out of it where a group has several, rotates queries
and keys each by a kernel (``fused_rope``), and attention copies the values; backward the three gradients are
joined again. With ``TransformerConfig.fused_single_qkv_rope`` it has a way past all this, of Transformer
Engine's ``apply_fused_qkv_rotary_pos_emb``. Here that function is ``accel.ops.qkv_rope``, and self-attention
takes that way wherever it leads to the same numbers, whatever the option says: not for packed sequences,
inference, normed queries or keys, gates, interleaved pairs, YaRN's factor, or groups that ranks share.

On CUDA, where the kernel is. CUDA graphs of layers (``--cuda-graph-impl local``) are captured on copies of
the angles, of which nothing is known: they hold ``fused_rope``'s kernels, and a line says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from accel.feature import Feature
from accel.ops import qkv_rope, rope
from accel.patches._kernels import kernels
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_ATTENTION = "megatron.core.transformer.attention"
_HERE = "accel.patches.fused_qkv_rope"
HAVE_FUSED_QKV_ROPE = True


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, qkv_split_arg_list: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """As Transformer Engine's: ``[S, B, G, (n + 2) D]`` -> q ``[S, B, G n, D]``, k and v ``[S, B, G, D]``."""
    head_dim = qkv_split_arg_list[-1]
    if q_freqs is k_freqs:
        return qkv_rope(qkv, q_freqs, head_dim)
    q, k, v = qkv.split(list(qkv_split_arg_list), dim=3)
    q = q.reshape(*q.shape[:2], q.shape[2] * q.shape[3] // head_dim, head_dim)
    return rope(q, q_freqs)[0], rope(k, k_freqs)[0], v.contiguous()


@around
def past_the_views(forward: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_served(self, args, kwargs):
        return forward(self, *args, **kwargs)
    with _fused(self.config):
        return forward(self, *args, **kwargs)


@contextlib.contextmanager
def _fused(config: Any) -> Iterator[None]:
    """The option is asked at the beginning of each forward."""
    before, config.fused_single_qkv_rope = config.fused_single_qkv_rope, True
    try:
        yield
    finally:
        config.fused_single_qkv_rope = before


def _is_served(self: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    from megatron.core.transformer.attention import (
        IdentityOp,
        SelfAttention,
        _yarn_get_concentration_factor_from_config,
    )

    config = self.config
    freqs = kwargs.get("rotary_pos_emb")
    if isinstance(freqs, tuple):
        freqs = freqs[0] if len(freqs) == 2 and freqs[0] is freqs[1] else None
    excluded = ("inference_context", "inference_params", "packed_seq_params", "key_value_states")
    options = (
        *("test_mode", "flash_decode", "attention_output_gate", "rotary_interleaved"),
        "multi_latent_attention",
    )
    # upstream takes the rotation away once it is in there
    without = getattr(config, "no_rope_freq", None)
    if without and without[self.layer_number - 1]:
        return False
    # others may cut the product in their own way
    method = getattr(type(self), "get_query_key_value_tensors", None)
    if method is not SelfAttention.get_query_key_value_tensors:
        return False
    return (
        self.attention_type == "self"
        and isinstance(freqs, Tensor)
        and len(args) <= 2  # hidden states and mask
        and all(kwargs.get(name) is None for name in excluded)
        and not any(getattr(config, name, False) for name in options)
        and all(
            norm is None or isinstance(norm, IdentityOp)
            for norm in (self.q_layernorm, self.k_layernorm)
        )
        and _yarn_get_concentration_factor_from_config(config) == 1.0
        and not getattr(self, "offload_qkv_linear", False)
        and config.num_query_groups >= self.world_size
    )


FEATURE = Feature(
    name="fused_qkv_rope",
    summary="cut queries, keys and values out of their product and rotate them in one pass",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cuda",),
    requires=("fused_rope",),
    unavailable=kernels("qkv_rope_fwd"),
    patches=(
        Patch(
            target=f"{_ATTENTION}:apply_fused_qkv_rotary_pos_emb",
            replacement=f"{_HERE}:apply_fused_qkv_rotary_pos_emb",
            how="provide",
            bound="replaced",
            why="Upstream's own is Transformer Engine's, and unbound without it.",
        ),
        Patch(
            target=f"{_ATTENTION}:HAVE_FUSED_QKV_ROPE",
            replacement=f"{_HERE}:HAVE_FUSED_QKV_ROPE",
            why="Says whether the function above is there.",
        ),
        Patch(
            target=f"{_ATTENTION}:Attention.forward",
            replacement=f"{_HERE}:past_the_views",
            how="wrap",
            why="Takes upstream's way without views where the numbers are the same.",
        ),
    ),
)
