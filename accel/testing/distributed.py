"""Tests that need several ranks, from plain pytest or under torchrun.

    @distributed(world_size=2)
    def test_something(...):
        ...  # runs on every rank

Under plain pytest the test starts torchrun on itself: one ``pytest`` for each rank, on this one test. Under
``torchrun --nproc-per-node N -m pytest tests/distributed`` (real GPUs) it simply runs; a test that
wants another number of ranks is skipped and says so.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["distributed", "launch", "under_torchrun"]

_TAIL_LINES = 60


def under_torchrun() -> bool:
    """Whether this process is one rank of a torchrun launch."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def distributed(world_size: int, seconds: int = 240) -> Callable[[Callable[..., Any]], Any]:
    """Run a test on ``world_size`` ranks; it fails after ``seconds`` or with the first rank that fails."""

    def decorate(test: Callable[..., Any]) -> Any:
        @functools.wraps(test)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            if not under_torchrun():
                node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
                launch(world_size, ["-m", "pytest", "-q", "-p", "no:cacheprovider", node], seconds)
            elif int(os.environ["WORLD_SIZE"]) == world_size:
                test(*args, **kwargs)
            else:
                pytest.skip(f"needs {world_size} ranks, torchrun gave {os.environ['WORLD_SIZE']}")

        return pytest.mark.distributed(on_ranks)

    return decorate


def launch(
    world_size: int, command: list[str], seconds: int, environment: dict[str, str] | None = None
) -> str:
    """Run ``python COMMAND`` on ``world_size`` ranks of this machine and return what they printed.

    One thread for each rank; a free rendezvous port. Fails the test with the end of the output when
    a rank fails or the time is over.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    if command[0] == "-m":
        torchrun.append("--module")
        command = command[1:]
    env = {k: v for k, v in os.environ.items() if k not in _FROM_TORCHRUN and k[:7] != "PYTEST_"}
    try:
        done = subprocess.run(
            [sys.executable, *torchrun, *command],
            env={**env, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as e:
        output = (
            e.stdout if isinstance(e.stdout, str) else (e.stdout or b"").decode(errors="replace")
        )
        pytest.fail(
            f"{world_size} ranks: not done after {seconds} s\n{_tail(output)}", pytrace=False
        )
    if done.returncode != 0:
        pytest.fail(
            f"{world_size} ranks: exit status {done.returncode}\n{_tail(done.stdout)}",
            pytrace=False,
        )
    return done.stdout


_FROM_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


def _tail(output: str) -> str:
    """The last lines that a rank printed; torchrun's own account of the failure adds nothing."""
    lines = output.splitlines()
    ends = [i for i, line in enumerate(lines) if "multiprocessing/api.py" in line]
    return "\n".join(lines[: ends[0] if ends else len(lines)][-_TAIL_LINES:])
