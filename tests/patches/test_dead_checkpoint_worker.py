"""A worker that dies while it writes, copies or waits is an error; one that lives writes as before."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import accel
from accel.patches.dead_checkpoint_worker import CheckpointNotSent, CheckpointWorkerDied

pytestmark = pytest.mark.timeout(600)  # upstream waits for ever


def work(rank: int, queue: Any, preload_q: Any, comp_q: Any, *more: Any) -> None:
    """Upstream's worker without a device, and without collecting garbage: a fork has what threads of
    its parent hold."""
    gc.disable()
    while not isinstance(item := queue.get(), str):  # "DONE"
        args = list(item.async_fn_args)
        if item.preload_fn is not None:
            preload_q.get()
            args[1] = item.preload_fn()
            preload_q.task_done()
        item.async_fn(*args)
        comp_q.put(item.call_idx)
        queue.task_done()
    queue.task_done()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's queue of checkpoints, with a worker that is forked, which takes no imports."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    accel.enable(preset="off", device="cpu", checkpoint_worker=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    queue = async_utils.AsyncCallsQueue(persistent=True)
    with monkeypatch.context() as patch:
        patch.setattr(async_utils.PersistentAsyncCaller, "async_loop", staticmethod(work))
        queue.warmup_persistent_caller(0, "fork")
    yield queue
    if worker := async_utils.PersistentAsyncCaller._persistent_process:
        worker.kill()
        worker.join()
    queue.close(abort=True)
    async_utils.AsyncCallsQueue._persistent_caller = None
    dist.destroy_process_group()
    accel.disable()


def copied() -> str:
    return "copied"


def write(path: str, what: str = "") -> None:
    Path(path).write_text(what)


def die(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def end(*args: Any) -> Any:
    os._exit(3)


def request(async_fn: Any, path: str = "", preload_fn: Any = None) -> Any:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    return AsyncRequest(async_fn, (path, ""), [], preload_fn=preload_fn)


def test_a_worker_that_lives_writes(calls: Any, tmp_path: Path) -> None:
    for n in range(2):
        path = tmp_path / f"checkpoint {n}"
        calls.schedule_async_request(request(write, str(path), copied))
        assert calls.maybe_finalize_async_calls(blocking=True) == [n]
        assert path.read_text() == "copied"
    assert calls.maybe_finalize_async_calls() == []
    calls.close()


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        (die, r"was ended by SIGKILL \(out of memory\?\): what it was to write is no checkpoint"),
        (end, "exited with 3: what it was to write is no checkpoint"),
    ],
)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_worker_that_dies_while_it_writes(
    ends: Any, how: str, blocking: bool, calls: Any, tmp_path: Path
) -> None:
    """Upstream waits, or goes on without a word."""
    calls.schedule_async_request(request(write, str(tmp_path / "written")))
    assert calls.maybe_finalize_async_calls(blocking=True) == [0]
    calls.schedule_async_request(request(ends))

    def wait() -> None:
        while not blocking:  # as after each iteration
            assert calls.maybe_finalize_async_calls(blocking=False) == []
            time.sleep(0.01)
        calls.maybe_finalize_async_calls(blocking=True)

    with pytest.raises(CheckpointWorkerDied, match=how):
        wait()
    calls._get_async_caller().close()  # as the program ends: upstream would wait


def test_a_worker_that_dies_while_it_copies(calls: Any) -> None:
    with pytest.raises(CheckpointWorkerDied, match="SIGKILL"):
        calls.schedule_async_request(request(write, preload_fn=die))


def test_a_worker_that_has_died_gets_nothing(calls: Any, tmp_path: Path) -> None:
    calls.schedule_async_request(request(write, str(tmp_path / "written")))
    assert calls.maybe_finalize_async_calls(blocking=True) == [0]
    worker = calls._get_async_caller().process
    worker.kill()
    worker.join()
    with pytest.raises(CheckpointWorkerDied, match="resume from the one before"):
        calls.schedule_async_request(request(write, str(tmp_path / "not written"), copied))
    assert not (tmp_path / "not written").exists()


def test_what_was_written_before_the_end_counts(calls: Any, tmp_path: Path) -> None:
    calls.schedule_async_request(request(write, str(tmp_path / "written")))
    caller = calls._get_async_caller()
    assert caller._persistent_comp_q._reader.poll(30)
    caller.process.kill()
    caller.process.join()
    assert calls.maybe_finalize_async_calls(blocking=True) == [0]


def test_upstream_goes_on_without_a_word(calls: Any) -> None:
    accel.enable(preset="off", checkpoint_worker=False, dead_checkpoint_worker=False)
    calls.schedule_async_request(request(die))
    worker = calls._get_async_caller().process
    worker.join(30)
    assert not worker.is_alive()
    assert calls.maybe_finalize_async_calls() == []
    assert calls.get_num_unfinalized_calls() == 1


@pytest.mark.parametrize("preload", [True, False])
def test_what_cannot_be_sent_is_an_error(preload: bool, calls: Any, tmp_path: Path) -> None:
    """As for want of open files. Upstream waits, and so does the end of the program."""
    no_pickle_takes_it = lambda *args: None  # noqa: E731
    asked = request(no_pickle_takes_it, str(tmp_path), copied if preload else None)

    def save() -> None:
        calls.schedule_async_request(asked)
        calls.maybe_finalize_async_calls(blocking=True)

    with pytest.raises(CheckpointNotSent, match=r"handed to the worker .*ulimit -n"):
        save()
    calls._get_async_caller().close()
