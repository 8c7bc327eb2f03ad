"""The priority of process groups on Ascend (``--high-priority-stream-groups``, ``--use-torch-fsdp2``).

Megatron makes NCCL's options with a keyword, which HCCL's do not take; it does so for a group of
``--use-torch-fsdp2`` that nobody asked for. Here they are HCCL's, with the same priority. What else a file of
``--nccl-communicator-config-path`` may name is NCCL's own: an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from accel.feature import Feature
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

PRIORITY = "is_high_priority_stream"

FEATURE = Feature(
    name="hccl_options",
    summary="serve process groups of high priority on Ascend",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("npu",),
    patches=(
        Patch(
            target="megatron.core.parallel_state:get_nccl_options",
            replacement="accel.patches.hccl_options:options_of_hccl",
            how="wrap",
            why="NCCL's options take a keyword; HCCL's, which torch-npu puts in their place, do not.",
        ),
    ),
)


@around
def options_of_hccl(
    original: Callable[..., Any], pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]
) -> Any:
    if pg_name not in nccl_comm_cfgs:
        return None
    wanted = nccl_comm_cfgs[pg_name]
    if others := sorted(wanted.keys() - {PRIORITY}):
        raise ValueError(
            f"--nccl-communicator-config-path: {', '.join(others)} of {pg_name!r} is for NCCL alone; "
            f"on Ascend leave in {PRIORITY}"
        )
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = wanted.get(PRIORITY, False)
    return options
