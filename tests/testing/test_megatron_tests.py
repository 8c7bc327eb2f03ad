"""The runner of Megatron's own tests: what counts as what, on results made by hand."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.testing import megatron_tests
from accel.testing.known_failures import without_folders
from accel.testing.megatron_report import (
    WORLD_SIZE,
    FileResult,
    overview,
    report,
    unexpected,
    update,
)

FILE = "transformer/test_x.py"
KNOWN = [{"reason": "needs FP8", "tests": ["*fp8*"]}]


def result(ended: str = "", **outcomes: str) -> FileResult:
    reasons = {test: "why" for test, outcome in outcomes.items() if outcome != "passed"}
    return FileResult(FILE, "c0ffee", 1.0, outcomes, reasons, ended)


def collected(
    folder: Path,
    ranks: list[dict[str, str]],
    ended: str = "",
    stopped_rank: int | None = None,
    reason: str = "why",
) -> tuple[FileResult, bool]:
    """What `_collect` makes of one dict, test -> outcome, for each rank."""
    for rank, outcomes in enumerate(ranks):
        rows = (
            {"test": f"{FILE}::{t}", "outcome": o, "reason": reason} for t, o in outcomes.items()
        )
        (folder / f"file.{rank}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = FileResult(FILE, None, 1.0)
    return found, megatron_tests._collect(found, folder / "file", ended, stopped_rank)


def test_the_worst_rank_counts(tmp_path: Path) -> None:
    ranks = [{"a": "passed", "b": "skipped", "c": "skipped"} for _ in range(WORLD_SIZE)]
    ranks[3] = {"a": "failed", "b": "passed", "c": "skipped"}
    found, _ = collected(tmp_path, ranks)
    assert found.outcomes == {"a": "failed", "b": "passed", "c": "skipped"}


def test_the_test_that_stopped_a_rank_has_failed_and_those_behind_it_are_open(
    tmp_path: Path,
) -> None:
    ranks = [{"a": "passed", "b": "passed", "c": "started"} for _ in range(WORLD_SIZE)]
    ranks[0] = {"a": "passed", "b": "started"}
    found, stopped = collected(tmp_path, ranks, ended="a rank's test took too long")
    assert found.outcomes == {"a": "passed", "b": "failed"}
    assert found.reasons["b"] == "a rank's test took too long"
    assert stopped


def test_a_rank_that_is_slow_when_another_stops_has_not_failed(tmp_path: Path) -> None:
    ranks = [{"a": "passed", "b": "started"} for _ in range(WORLD_SIZE)]
    ranks[0] = {"a": "started"}
    found, stopped = collected(tmp_path, ranks, ended="a rank ended early", stopped_rank=3)
    assert found.outcomes == {"b": "failed"}
    assert stopped
    ranks[1] = {"a": "failed", "b": "started"}  # that one has
    found, _ = collected(tmp_path, ranks, ended="a rank ended early", stopped_rank=3)
    assert found.outcomes == {"a": "failed", "b": "failed"}


def test_ranks_that_are_apart_begin_anew(tmp_path: Path) -> None:
    ranks = [{"a": "passed", "b": "started"} for _ in range(WORLD_SIZE)]
    ranks[0] = {"a": "failed", "b": "started"}
    found, again = collected(tmp_path, ranks, ended=megatron_tests.APART, stopped_rank=3)
    assert found.outcomes == {"a": "failed"}
    assert again
    collected_again, again = collected(
        tmp_path, [{"b": "started"}] * WORLD_SIZE, ended=megatron_tests.APART, stopped_rank=3
    )
    assert collected_again.outcomes == {"b": "failed"}  # first of its run: its own doing
    assert again


def test_a_file_whose_time_is_over_says_what_is_left(tmp_path: Path) -> None:
    ranks = [{"": "collected", "a": "passed", "b": "started"} for _ in range(WORLD_SIZE)]
    found, _ = collected(tmp_path, ranks, ended=megatron_tests.TIME_IS_OVER, reason="3")
    assert (found.outcomes, found.collected) == ({"a": "passed"}, 3)
    megatron_tests._end(found, megatron_tests.TIME_IS_OVER)
    assert found.outcomes == {"a": "passed", "(the file)": "failed"}
    assert found.reasons == {"(the file)": "the file's time is over, 2 of 3 tests are left"}


RUN_A_FILE = """
import argparse, json, pathlib, sys
from accel.testing import megatron_tests
checkout = pathlib.Path(sys.argv[1])
limits = argparse.Namespace(
    file_seconds=800, test_seconds=300, plain=True, tests_per_launch=int(sys.argv[2])
)
file = checkout / "tests" / "unit_tests" / "test_x.py"
megatron_tests._prepare(plain=True)
result = megatron_tests.run_file(checkout, file, checkout / "results", limits)
assert result.collected == 4
print(json.dumps(result.outcomes))
"""


def run_a_file(checkout: Path, text: str, tests_per_launch: int = 100) -> dict[str, str]:
    """What becomes of the four tests of a file, in a checkout that asks for -x, as 0.17.1 does."""
    folder = checkout / "tests" / "unit_tests"
    folder.mkdir(parents=True)
    (folder / "test_x.py").write_text(text)
    (checkout / "pytest.ini").write_text("[pytest]\naddopts = -x\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN_A_FILE, str(checkout), str(tests_per_launch)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ranks_are_new_after_so_many_tests(tmp_path: Path) -> None:
    text = "there = []\ndef leave(): there.append(1); assert len(there) <= 2\n"
    text += "".join(f"def test_{name}(): leave()\n" for name in "abcd")
    assert run_a_file(tmp_path, text, tests_per_launch=2) == {
        f"test_{name}": "passed" for name in "abcd"
    }


def test_a_file_goes_on_behind_a_test_that_ends_a_rank(tmp_path: Path) -> None:
    ends = "def test_b():\n    if os.environ['RANK'] == '3': os._exit(1)\n    time.sleep(100)"
    text = (
        "import os, time\nfrom accel.session import SESSION\ndef test_a(): pass\n"
        f"{ends}\ndef test_c(): SESSION.disable(); assert 0\ndef test_d(): assert SESSION.device\n"
    )
    expected = {"test_a": "passed", "test_b": "failed", "test_c": "failed", "test_d": "passed"}
    assert run_a_file(tmp_path, text) == expected


def test_a_file_that_leaves_tests_out_has_failed(tmp_path: Path) -> None:
    leaves = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('enough', 0)\n"
    outcomes = run_a_file(tmp_path, f"{leaves}def test_c(): pass\ndef test_d(): pass\n")
    assert outcomes.pop("(the file)") == "failed"
    assert outcomes == {"test_a": "passed"}


def test_failures_must_be_known_and_known_ones_must_fail() -> None:
    found = [result(plain="passed", fp8_fails="failed", fp8_skips="skipped")]
    assert unexpected(found, KNOWN) == []
    lines = unexpected([result(new="failed", fp8_works="passed")], KNOWN)
    assert lines == [
        f"failed: {FILE}::new: why",
        f"passed, but is listed (needs FP8): {FILE}::fp8_works",
    ]


def test_what_fails_sometimes_may_do_both() -> None:
    known = [{"reason": "takes all memory", "tests": ["*large"], "sometimes": True}]
    assert unexpected([result(large="failed")], known) == []
    assert unexpected([result(large="passed")], known) == []


def test_the_report_counts_what_ran() -> None:
    not_run = [{"reason": "too large", "files": ["x.py"]}]
    notes = [{"text": "Of a quiet day."}]
    known = {"failure": KNOWN, "beyond": ["needs FP8"], "not_run": not_run, "note": notes}
    found = [result(a="passed", b="passed", fp8="failed", c="skipped")]
    before = [result(a="passed", b="failed")]
    before[0].ended, before[0].collected = megatron_tests.TIME_IS_OVER, 4
    rows: dict[str, dict] = {}
    update(rows, found, before)
    text = report(rows, known, 3, "0.18.2")
    assert (
        "**2 passed, 1 failed, 1 skipped** in 1 of 3 files: 66.7% of the tests that ran, 100.0%"
        in text
    )
    assert text.startswith("<!-- ")
    assert "# Megatron-LM 0.18.2's own unit tests" in text
    assert "| needs FP8 | 1 |" in text
    assert "| x.py | too large |" in text
    assert (
        "Before, with the CPU redirect alone: 1 passed, 1 failed, 0 skipped in 1 files, which now have "
        "2 passed, 1 failed, 1 skipped; a file that cannot be collected is one failure, and 2 tests had no "
        "time then." in text
    )
    assert "\n\nOf a quiet day.\n\n" in text
    assert f"| {FILE} | 1 | 2 | 1 | 1 | why | c0ffee |" in text


EXPECTED = """
beyond = ["needs FP8"]
not_run = []
[[failure]]
reason = "needs FP8"
megatron = ">=0.18"
tests = ["*fp8*"]
"""


def test_the_overview_has_a_row_for_each_version(tmp_path: Path) -> None:
    expected = tmp_path / "expected.toml"
    expected.write_text(EXPECTED)
    rows: dict[str, dict] = {}
    update(rows, [result(a="passed", fp8="failed")], [])
    for version in ("0.9.1", "0.18.2"):
        (tmp_path / f"{version}.json").write_text(json.dumps(rows))
    lines = overview(tmp_path, expected).splitlines()
    assert lines[-2:] == [
        f"| [0.18.2]({tmp_path.name}/0.18.2.md) | 1 | 1 | 1 | 0 | 50.0% | 100.0% |",
        f"| [0.9.1]({tmp_path.name}/0.9.1.md) | 1 | 1 | 1 | 0 | 50.0% | 50.0% |",
    ]


def test_a_row_stays_until_its_file_is_run_again() -> None:
    rows: dict[str, dict] = {}
    update(rows, [result(a="failed", b="passed")], [])
    rows["other.py"] = dict(rows[FILE])
    update(rows, [result(a="passed")], [])
    assert rows["other.py"]["failures"] == {"a": "why"}
    assert rows[FILE] == {
        "passed": 1,
        "failed": 0,
        "skipped": 0,
        "commit": "c0ffee",
        "seconds": 1,
        "failures": {},
    }
    rows["old.py"] = {"passed": 1, "failed": 2, "skipped": 0, "commit": "abc", "first": "why then"}
    text = report(rows, {"failure": [], "beyond": [], "not_run": []}, 9, "0.18.2")
    assert "**3 passed, 3 failed, 0 skipped** in 3 of 9 files" in text
    assert "| recorded by number alone, in an earlier run | 2 |" in text
    assert "| old.py |  | 1 | 2 | 0 | why then | abc |" in text


def test_a_reason_names_no_folder_of_the_machine() -> None:
    text = "No such file: '/tmp/x-1/a/ckpt.pt' (/usr/lib/x.py:3), 3/4 of b/c.py"
    assert without_folders(text) == "No such file: 'ckpt.pt' (x.py:3), 3/4 of b/c.py"


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
        limits = SimpleNamespace(keep=False)
        found = megatron_tests.run_or_read(tmp_path, file, tmp_path, limits)
        assert (len(runs), found.commit) == (expected, commit)
    limits = SimpleNamespace(keep=True)
    found = megatron_tests.run_or_read(tmp_path, file, tmp_path, limits)
    assert (len(runs), found.commit) == (4, "two-dirty")


def test_a_folder_that_is_no_checkout_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no tests/unit_tests; give MEGATRON="):
        megatron_tests.find_files(tmp_path)


def test_files_that_failed_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "tests" / "unit_tests" / "fusions"
    tests.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (tests / f"test_{name}.py").touch()
    (tests.parent / "test_d.py").touch()
    kept = {"passed": 1, "failed": 0, "skipped": 0, "commit": "old", "failures": {}}
    failed = {**kept, "failed": 1, "failures": {"d": "why"}}
    rows = {"fusions/test_a.py": kept, "fusions/test_b.py": failed, "fusions/test_c.py": failed}
    version = importlib.import_module("megatron.core").__version__.partition("+")[0]
    record = tmp_path / "report" / f"{version}.json"
    record.parent.mkdir()
    record.write_text(json.dumps(rows))

    def run_file(checkout: Path, file: Path, *_: object) -> FileResult:
        return FileResult(str(file.relative_to(tests.parent)), "new", 1.0, {"d": "passed"})

    monkeypatch.setattr(megatron_tests, "run_file", run_file)
    monkeypatch.setattr(megatron_tests, "_prepare", lambda plain: None)
    monkeypatch.setattr("sys.path", list(sys.path))
    args = [str(tmp_path), "--results", str(tmp_path / "kept"), "--report", f"{tmp_path}/report.md"]
    monkeypatch.setattr("sys.argv", ["megatron_tests", *args, "--only", "_b"])
    assert megatron_tests.main() == 0
    rows = json.loads(record.read_text())
    assert [row["failed"] for row in rows.values()] == [0, 0, 1], "rows of other files stay"
    monkeypatch.setattr("sys.argv", ["megatron_tests", *args, "--only", "typo"])
    with pytest.raises(SystemExit, match="2"):
        megatron_tests.main()
    monkeypatch.setattr("sys.argv", ["megatron_tests", *args])
    capsys.readouterr()
    assert megatron_tests.main() == 0
    ran = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert ran == ["fusions/test_c.py", "fusions/test_a.py", "fusions/test_b.py", "test_d.py"]
    assert "| 4 | 4 | 0 | 0 | 100.0% | 100.0% |" in (tmp_path / "report.md").read_text()
