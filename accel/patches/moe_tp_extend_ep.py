"""Tensor parallelism in the attention alone: its ranks hold whole experts.

``--moe-tp-extend-ep`` is MindSpeed's flag; in Megatron's words, ``--expert-tensor-parallel-size 1`` with an
``--expert-model-parallel-size`` that counts the tensor-parallel ranks too: T tensor-parallel ranks and
``--expert-model-parallel-size E`` become T x E ranks over which the experts are spread. With
``--sequence-parallel`` each rank routes its own part of the sequence, so nothing is gathered before the
experts or scattered after them.

Checkpoints store the product. Where ``--use-mp-args-from-checkpoint-args`` brings it back, it stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from accel.feature import Context, Feature
from accel.patches._settings import needs_flags, no_experts
from accel.upstream import SUPPORTED_RANGE

GIVEN = "expert_model_parallel_size_given"
"""Attribute of Megatron's arguments: what `--expert-model-parallel-size` was before it was multiplied."""


def prepare(context: Context) -> Sequence[str]:
    """Before Megatron derives its groups from the sizes.

    Raises:
        ValueError: experts that are to be split all the same, or that the ranks do not divide; a yaml file.
    """
    args = context.args
    if not getattr(args, "accel_moe_tp_extend_ep", None):
        return []
    needs_flags(
        args,
        "--moe-tp-extend-ep",
        "set expert_tensor_parallel_size: 1 and the product as expert_model_parallel_size there",
    )
    if not getattr(args, "num_experts", None):
        return []
    if hasattr(args, GIVEN):  # validated before
        return []
    split = args.expert_tensor_parallel_size
    if split not in (None, 1):
        raise ValueError(
            f"--moe-tp-extend-ep keeps experts whole, --expert-tensor-parallel-size {split} splits them: "
            "leave one out"
        )
    given = _given_before(args)
    ranks = args.expert_model_parallel_size
    if given is None:
        given, ranks = ranks, args.tensor_model_parallel_size * ranks
    if args.num_experts % ranks:
        raise ValueError(
            f"--moe-tp-extend-ep: --num-experts {args.num_experts} is no multiple of {ranks}, the product of "
            f"--tensor-model-parallel-size and --expert-model-parallel-size"
        )
    args.expert_tensor_parallel_size, args.expert_model_parallel_size = 1, ranks
    setattr(args, GIVEN, given)
    return [
        f"--moe-tp-extend-ep: --expert-tensor-parallel-size 1 --expert-model-parallel-size {ranks}"
    ]


def _given_before(args: Any) -> int | None:
    """What was given to the run whose product Megatron has taken from a checkpoint; None: it took none."""
    if not (
        getattr(args, "use_checkpoint_args", False)
        and getattr(args, "use_mp_args_from_checkpoint_args", False)
    ):
        return None
    from megatron.training.checkpointing import load_args_from_checkpoint

    for source in ("load", "pretrained_checkpoint"):  # Megatron reads the first last
        found = load_args_from_checkpoint(copy.copy(args), load_arg=source)
        if isinstance(found, tuple):
            saved = found[1]
            if getattr(saved, "accel_moe_tp_extend_ep", None):  # written before GIVEN was, too
                before = saved.expert_model_parallel_size // saved.tensor_model_parallel_size
                return int(getattr(saved, GIVEN, before))
            return None
    return None


def idle(context: Context) -> str | None:
    if context.args is None or (context.late and not hasattr(context.args, GIVEN)):
        return (
            "it changes Megatron's arguments: without them, set expert_tensor_parallel_size=1 and "
            "expert_model_parallel_size to the product of both"
        )
    return no_experts(context)


FEATURE = Feature(
    name="moe_tp_extend_ep",
    summary="spread whole experts over the tensor-parallel ranks too",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=idle,
    prepare=prepare,
)
