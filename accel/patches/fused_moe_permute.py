"""Tokens to their experts and back by one kernel each, with or without ``--moe-permute-fusion``.

Stock Megatron sorts the routing map, gathers the rows with ``index_select``, and brings them back with
``scatter_add_`` into a tensor that it zeroes first. Here the rows are counted, not sorted; permuting
reads each token once for all its copies and unpermuting writes each token once; and each is the other's
gradient. The copies, their order, and their probabilities are Megatron's bit for bit. The sum over a
token's experts is fp32 and rounded once (stock: once for every expert), so for two experts the bits are
the same, and beyond that it is closer to the exact value.

The flag asks for the same kernels and is served by the feature ``moe_fusion``. Not taken over: calls
with the flag where Transformer Engine is installed, and fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.ops import moe_permute, moe_row_map, moe_unpermute
from accel.ops.moe_permute import unsupported_reason
from accel.patches._kernels import kernels
from accel.patches.moe_fusion import (
    fused_sort_chunks_by_index,
    fused_sort_chunks_by_index_with_probs,
)
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_kernel_for

_UTILS = "megatron.core.transformer.moe.moe_utils"


@around
def permute_with_kernel(
    original: Callable[..., Any],
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor, None, Tensor | None]:
    """Wraps ``permute``; the sorted indices that come back are Megatron's own."""
    if fused or num_out_tokens is None or unsupported_reason(tokens, probs):
        return original(
            tokens,
            routing_map,
            probs,
            num_out_tokens,
            fused,
            drop_and_pad,
            tokens_per_expert,
            align_size,
        )
    row_map = moe_row_map(routing_map, int(num_out_tokens), drop_and_pad=drop_and_pad)
    rows, permuted_probs = moe_permute(tokens, row_map, probs)
    return rows, permuted_probs, row_map % max(len(tokens), 1), None, tokens_per_expert


@around
def unpermute_with_kernel(
    original: Callable[..., Any],
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Wraps ``unpermute``."""
    unknown = probs is not None and routing_map is None
    if fused or unknown or unsupported_reason(permuted_tokens, probs):
        return original(
            permuted_tokens,
            sorted_indices,
            restore_shape,
            probs,
            routing_map,
            fused,
            drop_and_pad,
            pad_offsets,
        )
    row_map = sorted_indices
    if probs is not None and routing_map is not None:  # which expert a row is of matters, too
        row_map = moe_row_map(routing_map, len(sorted_indices), drop_and_pad=drop_and_pad)
    return moe_unpermute(permuted_tokens, row_map, restore_shape[0], probs)


@around
def sort_chunks_with_kernel(
    original: Callable[..., Any],
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Wraps ``sort_chunks_by_idxs``."""
    if fused or input.ndim != 2 or unsupported_reason(input, probs):
        return original(input, split_sizes, sorted_idxs, probs, fused)
    if probs is None:
        return fused_sort_chunks_by_index(input, split_sizes, sorted_idxs), None
    return fused_sort_chunks_by_index_with_probs(input, probs, split_sizes, sorted_idxs)


FEATURE = Feature(
    name="fused_moe_permute",
    summary="move tokens to their experts and back by one kernel each",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("moe_permute",),
    aside=te_kernel_for("moe_permute_fusion"),
    unavailable=kernels("moe_row_map", "moe_permute_fwd", "moe_unpermute_fwd"),
    patches=(
        Patch(
            target=f"{_UTILS}:permute",
            replacement="accel.patches.fused_moe_permute:permute_with_kernel",
            how="wrap",
            why="Upstream sorts the map and gathers; the kernel counts, and reads each token once.",
        ),
        Patch(
            target=f"{_UTILS}:unpermute",
            replacement="accel.patches.fused_moe_permute:unpermute_with_kernel",
            how="wrap",
            why="Upstream zeroes the result and adds into it; the kernel writes each token once.",
        ),
        Patch(
            target=f"{_UTILS}:sort_chunks_by_idxs",
            replacement="accel.patches.fused_moe_permute:sort_chunks_with_kernel",
            how="wrap",
            why="The same kernel moves whole chunks between the ranks' order and the experts'.",
        ),
    ),
)
