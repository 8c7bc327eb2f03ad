"""Packs of sequences whose tokens lie on several context-parallel ranks.

Megatron asks Transformer Engine's C++ half which of them a rank holds; ``accel.layers.stand_in`` answers. The
patches are those of ``packs_over_ranks``, and of ``te_layers`` for the other layer spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.patches._te_versions import UTILS, at_least, flagged
from accel.patching import Patch, around

__all__ = ["OF_PACKS", "PARTITION"]

_HERE = "accel.patches._te_packs"

PARTITION = (
    "megatron.core.models.mimo.partition.utils",
    "megatron.core.models.multimodal.llava_model",
    "megatron.core.ssm.mamba_context_parallel",
    UTILS,
)
"""Modules that ask Transformer Engine's C++ half, as `tex`, which tokens of a pack a context-parallel rank
holds."""

_SINCE = "1.10.0"
"""The version of Transformer Engine that they want for it."""


@around
def with_starts(
    original: Callable[..., Any],
    batch: dict[str, Any],
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor | None,
    max_seqlen: torch.Tensor,
    cp_size: int | None = None,
    cp_rank: int | None = None,
) -> Any:
    """0.17's own loader never gives the second, and a rank's tokens are found by it; later versions take the
    first, as here."""
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    return original(batch, cu_seqlens, padded, max_seqlen, cp_size, cp_rank)


def version_for_packs(original: Callable[[], Any]) -> Callable[[], Any]:
    return at_least(_SINCE, PARTITION, original)


OF_PACKS = (
    *(
        Patch(
            target=f"{module}:tex",
            replacement="accel.layers.stand_in:tex",
            why="Which tokens of a pack a rank holds needs no Transformer Engine.",
            optional=True,
        )
        for module in PARTITION
    ),
    flagged("megatron.core.models.mimo.partition.utils", "_HAVE_TEX"),
    flagged("megatron.core.models.multimodal.llava_model", "HAVE_TEX"),
    Patch(
        target=f"{UTILS}:get_thd_batch_on_this_cp_rank",
        replacement=f"{_HERE}:with_starts",
        how="wrap",
        why="0.17's loader gives no lengths with padding, by which upstream looks for a rank's tokens.",
        optional=True,
    ),
    Patch(
        target=f"{UTILS}:get_te_version",
        replacement=f"{_HERE}:version_for_packs",
        how="wrap",
        expects=(),
        why="The gates before these calls are told that they are served.",
    ),
)
"""What a pack needs whose sequences are split over ranks, in either spec: those of `packs_over_ranks`."""
