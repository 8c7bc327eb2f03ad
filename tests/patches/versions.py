"""The same check with another version of Megatron than the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_on(version: str, check: Callable[[], None]) -> None:
    """Call a function of a module's, in a process of its own if `version` is not the installed one."""
    import megatron.core

    if megatron.core.__version__.partition("+")[0] == version:
        check()
        return
    path = os.pathsep.join((str(Path(sys.prefix) / "megatron" / version), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", f"import {check.__module__} as test; test.{check.__name__}()"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
