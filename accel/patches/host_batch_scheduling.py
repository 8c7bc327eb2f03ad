"""gloo's threads let running work go on, and are served as soon as it waits or its time slice ends.

gloo has two kinds of threads for each group: one that reads and writes sockets, and those that run the
collectives. They wake for each packet and each step, and the kernel then takes the core from the thread that
computes, or that was about to go to sleep until the collective ends. Scheduled as batch work (`SCHED_BATCH`),
which is for threads that may wait, they do not interrupt: what has come in the meantime is handled at once,
with fewer switches, and products keep their caches.

With two hosts of one core each, an all-reduce of 4 KiB takes 0.21 ms for 1.96 ms, one of 1 MiB 1.0 ms for
2.8 ms, beside products too (below), and transfers beside products hide better (`python -m accel bench moe`).
Where all ranks together have more threads than cores, a message that nobody waits for may be handled later,
by a time slice of some milliseconds.

Concerned are threads that gloo has named, and those that start, outside Python, while it makes a group; not
if somebody gave them another policy. An undone feature gives back theirs. Nothing is computed otherwise.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from accel.feature import Context, Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_THREADS = Path("/proc/self/task")
_GLOO, _STORE = (b"pt_gloo_", b"gloo_"), b"pt_tcpstore"
_BATCH: set[int] = set()
"""Threads that were given the policy here."""


def _threads() -> set[int]:
    return set(map(int, os.listdir(_THREADS)))


def _is_named(thread: int, names: bytes | tuple[bytes, ...]) -> bool:
    with contextlib.suppress(OSError):
        return (_THREADS / str(thread) / "comm").read_bytes().startswith(names)
    return False


def _reschedule(thread: int, old: int, new: int) -> bool:
    """Whether it was `old`, and still there."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(thread) == old:
            os.sched_setscheduler(thread, new, os.sched_param(0))
            return True
    return False


def _let_wait(threads: set[int]) -> None:
    _BATCH.update(t for t in threads if _reschedule(t, os.SCHED_OTHER, os.SCHED_BATCH))


@contextlib.contextmanager
def starting_threads() -> Iterator[None]:
    """Around what makes a group."""
    before = _threads()
    yield
    started = _threads() - before - {thread.native_id for thread in threading.enumerate()}
    _let_wait({thread for thread in started if not _is_named(thread, _STORE)})


def switch_on() -> Callable[[], None]:
    """For the groups that there are."""
    _let_wait({thread for thread in _threads() - {os.getpid()} if _is_named(thread, _GLOO)})

    def off() -> None:
        for thread in _BATCH & _threads():
            _reschedule(thread, os.SCHED_BATCH, os.SCHED_OTHER)
        _BATCH.clear()

    return off


def _unavailable(context: Context) -> str | None:
    if not hasattr(os, "SCHED_BATCH") or not _THREADS.is_dir():
        return "this system has no SCHED_BATCH"
    if threading.get_native_id() not in _threads():
        return f"{_THREADS} has the threads of another namespace"
    failed: list[OSError] = []
    probe = threading.Thread(target=_try, args=(failed,))
    probe.start()
    probe.join()
    if failed:
        return f"this host does not let a thread be batch work ({failed[0].strerror})"
    return None


def _try(failed: list[OSError]) -> None:
    """In a thread of its own, which ends with it."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        failed.append(error)


FEATURE = Feature(
    name="host_batch_scheduling",
    summary="gloo's threads do not interrupt the threads that compute",
    preset="fast",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    unavailable=_unavailable,
    switch_on=switch_on,
    benchmarks=("host_collectives",),
    patches=(
        Patch(
            target="accel.device.cpu.collectives:starting_threads",
            replacement="accel.patches.host_batch_scheduling:starting_threads",
            expects=(),
            why="Each packet that comes takes the core from a product.",
        ),
    ),
)
