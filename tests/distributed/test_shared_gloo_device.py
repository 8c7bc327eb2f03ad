"""`host_shared_gloo_device`: groups on the default group's device: each works and ends as on its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import accel
from accel.feature import Context
from accel.patches import host_shared_gloo_device
from accel.patches.host_shared_gloo_device import FEATURE
from accel.testing.distributed import under_torchrun

_CONTEXT = Context(device="cpu", megatron="0.19.2")
GROUPS = 5


@pytest.fixture(autouse=True)
def default_group() -> Iterator[None]:
    if not under_torchrun():
        yield
        return
    accel.enable(preset="off", host_shared_gloo_device=True)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
    accel.disable()


def loops() -> int:
    """Threads of this process that watch sockets."""
    seen = -1
    while True:  # a thread has its creator's name until it runs, and may be about to end
        time.sleep(0.2)
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names.append((task / "comm").read_text().strip())
        if seen == (seen := names.count("gloo_tcp_loop")):
            return seen


@pytest.mark.distributed(world_size=2)
def test_one_thread_watches_for_all_groups() -> None:
    assert loops() == 1
    groups = [dist.new_group() for _ in range(GROUPS)]
    groups += [dist.new_group([rank]) for rank in range(2)]
    groups += [dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    assert loops() == 1
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [float(dist.get_world_size(group))] * 3
    accel.enable(preset="off", host_shared_gloo_device=False)
    own = [dist.new_group() for _ in range(2)]
    dist.barrier(own[0])
    assert loops() == 3, "a group of its own device has its thread"
    dist.barrier(groups[0])  # older groups keep theirs


@pytest.mark.distributed(world_size=2)
def test_messages_of_many_groups_under_way_at_once() -> None:
    rank, length = dist.get_rank(), 200_000
    groups = [dist.new_group() for _ in range(GROUPS)]
    order = groups if rank == 0 else groups[::-1]  # each group is a channel of its own
    sums = {group: torch.full((length,), float(rank + 1)) for group in groups}
    received = {group: torch.empty(length) for group in groups}
    works = []
    for group in order:
        works.append(dist.all_reduce(sums[group], group=group, async_op=True))
        sent = torch.full((length,), float(groups.index(group)))
        works.append(dist.isend(sent, 1 - rank, group=group))
        works.append(dist.irecv(received[group], 1 - rank, group=group))
    for work in works:
        assert work is not None
        work.wait()
    for number, group in enumerate(groups):
        assert (sums[group] == 3).all()
        assert (received[group] == number).all()


@pytest.mark.distributed(world_size=2)
def test_a_group_that_ends_leaves_the_others() -> None:
    first, second = dist.new_group(), dist.new_group()
    dist.barrier(first)
    dist.destroy_process_group(first)
    x = torch.ones(2)
    dist.all_reduce(x, group=second)
    dist.all_reduce(x)
    assert x.tolist() == [4.0, 4.0]
    third = dist.new_group()
    dist.barrier(third)


@pytest.mark.distributed(world_size=2)
def test_each_group_has_its_own_time_out_and_failure() -> None:
    short = dist.new_group(timeout=timedelta(seconds=1))
    other = dist.new_group()
    backend: Any = short._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=1)
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            dist.all_reduce(torch.ones(1), group=short)
        assert 0.5 < time.monotonic() - start < 10
    x = torch.ones(1)
    dist.all_reduce(x, group=other)
    assert x.item() == 2


@pytest.mark.distributed(world_size=1)
def test_torch_is_as_before_also_after_an_error() -> None:
    gloo = distributed_c10d.ProcessGroupGloo
    with pytest.raises(ValueError, match=r".+"):
        dist.new_group([7])
    assert distributed_c10d.ProcessGroupGloo is gloo
    group: Any = dist.new_group()
    assert distributed_c10d.ProcessGroupGloo is gloo
    assert isinstance(group._get_backend(torch.device("cpu")), gloo)
    assert loops() == 1


def test_a_replaced_gloo_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """Somebody else's."""

    monkeypatch.setattr(host_shared_gloo_device, "_shared", lambda: [object()])
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", Other)
    with host_shared_gloo_device.devices_of_new_group():
        assert distributed_c10d.ProcessGroupGloo is Other


def test_without_a_default_group_nothing_is_shared() -> None:
    gloo = distributed_c10d.ProcessGroupGloo
    with host_shared_gloo_device.devices_of_new_group():
        assert distributed_c10d.ProcessGroupGloo is gloo


def test_a_torch_without_gloo_or_its_options_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FEATURE.unavailable(_CONTEXT) is None
    monkeypatch.setattr(host_shared_gloo_device, "_GLOO", object())
    assert "its devices" in (FEATURE.unavailable(_CONTEXT) or "")
    monkeypatch.setattr(host_shared_gloo_device, "_GLOO", None)
    assert "no gloo" in (FEATURE.unavailable(_CONTEXT) or "")
