"""`make`: the stamp of the native library says that it is there, and goes with it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$1" in
-m) case "$*" in *--editable*) echo built >> "$BUILDS" ;; esac ;;
-c) exit "$STATUS" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A Makefile whose Python only says whether the library loads: 0, 3 where it does not."""
    for name in ("Makefile", "setup.py", "pyproject.toml", "requirements"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "accel").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for stamp in (".python", ".requirements"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def make(checkout: Path, target: str, status: int, **environment: str) -> tuple[int, int]:
    """Its exit status, and how many builds there were so far."""
    builds = checkout / "builds"
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ACCEL_"))
    }
    done = subprocess.run(
        ["make", "-C", str(checkout), target],
        env={**variables, "BUILDS": str(builds), "STATUS": str(status), **environment},
        capture_output=True,
        check=False,
    )
    return done.returncode, len(builds.read_text().splitlines()) if builds.exists() else 0


def test_what_was_built_is_built_again_after_clean(checkout: Path) -> None:
    stamp = checkout / ".venv" / ".native"
    assert make(checkout, ".venv/.native", 0) == (0, 1)
    assert make(checkout, ".venv/.native", 0) == (0, 1)
    assert make(checkout, "clean", 0) == (0, 1)
    assert not stamp.exists()
    assert make(checkout, ".venv/.native", 0) == (0, 2)


def test_a_build_that_failed_leaves_no_stamp(checkout: Path) -> None:
    stamp = checkout / ".venv" / ".native"
    assert make(checkout, ".venv/.native", 3) == (0, 1)
    assert not stamp.exists()
    assert make(checkout, ".venv/.native", 3) == (0, 2)
    status, _ = make(checkout, ".venv/.native", 3, ACCEL_REQUIRE_NATIVE="1")
    assert status != 0
    assert make(checkout, ".venv/.native", 1)[0] != 0  # accel cannot even be imported
    assert make(checkout, ".venv/.native", 0)[0] == 0
    assert stamp.exists()
