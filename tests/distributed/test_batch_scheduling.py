"""`host_batch_scheduling`: gloo's threads, and no others, are batch work while it is on."""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel.feature import Context
from accel.patches.host_batch_scheduling import FEATURE, starting_threads, switch_on

_CONTEXT = Context(device="cpu", megatron="0.19.2")
pytestmark = [
    pytest.mark.skipif(
        FEATURE.unavailable(_CONTEXT) is not None, reason=str(FEATURE.unavailable(_CONTEXT))
    ),
    pytest.mark.skipif(
        os.sched_getscheduler(0) != os.SCHED_OTHER, reason="the tests have a policy of their own"
    ),
]


@contextmanager
def thread(name: str = "other", *, known: bool = True) -> Iterator[int]:
    """The number of a thread that waits, as the kernel has it; `known` to Python, or as one of C++."""
    end = threading.Event()
    if known:
        waiting = threading.Thread(target=end.wait, daemon=True)
        waiting.start()
        found = waiting.native_id
    else:
        told = queue.SimpleQueue[int]()

        def wait() -> None:
            told.put(threading.get_native_id())
            end.wait()

        _thread.start_new_thread(wait, ())
        found = told.get(timeout=10)
    number = found
    assert number is not None
    Path(f"/proc/self/task/{number}/comm").write_text(name)
    try:
        yield number
    finally:
        end.set()
        while Path(f"/proc/self/task/{number}").exists():
            time.sleep(1e-3)


def test_threads_that_were_there_are_known_by_their_names() -> None:
    with thread("pt_gloo_runloop") as gloo, thread() as other:
        off = switch_on()
        assert os.sched_getscheduler(gloo) == os.SCHED_BATCH
        assert os.sched_getscheduler(other) == os.SCHED_OTHER
        off()
        assert os.sched_getscheduler(gloo) == os.SCHED_OTHER


def test_threads_that_a_group_starts() -> None:
    with ExitStack() as stack:
        off = switch_on()
        stack.callback(off)
        before = stack.enter_context(thread(known=False))
        with starting_threads():
            started = stack.enter_context(thread(known=False))
            store = stack.enter_context(thread("pt_tcpstore_uv", known=False))
            of_python = stack.enter_context(thread())
        assert os.sched_getscheduler(started) == os.SCHED_BATCH
        for other in (before, store, of_python):
            assert os.sched_getscheduler(other) == os.SCHED_OTHER
        off()
        assert os.sched_getscheduler(started) == os.SCHED_OTHER


def test_a_policy_of_others_stays() -> None:
    with thread("gloo_tcp_loop") as idle, thread("gloo_tcp_loop") as later:
        os.sched_setscheduler(idle, os.SCHED_IDLE, os.sched_param(0))
        off = switch_on()
        assert os.sched_getscheduler(idle) == os.SCHED_IDLE
        os.sched_setscheduler(later, os.SCHED_IDLE, os.sched_param(0))
        off()
        assert os.sched_getscheduler(later) == os.SCHED_IDLE


def test_threads_that_have_ended_and_names_that_are_no_text() -> None:
    with thread("gloo_tcp_loop") as number:
        off = switch_on()
    with thread("a") as odd:
        Path(f"/proc/self/task/{odd}/comm").write_bytes("fifteen bytes é".encode()[:15])
        off()
        switch_on()()
    assert number != odd


def test_a_host_that_forbids_it_is_named_and_harmed_by_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert FEATURE.unavailable(_CONTEXT) is None
    set_policy = os.sched_setscheduler

    def refuse(number: int, policy: int, parameters: os.sched_param) -> None:
        if policy == os.SCHED_BATCH:
            raise OSError(22, "Invalid argument")
        set_policy(number, policy, parameters)

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert "Invalid argument" in (FEATURE.unavailable(_CONTEXT) or "")
    with thread("gloo_tcp_loop") as number:
        switch_on()()
        assert os.sched_getscheduler(number) == os.SCHED_OTHER


def names() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.append((task / "comm").read_text().strip())
    return found


def policies() -> dict[str, set[int]]:
    """Of the threads by name."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = (task / "comm").read_text().strip()
            found.setdefault(name, set()).add(os.sched_getscheduler(int(task.name)))
    return found


def wait_for_names() -> None:
    """A thread has its creator's name until it runs: until as many as before have gloo's, for a while."""
    seen = -1
    while seen != (seen := sum("gloo" in name for name in names())) or seen == 0:
        time.sleep(0.5)


@pytest.mark.distributed(world_size=2)
def test_groups_before_and_after() -> None:
    import accel

    dist.init_process_group("gloo")  # before: known by name
    wait_for_names()
    for name, on in (("on", True), ("off", False), ("on again", True)):
        accel.enable(preset="off", host_batch_scheduling=on)
        group = dist.new_group()
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0] * 3
        wait_for_names()
        found = policies()
        gloo = {name: of for name, of in found.items() if "gloo" in name}
        assert gloo, name
        wanted = os.SCHED_BATCH if on else os.SCHED_OTHER
        assert all(of == {wanted} for of in gloo.values()), (name, gloo)
        assert os.sched_getscheduler(os.getpid()) == os.SCHED_OTHER
    accel.disable()
    dist.destroy_process_group()
