"""Runs Megatron-LM's unit tests on the CPU with accel on top, and writes what became of each.

    python -m accel.testing.megatron_tests CHECKOUT [--only SUBSTRING] [--results FOLDER]

CHECKOUT is a clone of Megatron-LM at a supported version; its own `megatron` is what is tested. Each test
file runs on 8 gloo ranks, forked from one process that has imported torch and Megatron already, and has
`--file-seconds`; a test has `--test-seconds`. After `--tests-per-launch` tests the ranks are new ones: the
process groups that tests leave behind come to thousands of threads. A test counts as failed if it fails on
any rank, as skipped if no rank ran it, as passed if it passed wherever it ran, as failed if it stopped a
rank; a file whose time is over is one failure, which says how many of its tests are left.

What became of each file, and what its ranks printed, is kept in the folder of `--results`, for each version
of Megatron. A file that was run with the very same commit of accel is not run again: so a long run can be
resumed. `--report PAGE.md` writes an overview of the versions, and a page for each into the folder `PAGE`,
with a row for each file that was run; the rows it had of other files stay, in a record beside it
(`<version>.json`). Files that had failures there are run first. `--plain` runs them with nothing but the CPU
redirect, and keeps the results in a folder of their own: the report's column `before`.

`tests/megatron_expected.toml` names the failures that are known, with the reason of each; the exit status
is 1 if a test fails that is not there, or one that is there passes; `sometimes` allows both.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel.testing import bench, known_failures, megatron_plugin
from accel.testing.distributed import free_port
from accel.testing.megatron_arguments import read_docstrings_once
from accel.testing.megatron_plugin import MOST, RESULTS
from accel.testing.megatron_report import (
    FOLDERS,
    OUTCOMES,
    WORLD_SIZE,
    FileResult,
    overview,
    report,
    unexpected,
    update,
    why_not_run,
)
from accel.testing.ranks import wait_for

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "tests" / "megatron_expected.toml"
CONTAINER = "26.01"
"""Of NVIDIA's containers, for tests that are skipped in those of before summer 2025, and without any."""
APART = "the ranks met in different collectives"
TIME_IS_OVER = "the file's time is over"


def find_files(checkout: Path) -> dict[Path, str]:
    """The test files, and how the report calls them."""
    unit_tests = checkout / "tests" / "unit_tests"
    if not unit_tests.is_dir():
        raise SystemExit(
            f"make test-megatron: {checkout} has no tests/unit_tests; "
            "give MEGATRON=<a clone of Megatron-LM>"
        )
    files = [f for folder in FOLDERS for f in sorted((unit_tests / folder).rglob("test_*.py"))]
    files += sorted(unit_tests.glob("test_*.py"))
    return {file: str(file.relative_to(unit_tests)) for file in files}


def kept_at(checkout: Path, file: Path, folder: Path) -> Path:
    """Where the results of a file are kept."""
    name = str(file.relative_to(checkout / "tests" / "unit_tests"))
    return folder / f"{name.replace('/', '.')}.json"


def read(kept: Path) -> FileResult | None:
    """The results that are kept there, if there are."""
    return FileResult(**json.loads(kept.read_text())) if kept.exists() else None


def run_or_read(checkout: Path, file: Path, folder: Path, limits: Namespace) -> FileResult:
    """What `folder` holds of this file at this commit; else run it."""
    kept, commit = kept_at(checkout, file, folder), bench.commit()
    if result := read(kept):
        same = result.commit == commit and not (commit or "-dirty").endswith("-dirty")
        if same or limits.keep:
            return result
    result = run_file(checkout, file, kept.with_suffix(""), limits)
    result.commit = commit
    kept.write_text(json.dumps(asdict(result), indent=1))
    return result


def run_file(checkout: Path, file: Path, results: Path, limits: Namespace) -> FileResult:
    """Run the tests of one file; go on with new ranks after a test that stops one, or after so many."""
    result = FileResult(str(file.relative_to(checkout / "tests" / "unit_tests")), None, 0.0)
    for old in results.parent.glob(f"{results.name}.log.*"):
        old.unlink()
    start = time.monotonic()
    deadline = start + limits.file_seconds
    while True:
        Path(f"{results}.done").write_text(json.dumps(list(result.outcomes)))
        for old in results.parent.glob(f"{results.name}.[0-7]"):
            old.unlink()
        port = free_port("127.0.0.1")
        ranks = [
            _fork_rank(rank, port, checkout, file, results, limits) for rank in range(WORLD_SIZE)
        ]
        ended, stopped_rank = _wait(ranks, deadline)
        known = len(result.outcomes)
        stopped = _collect(result, results, ended, stopped_rank)
        as_many_as_asked = not ended and result.collected > len(result.outcomes) > known
        if not (stopped or as_many_as_asked) or time.monotonic() > deadline:
            break
    if ended:
        _end(result, ended)
    elif result.collected > len(result.outcomes):
        _end(result, "the ranks ended early")
    result.seconds = time.monotonic() - start
    return result


def _end(result: FileResult, why: str) -> None:
    """The file did not end by itself: it has failed, and says what is left."""
    left = result.collected - len(result.outcomes)
    result.ended = f"{why}, {left} of {result.collected} tests are left"
    _worse(result, "(the file)", "failed", result.ended)


def _wait(ranks: list[int], deadline: float) -> tuple[str, int | None]:
    """Wait until all ranks are done, one is stopped, or the time is over. Why they ended, and the rank that
    was stopped first."""
    stopped_rank, status = wait_for(ranks, deadline)
    if status is None:
        return TIME_IS_OVER, None
    return _why_stopped(status) if status else "", stopped_rank


def _why_stopped(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"a rank died of {signal.Signals(os.WTERMSIG(status)).name}"
    if os.WEXITSTATUS(status) == megatron_plugin.APART:
        return APART
    return "a rank's test took too long" if os.WEXITSTATUS(status) == 1 else "a rank ended early"


def _fork_rank(
    rank: int, port: int, checkout: Path, file: Path, results: Path, limits: Namespace
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
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        NVIDIA_PYTORCH_VERSION=CONTAINER,
        **{RESULTS: str(results), MOST: str(limits.tests_per_launch)},
    )
    with open(f"{results}.log.{rank}", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(checkout)
    import pytest

    for package in ("tests", file.stem):  # the latter in folders that are no packages
        megatron_plugin.show_device_to(package)
        if not limits.plain:
            megatron_plugin.show_layers_to(package)
    status: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        status = pytest.main(
            [
                str(file),
                *(word for plugin in _plugins() for word in ("-p", plugin)),
                # the thread ends the process with status 1: a rank that waits in C++ hears no signal
                *(f"--timeout={limits.test_seconds}", "--timeout-method=thread"),
                *("-p", "no:cacheprovider", "-q", "--tb=short", "--durations=15"),
                "--maxfail=0",  # 0.17.1 asks for -x
            ],
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # what cannot be collected is in the results already
        stopped = status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
        os._exit(3 if stopped else 0)


def _plugins() -> list[str]:
    """Those that are there under `make test-megatron` only, if they are."""
    plugins = {"pytest_asyncio": "pytest_asyncio.plugin", "pytest_mock": "pytest_mock"}
    there = [plugin for package, plugin in plugins.items() if importlib.util.find_spec(package)]
    return ["pytest_timeout", *there, megatron_plugin.__name__]


def _collect(result: FileResult, results: Path, ended: str, stopped_rank: int | None) -> bool:
    """Put the ranks' outcomes together: the worst counts. If the run was `ended`, the test that the stopped
    rank was in has failed (without such a rank, the first that not all ranks finished; none if the file's
    time is over), and what only some ranks have passed counts for nothing yet. That ranks are `APART` is the
    doing of an earlier test of this run, if there was one. Whether tests are left to be run."""
    outcomes = collections.defaultdict[str, dict[int, tuple[str, str]]](dict)
    last: dict[int, str] = {}
    for rank in range(WORLD_SIZE):
        path = Path(f"{results}.{rank}")
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed rank
                row = json.loads(line)
                if row["outcome"] == "collected":
                    result.collected = result.collected or int(row["reason"])
                    continue
                last[rank] = row["test"]
                of_rank = outcomes[row["test"]]
                if row["outcome"] != "started":
                    of_rank[rank] = row["outcome"], row["reason"]
    unfinished = [name for name, of_rank in outcomes.items() if len(of_rank) < WORLD_SIZE]
    known = len(result.outcomes)
    for name, of_rank in outcomes.items():
        test = name.partition("::")[2] or "(the file)"
        passed_by_some = ended and name in unfinished and "failed" not in dict(of_rank.values())
        for outcome, reason in () if passed_by_some else of_rank.values():
            _worse(result, test, outcome, reason)
    by_an_earlier_test = ended == APART and len(result.outcomes) > known
    if ended and unfinished and ended != TIME_IS_OVER and not by_an_earlier_test:
        blamed = unfinished[0] if stopped_rank is None else last.get(stopped_rank, unfinished[0])
        _worse(result, blamed.partition("::")[2] or "(the file)", "failed", ended)
    return bool(ended and unfinished)


def _worse(result: FileResult, test: str, outcome: str, reason: str) -> None:
    order = ("skipped", "passed", "failed")
    if order.index(outcome) >= order.index(result.outcomes.get(test, "skipped")):
        result.outcomes[test] = outcome
        if outcome != "passed":
            result.reasons.setdefault(test, reason)


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.plain and args.report:
        parser.error("--plain has no report of its own: write it without --plain, after this run")
    checkout = args.checkout.resolve()
    names = find_files(checkout)
    sys.path.insert(0, str(checkout))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _prepare(plain=args.plain)
    version = importlib.import_module("megatron.core").__version__.partition("+")[0]
    results = args.results.resolve() / version
    before = results / "plain"
    folder = before if args.plain else results
    folder.mkdir(parents=True, exist_ok=True)
    known = known_failures.of(EXPECTED, version)
    page = args.report and args.report.with_suffix("") / f"{version}.md"
    record = page and page.with_suffix(".json")
    rows = json.loads(record.read_text()) if record and record.exists() else {}
    asked = [file for file in names if args.only in names[file]]
    if not asked:
        parser.error(f"--only {args.only}: no test file has that in its path")
    asked.sort(key=lambda file: not rows.get(names[file], {}).get("failed"))
    found = list(_results(checkout, {file: names[file] for file in asked}, folder, known, args))
    if args.no_run and not found:
        parser.error(f"--no-run: none of these files was run yet, there is no result in {folder}")
    if args.report:
        plain = [read(kept_at(checkout, file, before)) for file in names]
        update(rows, found, [r for r in plain if r])
        shown = [n for n in names.values() if n in rows and not why_not_run(n, known)]
        rows = {name: rows[name] for name in shown}
        page.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(rows, indent=1) + "\n")
        page.write_text(report(rows, known, len(names), version))
        args.report.write_text(overview(page.parent, EXPECTED))
    if args.plain:
        return 0
    wrong = unexpected(found, known["failure"])
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="make test-megatron")
    parser.add_argument("checkout", type=Path, help="a clone of Megatron-LM at a supported version")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--results", type=Path, default=ROOT / ".cache" / "megatron-tests")
    parser.add_argument("--report", type=Path, help="write the tables there, in Markdown")
    parser.add_argument(
        "--keep", action="store_true", help="run no file again that was run with an earlier commit"
    )
    parser.add_argument(
        "--no-run", action="store_true", help="only report on the files that were run already"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="with nothing but the CPU redirect: the column `before`",
    )
    parser.add_argument("--file-seconds", type=int, default=900)
    parser.add_argument("--test-seconds", type=int, default=240)
    parser.add_argument("--tests-per-launch", type=int, default=100)
    return parser


def _results(
    checkout: Path, names: dict[Path, str], folder: Path, known: dict[str, Any], args: Namespace
) -> Iterator[FileResult]:
    """Run these files, or read what became of them, and print a line for each."""
    for file, name in names.items():
        if reason := why_not_run(name, known):
            print(f"not run: {file.name}: {reason}", flush=True)
            continue
        if args.no_run:
            result = read(kept_at(checkout, file, folder))
        else:
            result = run_or_read(checkout, file, folder, args)
        if result is None:
            continue
        counts = " ".join(f"{outcome} {result.count(outcome):4}" for outcome in OUTCOMES)
        print(f"{result.name:70} {counts} {result.seconds:5.0f} s {result.ended}", flush=True)
        yield result


def _prepare(plain: bool) -> None:
    """What every rank needs, before the ranks are forked: it takes longer than most tests."""
    import torch

    import accel
    from accel.patches import FEATURES

    torch.set_num_threads(1)
    if plain:
        megatron_plugin.OPTIONS |= {"preset": "off"} | {f.name: False for f in FEATURES}
    accel.enable(**megatron_plugin.OPTIONS)
    for name in (
        "megatron.core.models.gpt",
        "megatron.core.models.T5",
        "megatron.core.models.bert",
        "megatron.core.models.common.embeddings.relative_pos_embedding",
        "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
        "megatron.training",
    ):
        importlib.import_module(name)
    megatron_plugin.forbid_downloads()
    megatron_plugin.have_no_flash_attention()
    megatron_plugin.reuse_groups()
    megatron_plugin.spawn_from_a_server()
    read_docstrings_once()
    importlib.import_module("megatron.training.arguments").add_megatron_arguments(ArgumentParser())


if __name__ == "__main__":
    raise SystemExit(main())
# a process that a test spawns, such as the one that writes checkpoints
if __name__ == "__mp_main__":
    importlib.import_module("accel.megatron_adaptor")
