"""``--apply-rope-fusion``, Megatron's default, where Transformer Engine is not installed.

With the flag, Megatron's configuration asks for two functions that it takes from Transformer Engine
and refuses to be built without them. Here they are Megatron's own unfused functions, so the numbers
are those of ``--no-rope-fusion``; the feature ``fused_rope`` replaces what both lead to by a kernel.

Three layouts do without the flag, and say so: interleaved pairs, which Megatron allows with it from
Transformer Engine 2.3 on; YaRN, whose factor Megatron leaves out with it where sequences are packed; and,
without a GPU, multi-latent attention, whose fused kernels are Triton's. They come to the same functions
then. A configuration of YaRN's that asks for the fusion without a command line has its packs rotated
without it, factor included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from accel.feature import Context, Feature
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_installed, te_serves

_WHY = (
    "Upstream's own is Transformer Engine's and stays None without it; its check wants a function."
)


class _Rank(NamedTuple):
    """As much of a context-parallel group as the packed rotation looks at."""

    cp_size: int
    cp_rank: int

    def size(self) -> int:
        return self.cp_size

    def rank(self) -> int:
        return self.cp_rank


def apply_sbhd(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """As Transformer Engine's: t ``[S, B, heads, D]``; freqs may have more rows than t."""
    from megatron.core.models.common.embeddings import rope_utils

    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs[: t.shape[0]], interleaved)


def apply_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """As Transformer Engine's: t ``[T, heads, D]``, packed sequences."""
    from megatron.core.models.common.embeddings import rope_utils

    group: Any = _Rank(cp_size, cp_rank)
    return rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, interleaved, cp_group=group)


@around
def with_the_factor(
    original: Callable[..., Tensor],
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Wraps ``apply_rotary_pos_emb``: upstream does not pass YaRN's factor to the fused function of packs."""
    if cu_seqlens is not None and mscale != 1.0 and config.apply_rope_fusion:
        config = copy.copy(config)
        config.apply_rope_fusion = False
    return original(t, freqs, config, cu_seqlens, mscale, *args, **kwargs)


def without_the_flag(context: Context) -> list[str]:
    """Turn the flag off where Megatron cannot go with it; a line if so."""
    args = context.args
    if te_installed() or not getattr(args, "apply_rope_fusion", False):
        return []
    if getattr(args, "multi_latent_attention", False):
        why = (
            ""
            if context.device == "cuda"
            else "for multi-latent attention its kernels are Triton's"
        )
    elif getattr(args, "rotary_interleaved", False):
        why = "Megatron wants Transformer Engine 2.3 for interleaved pairs"
    elif getattr(args, "position_embedding_type", None) == "yarn":
        why = "of packed sequences Megatron does not pass YaRN's factor to it"
    else:
        why = ""
    if not why:
        return []
    args.apply_rope_fusion = False
    return [
        f"rope fusion is off, as with --no-rope-fusion: {why}; the same rotation runs without it"
    ]


FEATURE = Feature(
    name="rope_fusion",
    summary="serve --apply-rope-fusion where Transformer Engine is not installed",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    prepare=without_the_flag,
    patches=(
        Patch(
            target="megatron.core.models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb",
            replacement="accel.patches.rope_fusion:apply_sbhd",
            why=_WHY,
        ),
        Patch(
            target="megatron.core.models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb_thd",
            replacement="accel.patches.rope_fusion:apply_thd",
            why=_WHY,
        ),
        Patch(
            target="megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
            replacement="accel.patches.rope_fusion:with_the_factor",
            how="wrap",
            sources={"0.17.1": "08384c1eead5", "0.18.2": "08384c1eead5", "0.19.2": "6ebc796813c1"},
            why="Packed sequences lose YaRN's factor where a configuration asks for the fusion.",
        ),
    ),
)
