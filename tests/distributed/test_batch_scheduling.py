"""`host_batch_scheduling`: gloo's threads, and no others, are batch work while it is on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel.feature import Context
from accel.patches import host_batch_scheduling
from accel.patches.host_batch_scheduling import FEATURE, starting_threads, switch_on

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no SCHED_BATCH here")


@contextmanager
def thread(name: str = "other") -> Iterator[int]:
    """The number of a thread that waits, as the kernel has it."""
    end = threading.Event()
    waiting = threading.Thread(target=end.wait)
    waiting.start()
    number = waiting.native_id
    assert number is not None
    Path(f"/proc/self/task/{number}/comm").write_text(name)
    try:
        yield number
    finally:
        end.set()
        waiting.join()


def test_threads_that_were_there_are_known_by_their_names() -> None:
    with thread("pt_gloo_runloop") as gloo, thread() as other:
        off = switch_on()
        assert os.sched_getscheduler(gloo) == os.SCHED_BATCH
        assert os.sched_getscheduler(other) == os.SCHED_OTHER
        off()
        assert os.sched_getscheduler(gloo) == os.SCHED_OTHER


def test_threads_that_a_group_starts() -> None:
    off = switch_on()
    with thread() as before:
        with starting_threads():
            inner = thread()
            started = inner.__enter__()
        assert os.sched_getscheduler(started) == os.SCHED_BATCH
        assert os.sched_getscheduler(before) == os.SCHED_OTHER
        off()
        assert os.sched_getscheduler(started) == os.SCHED_OTHER
        inner.__exit__(None, None, None)


def test_a_policy_of_others_stays() -> None:
    with thread("gloo_tcp_loop") as idle, thread("gloo_tcp_loop") as later:
        os.sched_setscheduler(idle, os.SCHED_IDLE, os.sched_param(0))
        off = switch_on()
        assert os.sched_getscheduler(idle) == os.SCHED_IDLE
        os.sched_setscheduler(later, os.SCHED_IDLE, os.sched_param(0))
        off()
        assert os.sched_getscheduler(later) == os.SCHED_IDLE


def test_threads_that_have_ended() -> None:
    with thread("gloo_tcp_loop"):
        off = switch_on()
    off()
    assert not host_batch_scheduling._BATCH


def test_a_host_that_forbids_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(device="cpu", megatron="0.19.2")
    assert FEATURE.unavailable(context) is None

    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert "Operation not permitted" in (FEATURE.unavailable(context) or "")


def policies() -> dict[str, set[int]]:
    """Of the threads by name."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        found.setdefault(name, set()).add(os.sched_getscheduler(int(task.name)))
    return found


@pytest.mark.distributed(world_size=2)
def test_groups_before_and_after() -> None:
    import accel

    dist.init_process_group("gloo")  # before: known by name
    main = Path(f"/proc/self/task/{os.getpid()}/comm").read_text().strip()
    for name, on in (("on", True), ("off", False), ("on again", True)):
        accel.enable(preset="off", host_batch_scheduling=on)
        group = dist.new_group()
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0] * 3
        found = policies()
        gloo = {name: of for name, of in found.items() if "gloo" in name}
        assert gloo, name
        wanted = os.SCHED_BATCH if on else os.SCHED_OTHER
        assert all(of == {wanted} for of in gloo.values()), (name, gloo)
        assert found[main] == {os.SCHED_OTHER}
    accel.disable()
    dist.destroy_process_group()
