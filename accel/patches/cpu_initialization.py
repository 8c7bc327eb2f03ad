"""``--use-cpu-initialization`` gives the same model at every tensor-parallel size, on the CPU too.

Megatron draws the whole weight on the host's random stream on every rank and keeps its shard. On CUDA
nothing else moves that stream. On the CPU device runtime a draw comes from the device's stream, which
Megatron's warm-up has moved by an amount that depends on the layout; here these draws come from the
host's stream (``accel.device.cpu.generators``). On other devices nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.device.cpu import generators
from accel.feature import Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

FEATURE = Feature(
    name="cpu_initialization",
    summary="draw --use-cpu-initialization weights on the host's random stream on a CPU",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    patches=(
        Patch(
            target="megatron.core.tensor_parallel.layers:_initialize_affine_weight_cpu",
            replacement="accel.patches.cpu_initialization:on_host_stream",
            how="wrap",
            expects=(
                "weight",
                "output_size",
                "input_size",
                "per_partition_size",
                "partition_dim",
                "init_method",
                "stride",
                "return_master_weight",
                "params_dtype",
                "rank",
                "world_size",
                "skip_set_tensor_parallel_attributes",
            ),
            why="On one device the host's and the device's draws would come from the same stream.",
        ),
    ),
)


def on_host_stream(initialize: Callable[..., Any]) -> Callable[..., Any]:
    return generators.drawn_on_host(initialize)
