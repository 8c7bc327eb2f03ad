"""The plugin for tests of several ranks: a rank that is done early is no other's failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from accel.testing.distributed import under_torchrun


@pytest.fixture
def group() -> Iterator[None]:
    if under_torchrun():
        dist.init_process_group("gloo")
    yield
    if under_torchrun():
        dist.destroy_process_group()


@pytest.mark.distributed(world_size=2)
def test_a_rank_that_is_done_waits_for_one_that_still_makes_a_group(group: None) -> None:
    if dist.get_rank() == 1:
        time.sleep(1)  # rank 0 holds the store: were it gone, the group could not be made
    dist.new_group([1])


TWO_TESTS = """
import time
import pytest

@pytest.mark.distributed(world_size=1)
def test_short():
    pass

@pytest.mark.distributed(world_size=1)
def test_long():
    time.sleep(3)
"""


def test_durations_are_those_on_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p accel.testing.distributed\n")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--durations=0", "-vv", "test_two.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    whole = time.monotonic() - start
    shown = re.findall(r"([0-9.]+)s call +test_two.py::(test_\w+)", done.stdout)
    seconds = {name: float(number) for number, name in shown}
    assert 3 <= seconds["test_long"] < 6, done.stdout
    assert seconds["test_short"] < whole - 3, "the launch without the other test"
