"""The same check with another version of Megatron than the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def installed() -> str:
    import megatron.core

    version: str = megatron.core.__version__.partition("+")[0]
    return version


def path_of(version: str) -> str:
    """The ``PYTHONPATH`` of a process that is to find that version, and accel."""
    path = [str(ROOT)]
    if version != installed():
        beside = Path(sys.prefix) / "megatron" / version
        assert beside.is_dir(), f"megatron-core {version} is missing: make setup installs it"
        path.insert(0, str(beside))
    return os.pathsep.join(path)


def output_with(version: str, code: str, *beside: Path) -> str:
    """What Python code prints in a process of its own, on that version, with more folders to import from."""
    path = os.pathsep.join([*map(str, beside), path_of(version)])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_on(version: str, check: Callable[[], None]) -> None:
    """Call a function of a module's, in a process of its own if `version` is not the installed one."""
    if version == installed():
        check()
    else:
        output_with(version, f"import {check.__module__} as test; test.{check.__name__}()")
