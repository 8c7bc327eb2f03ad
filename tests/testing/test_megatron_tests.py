"""The runner of Megatron's own tests: what counts as what, on results made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.testing import megatron_tests
from accel.testing.megatron_tests import WORLD_SIZE, FileResult, report, unexpected

FILE = "transformer/test_x.py"
KNOWN = [{"reason": "needs FP8", "tests": ["*fp8*"]}]


def result(ended: str = "", **outcomes: str) -> FileResult:
    reasons = {test: "why" for test, outcome in outcomes.items() if outcome != "passed"}
    return FileResult(FILE, "c0ffee", 1.0, outcomes, reasons, ended)


def collected(folder: Path, ranks: list[dict[str, str]], ended: str = "") -> FileResult:
    """What `_collect` makes of one dict, test -> outcome, for each rank."""
    for rank, outcomes in enumerate(ranks):
        rows = (
            {"test": f"{FILE}::{t}", "outcome": o, "reason": "why"} for t, o in outcomes.items()
        )
        (folder / f"file.{rank}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = FileResult(FILE, None, 1.0, ended=ended)
    megatron_tests._collect(found, folder / "file")
    return found


def test_the_worst_rank_counts(tmp_path: Path) -> None:
    ranks = [{"a": "passed", "b": "skipped", "c": "skipped"} for _ in range(WORLD_SIZE)]
    ranks[3] = {"a": "failed", "b": "passed", "c": "skipped"}
    found = collected(tmp_path, ranks)
    assert found.outcomes == {"a": "failed", "b": "passed", "c": "skipped"}


def test_what_a_killed_file_left_unfinished_has_failed(tmp_path: Path) -> None:
    ranks = [{"a": "passed", "b": "passed"} for _ in range(WORLD_SIZE)]
    del ranks[0]["b"]
    found = collected(tmp_path, ranks, ended="not done after 1 s")
    assert found.outcomes == {"a": "passed", "b": "failed", "(the file)": "failed"}
    assert found.reasons["b"] == "not done after 1 s"


def test_failures_must_be_known_and_known_ones_must_fail() -> None:
    found = [result(plain="passed", fp8_fails="failed", fp8_skips="skipped")]
    assert unexpected(found, KNOWN) == []
    lines = unexpected([result(new="failed", fp8_works="passed")], KNOWN)
    assert lines == [
        f"failed: {FILE}::new: why",
        f"passed, but is listed (needs FP8): {FILE}::fp8_works",
    ]


def test_the_report_counts_what_ran() -> None:
    text = report([result(a="passed", b="passed", fp8="failed", c="skipped")], KNOWN)
    assert "**2 passed, 1 failed, 1 skipped** in 1 files: 66.7% of the tests that ran." in text
    assert "| needs FP8 | 1 |" in text
    assert f"| {FILE} | 2 | 1 | 1 | why |" in text


def test_results_of_another_commit_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def run_file(*_: object) -> FileResult:
        runs.append(1)
        return result(a="passed")

    monkeypatch.setattr(megatron_tests, "run_file", run_file)
    file = tmp_path / "tests" / "unit_tests" / FILE
    for commit, expected in (
        ("one", 1),
        ("one", 1),
        ("two", 2),
        ("two-dirty", 3),
        ("two-dirty", 4),
    ):
        monkeypatch.setattr(megatron_tests.bench, "commit", lambda commit=commit: commit)
        found = megatron_tests.run_or_read(tmp_path, file, tmp_path, SimpleNamespace())
        assert (len(runs), found.commit) == (expected, commit)


def test_a_folder_that_is_no_checkout_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no tests/unit_tests; give MEGATRON="):
        megatron_tests.find_files(tmp_path, "")
