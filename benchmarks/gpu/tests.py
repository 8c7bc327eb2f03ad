"""Part tests: the contracts of all ops, with the kernels of the GPU.

The counts and the first lines of failures go to tests.json. Loaded by pytest as a plugin, this file keeps
the names of the tests that have passed in tests.passed, as they pass, and leaves those out that are in
there: cut short, the part goes on where it stopped.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.setting import CHECKOUT, Setting, write_json

PASSED = "ACCEL_GPU_TESTS_PASSED"
"""Environment variable: the file of names."""


def _passed() -> Path:
    return Path(os.environ[PASSED])


def pytest_collection_modifyitems(config: Any, items: list) -> None:
    """Leave out what has passed."""
    before = set(_passed().read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


def pytest_runtest_logreport(report: Any) -> None:
    """Of every test, in the process that collects the reports of all workers."""
    if report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with _passed().open("a") as file:
            file.write(f"{report.nodeid}\n")


WORKERS = 8
"""They share one GPU: more of them wait for each other."""


def main() -> int:
    setting = Setting.from_argv()
    report = setting.folder / "tests.xml"
    report.unlink(missing_ok=True)
    paths = (
        ["tests/triton/test_rms_norm.py"] if setting.rehearse else ["tests/triton", "tests/cuda"]
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.gpu.tests",
        f"--junitxml={report}",
    ]
    command += [path for path in paths if (CHECKOUT / path).exists()]
    if not setting.rehearse:
        command += ["-n", str(WORKERS), "--dist", "loadfile"]
        command += ["--ignore=tests/triton/test_compile_table.py"]  # needs no GPU
    passed = setting.folder / "tests.passed"
    passed.touch()
    environment = {**os.environ, PASSED: str(passed.resolve())}
    code = subprocess.run(command, cwd=CHECKOUT, env=environment, check=False).returncode
    if code == 5 and passed.read_text():  # no test is left
        code = 0
    if not report.exists():
        print("pytest wrote no report")
        return 1
    suite = ElementTree.parse(report).getroot().find("testsuite")
    failed = [
        {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "why": fault.get("message", "")[:300],
        }
        for case in suite.iter("testcase")
        for fault in (*case.findall("failure"), *case.findall("error"))
    ]
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    counts["passed"] = len(passed.read_text().splitlines())
    write_json(setting.folder / "tests.json", {**counts, "failed": failed})
    print(counts)
    return code


if __name__ == "__main__":
    sys.exit(main())
