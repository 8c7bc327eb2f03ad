"""Part tests: the contracts of all ops, with the kernels of the GPU.

Counts and failures go to tests.json. Loaded by pytest as a plugin, this file writes the outcome of each test
into tests.jsonl as it comes, and leaves out those that have passed: cut short, the part goes on where it
stopped, and what has failed until then is told.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import CHECKOUT, Setting, write_json

OUTCOMES = "ACCEL_GPU_TEST_OUTCOMES"
"""Environment variable: the file of them, a line of JSON for each test."""
WORKERS = max(1, (os.cpu_count() or 2) - 1)
"""They share one GPU, but what takes time is compiling."""
SECONDS_TO_END = 15.0


def _outcomes(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def pytest_collection_modifyitems(config: Any, items: list) -> None:
    """Leave out what has passed."""
    rows = _outcomes(Path(os.environ[OUTCOMES]))
    passed = {row["test"] for row in rows if row["outcome"] == "passed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: Any) -> None:
    """Of every test, in the process that collects the reports of all workers."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    row = {"test": report.nodeid, "outcome": report.outcome}
    if report.failed:
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        row["why"] = (lines[0][2:].strip() if lines else report.longreprtext)[:300]
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _run(command: list[str], environment: dict[str, str], seconds: float) -> int:
    """pytest's exit code; interrupted when the time is over, so that its workers end."""
    with subprocess.Popen(command, cwd=CHECKOUT, env=environment) as process:
        try:
            return process.wait(max(seconds - SECONDS_TO_END, 1.0))
        except subprocess.TimeoutExpired:
            print("the time is over; run the command again for the rest", flush=True)
            process.send_signal(signal.SIGINT)
        try:
            process.wait(SECONDS_TO_END / 2)
        except subprocess.TimeoutExpired:
            process.kill()
    return 1


def main() -> int:
    setting = Setting.from_argv()
    outcomes = (setting.folder / "tests.jsonl").resolve()
    passed = [row for row in _outcomes(outcomes) if row["outcome"] == "passed"]
    outcomes.write_text("".join(json.dumps(row) + "\n" for row in passed))
    paths = (
        ["tests/triton/test_rms_norm.py"] if setting.rehearse else ["tests/triton", "tests/cuda"]
    )
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.tests"]
    command += [path for path in paths if (CHECKOUT / path).exists()]
    if not setting.rehearse:
        command += ["-n", str(WORKERS), "--dist", "worksteal"]
        command += ["--ignore=tests/triton/test_compile_table.py"]  # needs no GPU
    environment = {**os.environ, OUTCOMES: str(outcomes)}
    code = _run(command, environment, setting.seconds_left)
    rows = _outcomes(outcomes)
    counts = Counter(row["outcome"] for row in rows)
    if code == 5 and counts["passed"]:  # no test is left
        code = 0
    failed = [row for row in rows if row["outcome"] == "failed"]
    result = {name: counts[name] for name in ("passed", "failed", "skipped")}
    write_json(
        setting.folder / "tests.json",
        {**result, "failures": [{"test": r["test"], "why": r["why"]} for r in failed]},
    )
    print(result)
    return code


if __name__ == "__main__":
    sys.exit(main())
