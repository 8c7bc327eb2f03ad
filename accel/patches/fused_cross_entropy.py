"""Megatron's vocabulary-parallel cross entropy as one kernel each way, without a copy of the logits.

Megatron widens the logits to fp32, keeps the softmax of that size for the backward and makes a
dozen passes over it. Here the forward reads the logits once, in their own dtype, and keeps three
numbers for each token; the backward computes the softmax again and writes the gradient over the
logits. Both of Megatron's ways are served, with and without ``--cross-entropy-loss-fusion``, and
``--cross-entropy-fusion-impl te`` where Transformer Engine is not installed. Sums are fp32 and the
loss is fp32, as Megatron's; the gradient has the dtype of the logits.

The logits are Megatron's own and nothing of it reads them after the backward has begun. Code of
yours that keeps them must clone them before the backward (afterwards they hold the gradient), and
another loss that saved them for its own backward gets autograd's error about a modified variable;
``--no-accel-fused-cross-entropy`` is the way out. Logits that are a leaf are never written over.

Does not apply: label smoothing over several tensor-parallel ranks stays with Megatron, which
smooths over each rank's shard alone (so that the ranks disagree about the loss).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.feature import Context, Feature
from accel.ops import cross_entropy
from accel.ops._dispatch import log_fallback
from accel.ops._overwriting import overwritable
from accel.patches._kernels import kernels
from accel.patching import Patch
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE, te_installed


def vocab_parallel(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ``vocab_parallel_cross_entropy``, which has no ``tp_group`` before 0.19."""

    @functools.wraps(upstream)
    def call(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: Any = None,
    ) -> Tensor:
        given = {} if tp_group is None else {"tp_group": tp_group}
        if tp_group is None:
            from megatron.core.parallel_state import get_tensor_model_parallel_group

            tp_group = get_tensor_model_parallel_group()
        if label_smoothing > 0 and tp_group.size() > 1:
            log_fallback("fused_cross_entropy", "label smoothing over several ranks")
            return upstream(vocab_parallel_logits, target, label_smoothing, **given)
        return _loss(vocab_parallel_logits, target, tp_group, label_smoothing=label_smoothing)

    return call


def fused_vocab_parallel(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """``fused_vocab_parallel_cross_entropy``: ``[s, b, v]`` and ``[s, b]`` to ``[s, b]``."""
    return _loss(vocab_parallel_logits, target, tp_group)


def te_parallel(
    logits: Tensor, labels: Tensor, tp_group: Any, is_cg_capturable: bool = False
) -> Tensor:
    """``te_parallel_cross_entropy``; as Transformer Engine's, it ignores label -100."""
    return _loss(logits, labels, tp_group, ignore_index=-100)


def _loss(
    logits: Tensor,
    target: Tensor,
    group: Any,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Labels outside the vocabulary are Megatron's way to pad: no error, the loss mask hides them."""
    return cross_entropy(
        logits,
        target,
        group=group if group.size() > 1 else None,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        check_target=False,
        inplace=overwritable(logits) is None,
    )


def without_te(context: Context) -> list[str]:
    """From 0.18 on Megatron's validator refuses ``te``, with Transformer Engine or without."""
    args = context.args
    te_asked = getattr(args, "cross_entropy_fusion_impl", None) == "te"
    if not (te_asked and getattr(args, "cross_entropy_loss_fusion", False)) or te_installed():
        return []
    args.cross_entropy_fusion_impl = "native"
    return ["transformer_engine is not installed: --cross-entropy-fusion-impl native is used"]


_WHY = "One pass over the logits in their own dtype, in place of a dozen over an fp32 copy."

FEATURE = Feature(
    name="fused_cross_entropy",
    summary="compute the cross entropy as one kernel each way, without a copy of the logits",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("cross_entropy",),
    unavailable=kernels("cross_entropy_stats"),
    prepare=without_te,
    patches=(
        Patch(
            target="megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
            replacement="accel.patches.fused_cross_entropy:vocab_parallel",
            how="wrap",
            sources={"0.17.1": "7020333e3478", "0.18.2": "7020333e3478", "0.19.2": "a4c29cc0ff1b"},
            why=_WHY,
        ),
        Patch(
            target="megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
            replacement="accel.patches.fused_cross_entropy:fused_vocab_parallel",
            expects=("vocab_parallel_logits", "target", "tp_group"),
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "6206f8e2f77d"),
            why=_WHY,
        ),
        Patch(
            target="megatron.core.models.common.language_module.language_module"
            ":te_parallel_cross_entropy",
            replacement="accel.patches.fused_cross_entropy:te_parallel",
            why="None without Transformer Engine, and then --cross-entropy-fusion-impl te raises.",
        ),
    ),
)
