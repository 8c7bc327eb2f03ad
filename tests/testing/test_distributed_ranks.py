"""The plugin for tests of several ranks: a rank that is done early is no other's failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from accel.testing.distributed import Batch, Outcome, under_torchrun


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
    print("measured: 1 unit")

@pytest.mark.distributed(world_size=1)
def test_long():
    time.sleep(3)
"""


def test_durations_and_what_is_measured_are_those_on_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p accel.testing.distributed\n")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--durations=0", "-vv", "test_two.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    whole = time.monotonic() - start
    assert "test_two.py::test_short: 1 unit" in done.stdout
    shown = re.findall(r"([0-9.]+)s call +test_two.py::(test_\w+)", done.stdout)
    seconds = {name: float(number) for number, name in shown}
    assert seconds["test_long"] >= 3, done.stdout
    assert seconds["test_long"] + seconds["test_short"] < whole, "no second is in both"
    assert seconds["test_short"] < whole - 3, "the launch without the other test"


def phase(when: str, outcome: str = "passed") -> str:
    row = {
        "test": "t",
        "when": when,
        "outcome": outcome,
        "text": outcome,
        "printed": "p",
        "seconds": 1.0,
    }
    return json.dumps(row) + "\n"


DONE = [phase("setup"), phase("call"), phase("teardown")]
SKIPPED = [phase("setup"), phase("call", "skipped"), phase("teardown")]
FAILED = [phase("setup"), phase("call", "failed"), phase("teardown")]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([DONE, DONE], Outcome("passed", "p", 1.0)),
        ([SKIPPED, SKIPPED], Outcome("skipped", "rank 0: skipped", 1.0)),
        ([DONE, SKIPPED], Outcome("skipped", "rank 1: skipped", 1.0)),
        ([SKIPPED, FAILED], Outcome("failed", "rank 1: failed", 1.0)),
        ([FAILED[:2], DONE[:1]], Outcome("failed", "rank 0: failed", 1.0)),
        ([SKIPPED, DONE[:1]], None),
        ([SKIPPED, []], None),
        ([DONE, [*DONE[:2], DONE[2][:20]]], None),
    ],
)
def test_a_rank_that_died_is_not_hidden_by_one_that_skipped(
    ranks: list[list[str]], expected: Outcome | None, tmp_path: Path
) -> None:
    """No outcome: the launch's exit status becomes the test's failure."""
    for rank, lines in enumerate(ranks):
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(lines))
    batch = Batch(2)
    batch._read(tmp_path, ["t"])
    assert batch.outcomes.get("t") == expected
