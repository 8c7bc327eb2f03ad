"""Rotary position embedding as one kernel, with cosines and sines computed once for all layers.

Stock Megatron computes cos and sin of all angles for q and again for k in every layer, and then
rotates in some seven passes over the tensor, each rounded. The kernel (``accel.ops.rope``) reads q or
k once where it lies in the fused qkv and rounds once. It serves every way that leads to Megatron's
unfused functions: with and without ``--apply-rope-fusion`` (see the feature ``rope_fusion``),
rotate-half and interleaved pairs, part of the head, packed sequences with context parallelism, YaRN's
factor, multi-latent attention, inference.

The tables of cos and sin take as many bytes as the angles, which Megatron keeps anyway. Forms of input
that broadcast in other ways (flash decoding's) stay with Megatron's functions, which is logged once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.feature import Feature
from accel.ops import rope
from accel.ops._dispatch import log_fallback
from accel.ops.rope import Layout
from accel.patches._kernels import kernels
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE, te_kernel_for

_WHY = "One pass with shared tables, in place of cos and sin for each tensor and seven passes."


def _layout(rotary_interleaved: bool, mla: bool) -> Layout | None:
    """None for both at once, which Megatron's configuration refuses."""
    if mla:
        return None if rotary_interleaved else "interleaved_to_half"
    return "interleaved" if rotary_interleaved else "half"


def _fits(t: Tensor, freqs: Tensor, ndim: int, batch: int) -> bool:
    """Whether the inputs have the shapes of attention; stock takes all that broadcasts."""
    fits = (
        t.ndim == ndim
        and freqs.ndim == 4
        and (freqs.shape[0] == t.shape[0] or ndim == 3)
        and freqs.shape[1] in (1, batch)
        and freqs.shape[2] == 1
        and freqs.shape[3] % 2 == 0
        and freqs.shape[3] <= t.shape[-1]
    )
    if not fits:
        shapes = f"a tensor of rank {t.ndim} with angles {list(freqs.shape[1:])}"
        log_fallback("fused_rope", f"the kernel does not take {shapes}")
    return fits


def rotate_sbhd(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ``_apply_rotary_pos_emb_bshd``. Its fourth parameter is called multi_latent_attention up to
    0.18 and mla_rotary_interleaved from 0.19 on, with the old name last: both are taken."""

    @functools.wraps(stock)
    def apply(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        multi_latent_attention: bool | None = None,
    ) -> Tensor:
        mla = mla_rotary_interleaved if multi_latent_attention is None else multi_latent_attention
        layout = _layout(rotary_interleaved, mla)
        if layout is None or not _fits(t, freqs, 4, t.shape[1]):
            return stock(t, freqs, rotary_interleaved, mla, mscale)
        return rope(t, freqs, layout=layout, mscale=mscale)[0]

    return apply


def rotate_thd(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ``_apply_rotary_pos_emb_thd``; see :func:`rotate_sbhd`."""

    @functools.wraps(stock)
    def apply(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
        multi_latent_attention: bool | None = None,
    ) -> Tensor:
        mla = mla_rotary_interleaved if multi_latent_attention is None else multi_latent_attention
        layout = _layout(rotary_interleaved, mla)
        if cp_group is None or layout is None or not _fits(t, freqs, 3, 1):
            return stock(t, cu_seqlens, freqs, rotary_interleaved, mla, mscale, cp_group)
        return rope(
            t,
            freqs,
            layout=layout,
            mscale=mscale,
            cu_seqlens=cu_seqlens,
            cp_size=cp_group.size(),
            cp_rank=cp_group.rank(),
        )[0]

    return apply


FEATURE = Feature(
    name="fused_rope",
    summary="rotate queries and keys in one kernel, cosines and sines computed once",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("rope",),
    aside=te_kernel_for("apply_rope_fusion"),
    unavailable=kernels("rope"),
    patches=(
        Patch(
            target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
            replacement="accel.patches.fused_rope:rotate_sbhd",
            how="wrap",
            sources={"0.17.1": "2d6f53f0fe6f", "0.18.2": "2d6f53f0fe6f", "0.19.2": "4a54b66e47ae"},
            why=_WHY,
        ),
        Patch(
            target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
            replacement="accel.patches.fused_rope:rotate_thd",
            how="wrap",
            sources={"0.17.1": "45c1da33b8ab", "0.18.2": "45c1da33b8ab", "0.19.2": "99798acffbb2"},
            why=_WHY,
        ),
    ),
)
