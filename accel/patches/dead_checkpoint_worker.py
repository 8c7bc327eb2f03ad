"""An error, soon, where the worker of ``--use-persistent-ckpt-worker`` has died.

Megatron asks the worker whether a checkpoint is written, not whether there still is a worker. One that was
killed, for want of memory most often, leaves a checkpoint that is never finished: the training goes on
without a word, and stops for ever at the next save, or at its end. Here each question, and each wait for the
worker, ends with an error that says how the worker ended. While it lives nothing changes. What cannot be sent
to it, for want of open files or of /dev/shm, is an error too: Python's queue prints it, and Megatron waits.

**Not for** ``--async-strategy nvrx``, whose worker is that of nvidia-resiliency-ext.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any

from accel.feature import Feature
from accel.patches.checkpoint_worker import idle
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_CALLER = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller"
_HERE = "accel.patches.dead_checkpoint_worker"
SECONDS = 0.1
"""Between two looks at a worker that is waited for; Megatron's own."""


class CheckpointWorkerDied(RuntimeError):
    """It says how, and what of the checkpoints is left."""

    def __init__(self, worker: BaseProcess) -> None:
        code = worker.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        how += " (out of memory?)" if code == -signal.SIGKILL else ""
        super().__init__(
            f"the worker of --use-persistent-ckpt-worker {how}: what it was to write is no checkpoint; "
            "resume from the one before, or leave the flag out, for a new process at each save"
        )


class CheckpointNotSent(RuntimeError):
    """It says why the worker has not got it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"a checkpoint could not be handed to the worker of --use-persistent-ckpt-worker "
            f"({type(error).__name__}: {error}): each tensor takes open files (ulimit -n) and memory of "
            "/dev/shm; leave the flag out, for a new process at each save"
        )


class _Unsent:
    """Errors of the thread that sends what is put into a queue, which else only prints them."""

    def __init__(self, queue: Any) -> None:
        self.errors: list[BaseException] = []
        queue._on_queue_feeder_error = lambda error, item: self.errors.append(error)

    @classmethod
    def of(cls, queue: Any) -> _Unsent:
        """Before its first item: the thread takes its handler with it."""
        if not hasattr(queue, "accel_unsent"):
            queue.accel_unsent = cls(queue)
        found: _Unsent = queue.accel_unsent
        return found

    def check(self) -> None:
        """Raises CheckpointNotSent."""
        if self.errors:
            raise CheckpointNotSent(self.errors[0]) from self.errors[0]


class _Watched:
    """A queue, as long as its reader lives and what was put into the other one is sent."""

    def __init__(self, queue: Any, reader: BaseProcess, unsent: _Unsent) -> None:
        self.put = queue.put
        self._queue, self._reader, self._unsent = queue, reader, unsent

    def join(self) -> None:
        """Wait until all that was put is done with.

        Raises:
            CheckpointWorkerDied, CheckpointNotSent: it never will be.
        """
        wait = threading.Thread(target=self._queue.join, daemon=True)
        wait.start()
        while wait.is_alive():
            check(self._reader)
            self._unsent.check()
            wait.join(SECONDS)


def check(worker: BaseProcess) -> None:
    """Raises CheckpointWorkerDied for a worker that has ended."""
    if not worker.is_alive():
        raise CheckpointWorkerDied(worker)


@around
def to_a_living_worker(schedule: Callable[..., None], self: Any, async_req: Any) -> None:
    import torch.distributed as dist

    if async_req.async_fn is None:
        return schedule(self, async_req)
    if self.process is None:
        self.process = self._get_process(dist.get_rank())
    check(self.process)
    unsent = _Unsent.of(self._persistent_queue)
    self._persistent_preload_q = _Watched(self._persistent_preload_q, self.process, unsent)
    try:
        schedule(self, async_req)
    finally:
        del self._persistent_preload_q  # the class has upstream's
    return None


@around
def or_dead(
    is_current_async_call_done: Callable[..., bool],
    self: Any,
    blocking: bool = False,
    no_dist: bool = False,
) -> bool:
    while self.process and self.cur_item is None:
        _Unsent.of(self._persistent_queue).check()
        alive = self.process.is_alive()  # before the look: it may write, and then end
        try:
            self.cur_item = self._persistent_comp_q.get(timeout=SECONDS if blocking else 0)
        except Empty:
            if not alive:
                raise CheckpointWorkerDied(self.process) from None
            if not blocking:
                break
    return is_current_async_call_done(self, blocking, no_dist)


@around
def of_a_dead_worker_too(close: Callable[..., None], self: Any, abort: bool = False) -> None:
    if abort or not self.process:
        return close(self, abort)
    queue = self._persistent_queue
    self._persistent_queue = _Watched(queue, self.process, _Unsent.of(queue))
    try:
        check(self.process)
        close(self)
    except (CheckpointWorkerDied, CheckpointNotSent):
        close(self, abort=True)  # whoever asked for a checkpoint has heard of it
    finally:
        del self._persistent_queue
    return None


FEATURE = Feature(
    name="dead_checkpoint_worker",
    summary="an error where the worker of --use-persistent-ckpt-worker has died",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=idle,
    patches=(
        Patch(
            target=f"{_CALLER}.schedule_async_call",
            replacement=f"{_HERE}:to_a_living_worker",
            how="wrap",
            why="Upstream waits for the worker's copy of the tensors for ever.",
        ),
        Patch(
            target=f"{_CALLER}.is_current_async_call_done",
            replacement=f"{_HERE}:or_dead",
            how="wrap",
            why="Upstream takes a worker that says nothing for one that writes.",
        ),
        Patch(
            target=f"{_CALLER}.close",
            replacement=f"{_HERE}:of_a_dead_worker_too",
            how="wrap",
            why="Upstream waits for its answer at the end of the program.",
        ),
    ),
)
