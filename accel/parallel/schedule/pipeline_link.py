"""The link of a pipeline of which one process group is there: the second one is made beside it, once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from accel.parallel.schedule.link import GroupLink

__all__ = ["one_queue_for_all", "pipeline_link"]

_SECOND: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Of a pipeline's group the one beside it."""


def pipeline_link(
    group: dist.ProcessGroup,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    sized: bool,
    timeout: timedelta | None = None,
) -> GroupLink:
    """Over the pipeline's group and a second one of the same ranks. At first every rank of the world comes
    here, as all make the groups of all pipelines."""
    if group in _SECOND:
        return GroupLink(group, _SECOND[group], shape, dtype, device, sized=sized)
    if group.size() > 2 and (why := one_queue_for_all(group, device)):
        raise ValueError(
            f"{why} has one queue for all neighbours, in which accel's schedules would wait for ever; "
            "leave it out"
        )
    known = dist.distributed_c10d._world.pg_map
    for gone in [each for each in _SECOND if each not in known]:
        del _SECOND[gone]
    own = dist.get_process_group_ranks(group)
    ranks = torch.tensor(own, device=device)
    everyone = [torch.empty_like(ranks) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ranks)
    for pipeline in sorted({tuple(each.tolist()) for each in everyone}):
        made = dist.new_group(list(pipeline), timeout, dist.get_backend(group))
        if list(pipeline) == own:
            _SECOND[group] = made
    link = GroupLink(group, _SECOND[group], shape, dtype, device, sized=sized)
    link.connect()
    return link


def one_queue_for_all(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What makes the messages of a rank to all others leave one after the other."""
    if device.type == "cuda" and group.bound_device_id is not None:
        return "init_process_group was given a device_id: then NCCL"
    if device.type == "npu" and os.environ.get("P2P_HCCL_BUFFSIZE") == "0":
        return "P2P_HCCL_BUFFSIZE=0 is set: then HCCL"
    return None
