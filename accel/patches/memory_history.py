"""``--record-memory-history`` on a CPU.

PyTorch records who allocated what on GPUs alone, and Megatron stops where it asks for the driver. On a CPU
the run goes on without a snapshot, and a line says so. On other devices nothing changes.
"""

from __future__ import annotations

from accel.feature import Context, Feature
from accel.upstream import SUPPORTED_RANGE


def without_history(context: Context) -> list[str]:
    """Take the flag back on a CPU; a line if it was given."""
    if context.device != "cpu" or not getattr(context.args, "record_memory_history", False):
        return []
    context.args.record_memory_history = False
    return [
        "--record-memory-history: PyTorch keeps no history of a CPU's memory, no snapshot is written"
    ]


def _idle(context: Context) -> str | None:
    """It is done when arguments are final."""
    return (
        "there is no command line" if context.args is None else "no history is asked for any more"
    )


FEATURE = Feature(
    name="memory_history",
    summary="accept --record-memory-history on a CPU, where there is none",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    idle=_idle,
    prepare=without_history,
)
