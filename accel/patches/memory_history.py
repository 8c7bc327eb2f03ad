"""``--record-memory-history`` where there is no GPU.

PyTorch records who allocated what on GPUs alone, torch-npu by a function of its own with other arguments, and
Megatron stops where it asks for CUDA's. The run goes on without a snapshot, and a line says so. On GPUs
nothing changes.
"""

from __future__ import annotations

from accel.feature import Context, Feature
from accel.upstream import SUPPORTED_RANGE


def without_history(context: Context) -> list[str]:
    """Take the flag back; a line if it was given."""
    if context.device == "cuda" or not getattr(context.args, "record_memory_history", False):
        return []
    context.args.record_memory_history = False
    why = "PyTorch keeps no history of a CPU's memory"
    if context.device == "npu":
        why = (
            "Megatron asks for CUDA's recorder; torch.npu.memory._record_memory_history is Ascend's"
        )
    return [f"--record-memory-history: {why}, no snapshot is written"]


def _idle(context: Context) -> str | None:
    """It is done when arguments are final."""
    return (
        "there is no command line" if context.args is None else "no history is asked for any more"
    )


FEATURE = Feature(
    name="memory_history",
    summary="accept --record-memory-history where there is no GPU, and none is kept",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu", "npu"),
    idle=_idle,
    prepare=without_history,
)
