"""Packed sequences under context parallelism, ``--sft --context-parallel-size N``, in the local spec.

Whatever attention does with a pack, Megatron asks Transformer Engine's C++ half which of its tokens a rank
holds, and stops where that is not installed: chunks r and 2 N - r - 1 of the 2 N of each sequence, a multiple
of 2 N tokens each. Here accel answers, for GPT, hybrid (Mamba) and MIMO models, and for LLaVA with a hybrid
language model (upstream refuses others in the local spec); attention is ``context_parallel``'s, which see.
The packs of 0.17's own loader, which upstream cannot split with Transformer Engine either, are split too.

Costs nothing beyond that answer. Idle under ``--transformer-impl transformer_engine``, where ``te_layers``
answers the same.

**Not** the scripts that import Transformer Engine's C++ half themselves (0.17's ``pretrain_mamba.py``).
"""

from __future__ import annotations

from accel.feature import Context, Feature
from accel.patches._te_packs import OF_PACKS
from accel.upstream import SUPPORTED_RANGE, te_serves


def idle(context: Context) -> str | None:
    args = context.args
    if reason := te_serves(context):
        return reason
    if getattr(args, "transformer_impl", None) == "transformer_engine":
        return "te_layers has it"
    if getattr(args, "context_parallel_size", None) == 1:
        return "--context-parallel-size is 1"
    return None


FEATURE = Feature(
    name="packs_over_ranks",
    summary="split packed sequences over context-parallel ranks without Transformer Engine",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=idle,
    patches=OF_PACKS,
)
