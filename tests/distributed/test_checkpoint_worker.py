"""Checkpoints that a process beside the training writes, of a program that enables accel in a function."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.testing.distributed import launch, under_torchrun

from .test_resume import numbers
from .training import MODEL

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
SCRIPT = Path(__file__).with_name("enabled_inside.py")
FLAGS = (
    "--num-layers 1 --use-distributed-optimizer --ckpt-format torch_dist --train-iters 3".split()
)
WORKER = "--async-save --use-persistent-ckpt-worker --async-strategy mcore".split()


def test_a_training_goes_on_from_what_the_worker_wrote(tmp_path: Path) -> None:
    command = [str(SCRIPT), *MODEL, *FLAGS]
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    whole = numbers(launch(2, [*command, *WORKER, *save], 200))
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "3"
    latest.write_text("2")
    resumed = numbers(launch(2, [*command, "--load", str(tmp_path)], 200))
    assert len(whole) == 3
    assert resumed == whole[2:]
