"""``--moe-permute-fusion`` and ``--moe-router-fusion`` without Transformer Engine.

Megatron takes the functions behind the two flags from Transformer Engine; without it they are
``None``, and the flags end in an error. Here these names are bound to the ops of accel, with
Transformer Engine's parameters and results: kernels where the device has them, plain torch elsewhere
(said once on the logger ``accel``). Tokens are moved bit for bit in the order of the unfused path; sums
are fp32. Ties in the router fall as they do in the unfused path. What is called a row id map there is a
row map of ``accel.ops.moe_row_map`` here, and padding for quantisation lies in it, so that unpermuting
needs no pad offsets.

A score function of ``sqrtsoftplus`` is served too; Megatron asks for a version of Transformer Engine
there, which a wrap of the two router functions answers. Upstream's fused router knows no
``--moe-enable-routing-replay``: it records nothing, and chooses anew where a choice is to be replayed; nor
the indices that an inference router asks for. Here the unfused path runs in passes that record or replay, and
for such indices. Nothing changes where Transformer Engine is installed, nor for calls without the flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.ops import moe_aux_scores, moe_permute, moe_row_map, moe_unpermute, topk_router
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_serves

AVAILABLE = True
"""In place of ``HAVE_TE``, which only guards the names below there."""

_UTILS = "megatron.core.transformer.moe.moe_utils"


def fused_permute(
    tokens: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``[T, N]`` by a mask ``[T, E]`` -> ``[P, N]`` and the row map ``[P]``."""
    row_map = moe_row_map(routing_map, _number(num_out_tokens))
    return moe_permute(tokens, row_map)[0], row_map


def fused_permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same with probabilities ``[T, E]`` -> ``[P]``."""
    row_map = moe_row_map(routing_map, _number(num_out_tokens))
    return *moe_permute(tokens, row_map, probs), row_map


def fused_permute_and_pad_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor | None, Tensor, None, Tensor]:
    """The same, every expert padded with zeros to a multiple of ``align_size`` rows.

    No pad offsets, and the padded counts.
    """
    padded = (tokens_per_expert + align_size - 1) // align_size * align_size
    row_map = moe_row_map(routing_map, int(padded.sum()), align=align_size)
    return *moe_permute(tokens, row_map, probs), row_map, None, padded


def fused_unpermute(
    permuted_tokens: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    pad_offsets: None = None,
) -> Tensor:
    """``[P, N]`` -> ``[T, N]``; ``restore_shape`` says T."""
    if restore_shape is None:
        raise ValueError("fused_unpermute: restore_shape is needed, it holds the number of tokens")
    if pad_offsets is not None:
        raise ValueError("fused_unpermute: the row map holds the padding, pad_offsets must be None")
    return moe_unpermute(permuted_tokens, row_id_map, restore_shape[0], merging_probs)


def fused_sort_chunks_by_index(tokens: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The chunks of ``[T, N]`` in another order."""
    return moe_permute(tokens, _chunk_rows(split_sizes, sorted_index, tokens.device))[0]


def fused_sort_chunks_by_index_with_probs(
    tokens: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, and the probabilities ``[T]`` likewise."""
    rows = _chunk_rows(split_sizes, sorted_index, tokens.device)
    moved, moved_probs = moe_permute(tokens, rows, probs.reshape(-1, 1))
    assert moved_probs is not None
    return moved, moved_probs


def _chunk_rows(split_sizes: Tensor, sorted_index: Tensor, device: torch.device) -> Tensor:
    """Which row goes where: the rows of each chunk, chunk after chunk in the new order."""
    sizes = split_sizes.to(device="cpu", dtype=torch.int64)
    order = sorted_index.to(device="cpu", dtype=torch.int64)
    begins, moved = sizes.cumsum(0) - sizes, sizes[order]
    shift = begins[order] - (moved.cumsum(0) - moved)
    rows = torch.arange(int(moved.sum())) + shift.repeat_interleave(moved)
    return rows.to(device)


def _number(count: int | Tensor | None) -> int | None:
    return None if count is None else int(count)


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Probabilities and map, ``[T, E]`` each; the bias is ignored for softmax, as in the unfused path."""
    return topk_router(
        logits,
        topk,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        score_function=score_function,
        expert_bias=None if score_function == "softmax" else expert_bias,
    )


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """Map and scores, ``[T, E]`` each."""
    return moe_aux_scores(logits, topk, score_function)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> Tensor:
    """The load-balancing loss: one read of the ``[T, E]`` probabilities, as it is without a kernel."""
    scale = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * scale


@around
def serve_topk(
    original: Callable[..., Any],
    /,
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
    dense_output: bool = False,
    **newer: Any,
) -> Any:
    """Wraps ``topk_routing_with_score_function``."""
    choice = (use_pre_softmax, num_groups, group_topk, scaling_factor, score_function)
    if dense_output or getattr(router_replay, "router_replay_action", None) is not None:
        fused = False
    chosen_before = newer.get("precomputed_indices") is not None  # refused with `fused`
    if fused and score_function == "sqrtsoftplus" and not chosen_before:
        return fused_topk_with_score_function(logits, topk, *choice, expert_bias)
    return original(logits, topk, *choice, expert_bias, fused, router_replay, dense_output, **newer)


@around
def serve_aux_scores(
    original: Callable[..., Any],
    logits: Tensor,
    topk: int,
    score_function: str,
    fused: bool = False,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Wraps ``compute_routing_scores_for_aux_loss``."""
    if fused and score_function == "sqrtsoftplus":
        return masked(moe_aux_scores(logits, topk, score_function), padding_mask)
    return original(logits, topk, score_function, fused, padding_mask)


def masked(
    map_and_scores: tuple[Tensor, Tensor], padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both without the tokens that ``padding_mask`` ``[T]`` names."""
    if padding_mask is None:
        return map_and_scores
    valid = (~padding_mask).unsqueeze(-1)
    routing_map, scores = map_and_scores
    return routing_map * valid, scores * valid


def _bound(name: str) -> Patch:
    return Patch(
        target=f"{_UTILS}:{name}",
        replacement=f"accel.patches.moe_fusion:{name}",
        why="The guarded import of Transformer Engine failed and left None.",
    )


FEATURE = Feature(
    name="moe_fusion",
    summary="serve --moe-permute-fusion and --moe-router-fusion where Transformer Engine is missing",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    patches=(
        *(
            _bound(name)
            for name in (
                "fused_permute",
                "fused_permute_with_probs",
                "fused_permute_and_pad_with_probs",
                "fused_unpermute",
                "fused_sort_chunks_by_index",
                "fused_sort_chunks_by_index_with_probs",
                "fused_topk_with_score_function",
                "fused_compute_score_for_moe_aux_loss",
                "fused_moe_aux_loss",
            )
        ),
        Patch(
            target=f"{_UTILS}:HAVE_TE",
            replacement="accel.patches.moe_fusion:AVAILABLE",
            why="There it only guards the names above, which are bound now.",
        ),
        Patch(
            target=f"{_UTILS}:topk_routing_with_score_function",
            replacement="accel.patches.moe_fusion:serve_topk",
            how="wrap",
            why="The fused sqrtsoftplus asks for a version of Transformer Engine.",
        ),
        Patch(
            target=f"{_UTILS}:compute_routing_scores_for_aux_loss",
            replacement="accel.patches.moe_fusion:serve_aux_scores",
            how="wrap",
            why="The fused sqrtsoftplus asks for a version of Transformer Engine.",
        ),
    ),
)
