"""``--optimizer-cpu-offload`` on a CPU: the optimizer is on the host already.

Megatron copies parameters to the host and tells the copies from the originals by ``tensor.is_cuda``. On
the CPU device runtime every tensor is both, the copies would be taken for originals, and the run would
train nothing without a word. Nothing is offloaded there (``--optimizer-offload-fraction 0``), which is
what the flag asks for, and a line says so. On other devices nothing changes.
"""

from __future__ import annotations

from accel.feature import Context, Feature
from accel.upstream import SUPPORTED_RANGE


def offload_nothing(context: Context) -> list[str]:
    """Set the offloaded fraction to 0 on the CPU."""
    args = context.args
    offloads = getattr(args, "optimizer_cpu_offload", False) and args.optimizer_offload_fraction
    if context.device != "cpu" or not offloads:
        return []
    args.optimizer_offload_fraction = 0.0
    return ["--optimizer-cpu-offload: the optimizer is on the host already, nothing is moved"]


FEATURE = Feature(
    name="optimizer_cpu_offload",
    summary="accept --optimizer-cpu-offload on a CPU, where there is nothing to offload",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    prepare=offload_nothing,
)
