"""Runs Megatron-LM's unit tests on the CPU with accel on top, and writes what became of each.

    python -m accel.testing.megatron_tests CHECKOUT [--only SUBSTRING] [--results FOLDER]

CHECKOUT is a clone of Megatron-LM at a supported version; its own `megatron` is what is tested. Each test
file runs on 8 gloo ranks, forked from one process that has imported torch and Megatron already, and has
`--file-seconds`; a test has `--test-seconds`. A test counts as failed if it fails on any rank, as skipped if
no rank ran it, as passed if it passed wherever it ran; what a killed file left unfinished counts as failed.

What became of each file, and what its ranks printed, is kept in the folder of `--results`. A file that was
run with the very same commit of accel is not run again: so a long run can be resumed, and the report
(`--report`) is written from all of them.

`tests/megatron_expected.toml` names the failures that are known, with the reason of each; the exit status
is 1 if a test fails that is not there, or one that is there passes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import importlib
import json
import os
import signal
import socket
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accel.testing import bench
from accel.testing.megatron_plugin import RESULTS

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "tests" / "megatron_expected.toml"
FOLDERS = (
    "tensor_parallel",
    "fusions",
    "transformer",
    "models",
    "pipeline_parallel",
    "distributed",
    "dist_checkpointing",
    "optimizer",
)
WORLD_SIZE = 8
OUTCOMES = ("passed", "failed", "skipped")


@dataclass
class FileResult:
    """What became of the tests of one file."""

    name: str
    commit: str | None
    """Of accel; "-dirty" where files differed from it."""
    seconds: float
    outcomes: dict[str, str] = field(default_factory=dict)
    """Test -> `passed`, `failed` or `skipped`."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Test that did not pass -> why."""
    ended: str = ""
    """Why it did not end by itself, if so."""

    def count(self, outcome: str) -> int:
        return sum(value == outcome for value in self.outcomes.values())


def find_files(checkout: Path, only: str) -> list[Path]:
    unit_tests = checkout / "tests" / "unit_tests"
    if not unit_tests.is_dir():
        raise SystemExit(
            f"make test-megatron: {checkout} has no tests/unit_tests; "
            "give MEGATRON=<a clone of Megatron-LM>"
        )
    files = [f for folder in FOLDERS for f in sorted((unit_tests / folder).rglob("test_*.py"))]
    return [f for f in files if only in str(f.relative_to(unit_tests))]


def run_or_read(checkout: Path, file: Path, folder: Path, limits: argparse.Namespace) -> FileResult:
    """What `folder` holds of this file at this commit; else run it."""
    name = str(file.relative_to(checkout / "tests" / "unit_tests"))
    kept, commit = folder / f"{name.replace('/', '.')}.json", bench.commit()
    if kept.exists() and not (commit or "-dirty").endswith("-dirty"):
        result = FileResult(**json.loads(kept.read_text()))
        if result.commit == commit:
            return result
    result = run_file(checkout, file, kept.with_suffix(""), limits)
    result.commit = commit
    kept.write_text(json.dumps(asdict(result), indent=1))
    return result


def run_file(checkout: Path, file: Path, results: Path, limits: argparse.Namespace) -> FileResult:
    """Fork the ranks, wait for them or kill them, and put their outcomes together."""
    name = str(file.relative_to(checkout / "tests" / "unit_tests"))
    for old in results.parent.glob(f"{results.name}.[0-7]"):
        old.unlink()
    port = _free_port()
    start = time.monotonic()
    children = [
        _fork_rank(rank, port, checkout, file, results, limits) for rank in range(WORLD_SIZE)
    ]
    waiting = set(children)
    ended = ""
    while waiting:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.discard(pid)
                if os.WIFSIGNALED(status):
                    ended = ended or f"a rank died of signal {os.WTERMSIG(status)}"
        late = time.monotonic() - start > limits.file_seconds
        if waiting and (late or ended):
            ended = ended or f"not done after {limits.file_seconds} s"
            for pid in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
        time.sleep(0.05)
    result = FileResult(name, None, time.monotonic() - start, ended=ended)
    _collect(result, results)
    return result


def _fork_rank(
    rank: int, port: int, checkout: Path, file: Path, results: Path, limits: argparse.Namespace
) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **{RESULTS: str(results)},
    )
    with open(f"{results}.log.{rank}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(checkout)
    import pytest

    status = 3
    try:
        status = pytest.main(
            [
                str(file),
                f"--timeout={limits.test_seconds}",
                *("-p", "accel.testing.megatron_plugin"),
                *("-p", "no:cacheprovider", "-q", "--tb=short"),
            ],
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))


def _collect(result: FileResult, results: Path) -> None:
    """Worst outcome over the ranks; a test that some rank never finished has failed."""
    started = collections.Counter[str]()
    for rank in range(WORLD_SIZE):
        path = Path(f"{results}.{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        seen = set()
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed rank
                row = json.loads(line)
                test = row["test"].partition("::")[2] or "(the file)"
                seen.add(test)
                _worse(result, test, row["outcome"], row["reason"])
        started.update(seen)
    if result.ended:
        for test, ranks in started.items():
            if ranks < WORLD_SIZE and result.outcomes[test] == "passed":
                _worse(result, test, "failed", result.ended)
        _worse(result, "(the file)", "failed", result.ended)


def _worse(result: FileResult, test: str, outcome: str, reason: str) -> None:
    order = ("skipped", "passed", "failed")
    if order.index(outcome) >= order.index(result.outcomes.get(test, "skipped")):
        result.outcomes[test] = outcome
        if outcome != "passed":
            result.reasons.setdefault(test, reason)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-megatron")
    parser.add_argument("checkout", type=Path, help="a clone of Megatron-LM at a supported version")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--results", type=Path, default=ROOT / ".cache" / "megatron-tests")
    parser.add_argument("--report", type=Path, help="write the tables there, in Markdown")
    parser.add_argument("--file-seconds", type=int, default=300)
    parser.add_argument("--test-seconds", type=int, default=60)
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    files = find_files(checkout, args.only)
    sys.path.insert(0, str(checkout))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _import_once()
    args.results.mkdir(parents=True, exist_ok=True)
    found = []
    for file in files:
        result = run_or_read(checkout, file, args.results.resolve(), args)
        found.append(result)
        counts = " ".join(f"{outcome} {result.count(outcome):4}" for outcome in OUTCOMES)
        print(f"{result.name:70} {counts} {result.seconds:5.0f} s {result.ended}", flush=True)
    known = tomllib.loads(EXPECTED.read_text())["failure"]
    if args.report:
        args.report.write_text(report(found, known))
    wrong = unexpected(found, known)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def expected_reason(file: str, test: str, known: list[dict]) -> str | None:
    """Why this test is known to fail; None if it is not."""
    name = f"{file}::{test}"
    matching = (e["reason"] for e in known if any(fnmatch.fnmatchcase(name, p) for p in e["tests"]))
    return next(matching, None)


def unexpected(found: list[FileResult], known: list[dict]) -> list[str]:
    """A line for each test that failed without being known to, or passed although it was."""
    lines = []
    for result in found:
        for test, outcome in result.outcomes.items():
            reason = expected_reason(result.name, test, known)
            if outcome == "failed" and reason is None:
                lines.append(f"failed: {result.name}::{test}: {result.reasons[test]}")
            elif outcome == "passed" and reason is not None:
                lines.append(f"passed, but is listed ({reason}): {result.name}::{test}")
    return lines


def report(found: list[FileResult], known: list[dict]) -> str:
    """The page `docs/megatron-tests.md`."""
    version = importlib.import_module("megatron.core").__version__.partition("+")[0]
    totals = {outcome: sum(r.count(outcome) for r in found) for outcome in OUTCOMES}
    ran = totals["passed"] + totals["failed"]
    causes = collections.Counter(
        expected_reason(r.name, test, known) or "not listed"
        for r in found
        for test, outcome in r.outcomes.items()
        if outcome == "failed"
    )
    lines = [
        "<!-- Written by `make test-megatron MEGATRON=<checkout>`. -->",
        "",
        "# Megatron-LM's own unit tests",
        "",
        f"Megatron-LM {version}, {WORLD_SIZE} gloo ranks on the CPU, "
        "accel on top (preset fast), without Transformer Engine and Apex.",
        "",
        f"**{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped** in "
        f"{len(found)} files: {totals['passed'] / max(1, ran):.1%} of the tests that ran.",
        "",
        "| why they fail | tests |",
        "|---|---|",
        *(f"| {reason} | {count} |" for reason, count in causes.most_common()),
        "",
        "| file | passed | failed | skipped | first reason |",
        "|---|---|---|---|---|",
    ]
    for r in found:
        failed = [r.reasons[test] for test, outcome in r.outcomes.items() if outcome == "failed"]
        first = failed[0].replace("|", "\\|")[:100] if failed else ""
        lines.append(
            f"| {r.name} | {r.count('passed')} | {r.count('failed')} | {r.count('skipped')} | {first} |"
        )
    return "\n".join(lines) + "\n"


def _import_once() -> None:
    """What every rank needs, before the ranks are forked: importing it takes longer than most tests."""
    import torch

    torch.set_num_threads(1)
    from accel.session import SESSION

    SESSION.attach("cpu")
    for name in ("megatron.core.models.gpt", "megatron.training"):
        importlib.import_module(name)


if __name__ == "__main__":
    raise SystemExit(main())
