"""``--use-megatron-fsdp --calculate-per-token-loss`` with gradients in another dtype than the master weights.

Weights that tensor-parallel ranks hold alike, norms and routers under ``--sequence-parallel`` and the norms
of ``--qk-layernorm``, are trained with the sum of the ranks' gradients. Upstream sums what the optimizer will
see. That is a copy where the gradients are in bf16 and the master weights in fp32 (``--bf16`` with
``--grad-reduce-in-bf16``, or with Megatron's default, ``auto``, of ``--megatron-fsdp-main-grads-dtype``), and
to divide by the number of tokens the copy is then made again from the gradients before the sum. Each rank
goes on with its own part, so that the weights drift apart, and nothing says so. Here the sums are written
back, in the dtype of the gradients as without Megatron-FSDP, to where the division takes them from. It costs
one pass over a rank's shard of these gradients in each step.

Idle without both flags. With gradients and master weights of one dtype there is no copy, and nothing is done.
**Not helped**: ``--use-precision-aware-optimizer`` beside it, which needs Transformer Engine, and whose
gradients upstream does not sum at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.feature import Feature
from accel.patches._settings import idle_without
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


@around
def with_sums_kept(upstream: Callable[[Any, Any], None], self: Any, scaling_factor: Any) -> None:
    """Wraps ``ParamAndGradBuffer.scale_gradients``."""
    whole = self.bucketing_policy.data_parallel_sharding_strategy == "no_shard"
    for name, parameter in self.optimizer_named_parameters:
        grad, original = parameter.grad, parameter.orig_param
        if not _is_summed(name, (parameter, original)):
            continue
        buffer = self.parameter_groups[self.param_to_param_group[original]].main_grad_buffer
        if grad is None or buffer is None:
            continue
        kept = buffer.get_item(buffer.param_idx[original], only_shard=not whole)
        write_back(getattr(grad, "_local_tensor", grad), kept)
    upstream(self, scaling_factor)


def _is_summed(name: str, parameters: tuple[Any, Any]) -> bool:
    """As upstream's ``finalize_model_grads`` chooses; both Megatron-FSDP's parameter and the module's."""
    marks = ("sequence_parallel", "average_gradients_across_tp_domain")
    marked = any(getattr(p, mark, False) for p in parameters for mark in marks)
    return marked or "q_layernorm" in name or "k_layernorm" in name


@torch.no_grad()
def write_back(grad: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy a gradient to where it was copied from, unless it is that memory. Whole: which of its elements the
    sum has changed is not the same on all ranks."""
    if grad.dtype != kept.dtype or grad.data_ptr() != kept.data_ptr():
        kept.copy_(grad.view_as(kept))


FEATURE = Feature(
    name="fsdp_replicated_grads",
    summary="keep sums of gradients over ranks with --use-megatron-fsdp --calculate-per-token-loss",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=idle_without("use_megatron_fsdp", "calculate_per_token_loss"),
    patches=(
        Patch(
            target=(
                "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:"
                "ParamAndGradBuffer.scale_gradients"
            ),
            replacement="accel.patches.fsdp_replicated_grads:with_sums_kept",
            how="wrap",
            why="Upstream makes gradients again from those before the sums over tensor-parallel ranks.",
        ),
    ),
)
