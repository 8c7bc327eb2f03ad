"""Ranks that are forked are as torchrun's: environment, store, output, status, and nobody is left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from accel.testing.distributed import under_torchrun
from accel.testing.ranks import Launcher

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
SUMS_RANKS = """
import os, sys
early = [name for name in sys.modules if name.split(".")[0] in ("accel", "megatron")]
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, int(os.environ["LOCAL_RANK"]))
# in one write: the other rank's may come in between
os.write(1, f"{ranks} {len(sys.argv)} {__name__} {early} {os.environ['WHO']}\\n".encode())
dist.destroy_process_group()
"""
SLEEPS = """
import os, sys, time
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(100)
"""
ONE_FAILS = """
import os, sys, time
os.write(1, f"{os.getpid()}\\n".encode())
while os.environ["RANK"] == "0" or len(open(sys.argv[1]).read().split()) < 2:
    time.sleep(0.1)
sys.exit(3)
"""
Run = Callable[..., tuple[int | None, str]]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    def run(script: str, seconds: float = 60) -> tuple[int | None, str]:
        (tmp_path / "script.py").write_text(script)
        output = tmp_path / f"output-{time.monotonic_ns()}"
        command = [str(tmp_path / "script.py"), str(output)]
        status = launcher.run(2, command, {"WHO": "me"}, str(output), seconds)
        return status, output.read_text()

    return run


def gone(printed: str) -> bool:
    return not any(psutil.pid_exists(int(pid)) for pid in printed.split())


def test_ranks_are_told_what_torchrun_tells_and_nothing_is_imported_before(run: Run) -> None:
    for _ in range(2):  # a store of its own for each launch
        status, printed = run(SUMS_RANKS)
        assert status == 0, printed
        assert printed.splitlines() == ["[0, 1] 2 __main__ [] me"] * 2


def test_a_rank_that_fails_ends_the_others(run: Run) -> None:
    status, printed = run(ONE_FAILS)
    assert status == 3
    assert len(printed.split()) == 2
    assert gone(printed)


def test_ranks_have_their_time(run: Run) -> None:
    status, printed = run(SLEEPS, seconds=2)
    assert status is None
    assert gone(printed)


def test_a_callers_own_limit_ends_the_ranks_and_the_next_launch_works(
    run: Run, tmp_path: Path
) -> None:
    def over(*_: object) -> None:
        raise TimeoutError

    assert run(ONE_FAILS)[0] == 3  # the program is up
    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(15)
    try:
        with pytest.raises(TimeoutError):
            run(SLEEPS)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    printed = max(tmp_path.glob("output-*")).read_text()
    assert len(printed.split()) == 2
    assert gone(printed)
    assert run(ONE_FAILS)[0] == 3


def test_a_program_that_was_killed_costs_no_later_run(run: Run, launcher: Launcher) -> None:
    status, _ = run("pass")
    assert status == 0
    assert launcher._program is not None
    launcher._program.kill()
    launcher._program.wait()
    status, _ = run("pass")
    assert status == 0
