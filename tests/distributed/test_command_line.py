"""The one import in a real launch: start-up table, refusals, one line each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.testing.distributed import under_torchrun

from .training import MODEL, SCRIPT

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own process")
ROOT = Path(__file__).parents[2]


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *MODEL, "--train-iters", "2", *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def test_misspelt_flag_is_one_line_and_status_2() -> None:
    done = run("--accel-fused-nrom")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "accel" in line]
    assert lines == ["accel: unknown flag --accel-fused-nrom; did you mean --accel-fused-norm?"]


def test_contradiction_is_one_value_error_that_names_both_flags() -> None:
    done = run("--accel-fused-norm", "--no-accel-norm")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ValueError: --accel-fused-norm needs --accel-norm, which was turned off"


@pytest.mark.skipif("ACCEL_DEVICE" in os.environ, reason="chooses its own device")
def test_table_says_what_is_asked_active_and_skipped() -> None:
    done = run(
        ACCEL_DEVICE="cpu", RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0"
    )
    table = [line for line in done.stdout.splitlines() if line.startswith("[accel]")]
    assert "device cpu" in table[0]
    assert "preset fast" in table[0]
    assert any(line.split()[1:3] == ["te_layers", "active"] for line in table)
    assert any(line.split()[1:3] == ["norm", "active"] for line in table)


def test_wrong_device_is_one_error_before_anything_else() -> None:
    done = run(ACCEL_DEVICE="gpu")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ValueError: ACCEL_DEVICE='gpu': use auto, cpu, cuda, npu"
