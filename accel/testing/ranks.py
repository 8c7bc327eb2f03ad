"""Ranks forked from a process that has torch already, for tests that launch hundreds of them.

torchrun imports torch once for itself and once for each rank, which takes longer than most of the trainings
that the tests launch. :class:`Launcher` keeps one process, this file as a program, that has imported it. For
each launch it forks the ranks, gives them torchrun's environment and a store, and waits for them. Neither
Megatron nor accel is imported before the fork: a rank meets them as under torchrun.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

PRELOADED = (
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.cpp_extension",
    "triton",
    # what Megatron takes longest to import, besides torch
    "omegaconf",
    "transformers.models.auto.tokenization_auto",
)
_PORT_DIGITS = 5


@dataclass(frozen=True)
class Launch:
    """What the program is asked for, a line of JSON each; it answers with the exit status, or null."""

    world_size: int
    command: list[str]
    """A script or ``-m`` and a module, then arguments."""
    environment: dict[str, str]
    """Of each rank, but for what torchrun would set."""
    output: str
    """The file that gets what the ranks print; its name names the launch."""
    seconds: float


class Launcher:
    """Starts ranks in the working directory and with the interpreter of this process."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[str] | None = None

    def run(
        self,
        world_size: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: str,
        seconds: float,
    ) -> int | None:
        """The exit status of the rank that failed first, 0 if none did; ``None``: not done in time.

        Raises:
            RuntimeError: the program has ended meanwhile; the next run starts another.
        """
        if self._program is not None and self._program.poll() is not None:
            self.close()
        if self._program is None:
            # no device may be touched before the fork, and each rank has one thread
            before_fork = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
            self._program = subprocess.Popen(
                [sys.executable, "-P", __file__],
                env={**os.environ, **before_fork},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        asked = Launch(world_size, list(command), dict(environment), output, seconds)
        print(json.dumps(asdict(asked)), file=self._program.stdin, flush=True)
        try:
            answer = self._program.stdout.readline()
        except BaseException:  # a test's own limit, or Ctrl-C
            self._program.terminate()
            self.close()
            raise
        if not answer:
            status, self._program = self._program.wait(), None
            raise RuntimeError(f"the process that forks ranks has ended with status {status}")
        return json.loads(answer)["status"]

    def close(self) -> None:
        """End the program; the next `run` starts another."""
        if self._program is not None:
            self._program.communicate()
            self._program = None


def serve() -> list[str] | None:
    """Answer until there is nothing to read. In a forked rank: return its command."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = Launch(**json.loads(line))
        port, told = os.pipe()
        ranks: list[int] = []
        for rank in range(asked.world_size):
            pid = os.fork()
            if pid == 0:
                os.close(told)
                answers.close()
                _become(rank, asked, port)
                return asked.command
            ranks.append(pid)
        status = _wait(ranks, told, time.monotonic() + asked.seconds)
        os.close(port)
        os.close(told)
        print(json.dumps({"status": status}), file=answers, flush=True)
    return None


def _become(rank: int, asked: Launch, port: int) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(asked.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    size = str(asked.world_size)
    os.environ.clear()
    os.environ.update(
        asked.environment,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        ROLE_RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        GROUP_WORLD_SIZE="1",
        ROLE_WORLD_SIZE=size,
        ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.read(port, _PORT_DIGITS).decode(),  # waits for the store
        TORCHELASTIC_RUN_ID=os.path.basename(asked.output),
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.close(port)


def _wait(ranks: list[int], told: int, deadline: float) -> int | None:
    import torch.distributed as dist

    # its thread must not run while ranks are forked
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    os.write(told, f"{store.port:0{_PORT_DIGITS}}".encode() * len(ranks))
    _, wait_status = wait_for(ranks, deadline)
    return None if wait_status is None else os.waitstatus_to_exitcode(wait_status)


def wait_for(ranks: Sequence[int], deadline: float) -> tuple[int | None, int | None]:
    """Wait until these processes, each the leader of its group, are done. At the first that fails, at the
    deadline, and at the end, kill their groups: ranks, and what they have started.

    Returns: which one failed first, and its status as of `os.waitpid`; `(None, 0)`: none did; `(None, None)`:
    the time was over.
    """
    waiting = set(ranks)
    failed: int | None = None
    status: int | None = 0
    try:
        while waiting and status == 0:
            for rank, pid in enumerate(ranks):
                done, wait_status = os.waitpid(pid, os.WNOHANG) if pid in waiting else (0, 0)
                if done:
                    waiting.discard(pid)
                    if wait_status and failed is None:
                        failed, status = rank, wait_status
            if waiting and status == 0 and time.monotonic() > deadline:
                status = None
            time.sleep(0.005)
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in waiting:
            os.waitpid(pid, 0)
    return failed, status


def environment(**more: str) -> dict[str, str]:
    """Of ranks: that of this process, but for what torchrun and pytest have put there; one thread each."""
    theirs = (
        "PYTEST_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "MASTER_",
        "TORCHELASTIC_",
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
    return {**inherited, "OMP_NUM_THREADS": "1", **more}


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that ranks are ended too
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # what is imported stays: a rank's collector passes it by
    gc.collect()
    gc.freeze()
    command = serve()
    if command is None:
        return
    for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
