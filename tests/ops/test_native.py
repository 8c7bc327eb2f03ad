"""A native library that is not ours."""

from __future__ import annotations

import os
import subprocess
import sys

import torch


def test_a_library_of_something_else_is_named() -> None:
    code = "from accel.ops import _native; print(_native.reason())"
    env = {**os.environ, "ACCEL_NATIVE_LIBRARY": str(torch._C.__file__)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "has none of accel's kernels; build them with" in done.stdout
