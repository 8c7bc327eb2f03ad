"""The router's scores, choice and probabilities as one kernel, forward and backward.

Stock Megatron computes them by a dozen operations over ``[tokens, experts]``, most of which are saved
for the backward. The kernel reads a token's logits once, writes its probabilities and its map, and saves
the logits alone. All of Megatron's options are in it: softmax before or after the choice, sigmoid,
square root of softplus, groups, expert bias, scaling factor. The experts chosen are those of stock
Megatron, ties included; probabilities differ by roundings of fp32.

With ``--moe-router-fusion`` (served by the feature ``moe_fusion``) or without. Not taken over: logits
other than fp32 where the flag is missing, because Megatron's versions disagree there on what is rounded
when; replayed, precomputed and dense routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature
from accel.ops import moe_aux_scores
from accel.ops._dispatch import log_fallback
from accel.ops.topk_router import unsupported_reason
from accel.patches._kernels import kernels
from accel.patches._settings import no_experts
from accel.patches.moe_fusion import fused_topk_with_score_function, masked
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_kernel_for

_UTILS = "megatron.core.transformer.moe.moe_utils"


def _served(logits: Tensor) -> bool:
    reason = unsupported_reason(logits)
    if logits.dtype != torch.float32:
        reason = f"logits of {logits.dtype}: --moe-router-dtype fp32 makes such as it takes"
    if reason is not None:
        log_fallback("fused_topk_router", reason)
    return reason is None


@around
def route_with_kernel(
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
    special = (
        router_replay is not None or dense_output or any(v is not None for v in newer.values())
    )
    if fused or special or not _served(logits):
        return original(
            logits, topk, *choice, expert_bias, fused, router_replay, dense_output, **newer
        )
    return fused_topk_with_score_function(logits, topk, *choice, expert_bias)


@around
def score_with_kernel(
    original: Callable[..., Any],
    logits: Tensor,
    topk: int,
    score_function: str,
    fused: bool = False,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Wraps ``compute_routing_scores_for_aux_loss``."""
    if fused or not _served(logits):
        return original(logits, topk, score_function, fused, padding_mask)
    return masked(moe_aux_scores(logits, topk, score_function), padding_mask)


def idle(context: Context) -> str | None:
    args = context.args
    if reason := no_experts(context):
        return reason
    rounded = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    if rounded and getattr(args, "moe_router_dtype", "fp32") is None:
        return "the router's logits are of 16 bits: --moe-router-dtype fp32 makes such as it takes"
    return None


FEATURE = Feature(
    name="fused_topk_router",
    summary="compute the router's scores, choice and probabilities by one kernel",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("topk_router",),
    aside=te_kernel_for("moe_router_fusion"),
    idle=idle,
    unavailable=kernels("topk_router_fwd", "moe_aux_scores_fwd"),
    patches=(
        Patch(
            target=f"{_UTILS}:topk_routing_with_score_function",
            replacement="accel.patches.fused_topk_router:route_with_kernel",
            how="wrap",
            why="One kernel that reads the logits once, in place of a dozen operations.",
        ),
        Patch(
            target=f"{_UTILS}:compute_routing_scores_for_aux_loss",
            replacement="accel.patches.fused_topk_router:score_with_kernel",
            how="wrap",
            why="One kernel that reads the logits once, in place of half a dozen operations.",
        ),
    ),
)
