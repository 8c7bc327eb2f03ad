"""A program's ranks, each on a host of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.lab.network import Network

__all__ = ["CHECKOUT_FIRST", "cores_of", "run"]

CHECKOUT_FIRST = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
}
"""For ranks that import `benchmarks`, and else what this process does."""

PORT = 29500
"""Of the store, on host 0, where nobody else listens."""
_TAIL_LINES = 30


def run(
    network: Network | None,
    command: Sequence[str],
    ranks: int,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``python COMMAND`` once for each rank and return what each printed.

    Rank r is on host r, alone there, with one thread and gloo on the host's link; without a network all are
    on this machine's loopback. Where there are as many cores as ranks, each rank is pinned to a core.

    Args:
        command: a script or ``-m`` and a module, then arguments.
        timeout: seconds.
        environment: of each rank, above this process's own.

    Raises:
        RuntimeError: a rank failed; the others were ended. Says the end of what it wrote to stderr.
        TimeoutError: not done in time; all were ended. Says what each wrote last.
    """
    if network is not None and ranks > network.count:
        raise ValueError(f"{ranks} ranks need as many hosts, there are {network.count}")
    cores = cores_of(ranks)
    given = {**os.environ, **(environment or {}), **(_loopback() if network is None else {})}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes: list[subprocess.Popen] = []
        stack.callback(_end, processes)
        for rank in range(ranks):
            there = [] if network is None else ["ip", "netns", "exec", network.namespace(rank)]
            pin = functools.partial(os.sched_setaffinity, 0, {cores[rank]}) if cores else None
            with _out(folder, rank).open("wb") as out, _err(folder, rank).open("wb") as err:
                process = subprocess.Popen(
                    [*there, sys.executable, *command],
                    env={**given, **_environment(network, rank, ranks)},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    preexec_fn=pin,
                )
            processes.append(process)
        try:
            failed = _first_to_fail(processes, time.monotonic() + timeout)
        except TimeoutError as late:
            _end(processes)
            said = [f"rank {rank}: {line}" for rank in range(ranks) for line in _said(folder, rank)]
            raise TimeoutError("\n".join([str(late), *said])) from None
        if failed is not None:
            _end(processes)
            status = processes[failed].returncode
            lines = [f"rank {failed} ended with exit status {status}", *_said(folder, failed)]
            raise RuntimeError("\n".join(lines))
        return [_out(folder, rank).read_text() for rank in range(ranks)]


def cores_of(ranks: int) -> list[int] | None:
    """A core for each rank; ``None``: this process may not use as many."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[:ranks] if len(cores) >= ranks else None


def _out(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.out")


def _err(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.err")


def _said(folder: str, rank: int) -> list[str]:
    """The end of what a rank wrote to stderr."""
    return _err(folder, rank).read_text(errors="replace").splitlines()[-_TAIL_LINES:]


def _environment(network: Network | None, rank: int, ranks: int) -> dict[str, str]:
    rank_of_many = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    if network is None:
        return {**rank_of_many, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    return {
        **rank_of_many,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": network.interface,
    }


def _loopback() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}


def _first_to_fail(processes: Sequence[subprocess.Popen], deadline: float) -> int | None:
    """Wait for all or until one fails, without waking up in between: ranks may need every core."""
    with ExitStack() as stack:
        poller = select.poll()
        running: dict[int, int] = {}
        for rank, process in enumerate(processes):
            file = os.pidfd_open(process.pid)
            stack.callback(os.close, file)
            poller.register(file, select.POLLIN)
            running[file] = rank
        while running:
            ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not ended:
                ranks = ", ".join(str(rank) for rank in running.values())
                raise TimeoutError(f"not done in time: rank {ranks}")
            for file, _ in ended:
                poller.unregister(file)
                # its process group stays until `_end`, which may have to kill what it has started
                rank = running.pop(file)
                told = os.waitid(os.P_PIDFD, file, os.WEXITED | os.WNOWAIT)
                if told is None or told.si_status != 0:
                    return rank
    return None


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """The ranks and what they have started."""
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
