"""pytest plugin of one rank: the import on top, no downloads, and each test's outcome into a file.

Rank r writes `<ACCEL_UPSTREAM_RESULTS>.r`, a JSON line for each test: its id, its outcome, and for what
did not pass the reason.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

RESULTS = "ACCEL_UPSTREAM_RESULTS"


def pytest_configure(config: pytest.Config) -> None:
    import accel
    from accel.device.cpu.audience import AUDIENCE

    AUDIENCE.add("tests")  # upstream's tests ask torch.cuda for devices, as Megatron does
    accel.enable(device="cpu")
    _forbid_downloads()


def _forbid_downloads() -> None:
    """Upstream's conftest fetches data for tests that are not run here; this is the function it asks."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module: Any = types.ModuleType(name)

    def refuse(**_: object) -> None:
        raise ImportError("no downloads in this run")

    module.download_and_extract_asset = refuse
    sys.modules[name] = module


class Recorder:
    def __init__(self, path: Path) -> None:
        self.file = path.open("w", buffering=1)

    def write(self, test: str, outcome: str, reason: str) -> None:
        self.file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", _reason(report))
        elif report.skipped:
            self.write(report.nodeid, "skipped", _reason(report))
        elif report.when == "call":
            self.write(report.nodeid, "passed", "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", "at collection: " + _reason(report))
        elif report.skipped:
            self.write(report.nodeid, "skipped", _reason(report))


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:200]


def pytest_sessionstart(session: pytest.Session) -> None:
    rank = os.environ["RANK"]
    recorder = Recorder(Path(f"{os.environ[RESULTS]}.{rank}"))
    session.config.pluginmanager.register(recorder, "accel-recorder")
