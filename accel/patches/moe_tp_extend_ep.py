"""Tensor parallelism in the attention alone: its ranks hold whole experts.

``--moe-tp-extend-ep`` is MindSpeed's flag; in Megatron's words, ``--expert-tensor-parallel-size 1`` with an
``--expert-model-parallel-size`` that counts the tensor-parallel ranks too: T tensor-parallel ranks and
``--expert-model-parallel-size E`` become T x E ranks over which the experts are spread. With
``--sequence-parallel`` each rank routes its own part of the sequence, so nothing is gathered before the
experts or scattered after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from accel.feature import Context, Feature
from accel.upstream import SUPPORTED_RANGE


def prepare(context: Context) -> Sequence[str]:
    """Before Megatron derives its groups from the sizes.

    Raises:
        ValueError: experts that are to be split all the same, or that the ranks do not divide.
    """
    args = context.args
    if not getattr(args, "accel_moe_tp_extend_ep", None) or not args.num_experts:
        return []
    split = args.expert_tensor_parallel_size
    if split not in (None, 1):
        raise ValueError(
            f"--moe-tp-extend-ep keeps experts whole, --expert-tensor-parallel-size {split} splits them: "
            "leave one out"
        )
    ranks = args.tensor_model_parallel_size * args.expert_model_parallel_size
    if args.num_experts % ranks:
        raise ValueError(
            f"--moe-tp-extend-ep: --num-experts {args.num_experts} is no multiple of {ranks}, the product of "
            f"--tensor-model-parallel-size and --expert-model-parallel-size"
        )
    args.expert_tensor_parallel_size, args.expert_model_parallel_size = 1, ranks
    return [
        f"--moe-tp-extend-ep: --expert-tensor-parallel-size 1 --expert-model-parallel-size {ranks}"
    ]


def idle(context: Context) -> str | None:
    return None if getattr(context.args, "num_experts", None) else "there are no experts"


FEATURE = Feature(
    name="moe_tp_extend_ep",
    summary="spread whole experts over the tensor-parallel ranks too",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=idle,
    prepare=prepare,
)
