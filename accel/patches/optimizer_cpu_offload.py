"""``--optimizer-cpu-offload`` on a CPU: the optimizer is on the host already.

Megatron's ``HybridDeviceOptimizer`` copies parameters to the host and tells the copies from the originals by
``tensor.is_cuda``. On the CPU device runtime every tensor is both, the copies would be taken for originals,
and what was to be offloaded would not be trained, without a word. Nothing is offloaded there, for whoever
makes that optimizer (``--optimizer-offload-fraction 0``), which is what the flag asks for, and a line says
so. On other devices nothing changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_log = logging.getLogger("accel")
_SAID = "the optimizer is on the host already, nothing is moved"


def offload_nothing(context: Context) -> list[str]:
    """Set the offloaded fraction to 0 on the CPU."""
    args = context.args
    offloads = getattr(args, "optimizer_cpu_offload", False) and args.optimizer_offload_fraction
    if context.device != "cpu" or not offloads:
        return []
    args.optimizer_offload_fraction = 0.0
    return [f"--optimizer-cpu-offload: {_SAID}"]


@around
def all_where_they_are(
    init: Callable[..., None],
    self: Any,
    params: Any,
    offload_fraction: float = 0.5,
    *args: Any,
    **kwargs: Any,
) -> None:
    if offload_fraction:
        _log.info("HybridDeviceOptimizer, offload_fraction %s: %s", offload_fraction, _SAID)
    init(self, params, 0.0, *args, **kwargs)


FEATURE = Feature(
    name="optimizer_cpu_offload",
    summary="accept --optimizer-cpu-offload on a CPU, where there is nothing to offload",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    patches=(
        Patch(
            target="megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.__init__",
            replacement="accel.patches.optimizer_cpu_offload:all_where_they_are",
            how="wrap",
            expects=(
                "self",
                "params",
                "offload_fraction",
                "cpu_optimizer_cls",
                "gpu_optimizer_cls",
                "param_update_in_fp32",
                "pin_cpu_grads",
                "pin_cpu_params",
                "overlap_cpu_optimizer_d2h_h2d",
                "kwargs",
            ),
            why="Upstream takes copies on the host for parameters of the device, and trains them instead.",
        ),
    ),
    prepare=offload_nothing,
)
