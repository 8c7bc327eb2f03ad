"""What became of Megatron-LM's unit tests, and the pages that say so."""

from __future__ import annotations

import collections
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from accel.testing import known_failures
from accel.testing.known_failures import without_folders

__all__ = [
    "FOLDERS",
    "OUTCOMES",
    "WORLD_SIZE",
    "Counts",
    "FileResult",
    "expected_reason",
    "overview",
    "report",
    "unexpected",
    "update",
    "why_not_run",
]

FOLDERS = (
    "tensor_parallel",
    "fusions",
    "transformer",
    "models",
    "pipeline_parallel",
    "distributed",
    "dist_checkpointing",
    "optimizer",
    "ssm",
    "a2a_overlap",
)
"""Of these, with what is in them; of `tests/unit_tests` itself the files."""
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
    collected: int = 0
    """Tests in it."""

    def count(self, outcome: str) -> int:
        return sum(value == outcome for value in self.outcomes.values())


def expected_reason(file: str, test: str, known: list[dict]) -> str | None:
    """Why this test is known to fail; None if it is not."""
    entry = known_failures.entry(f"{file}::{test}", known)
    return entry["reason"] if entry else None


def why_not_run(file: str, known: dict[str, Any]) -> str | None:
    """Why this file is not run; None if it is."""
    return next((e["reason"] for e in known["not_run"] if file in e["files"]), None)


def unexpected(found: list[FileResult], known: list[dict]) -> list[str]:
    """A line for each test that failed without being known to, or passed although it was."""
    lines = []
    for result in found:
        for test, outcome in result.outcomes.items():
            name = f"{result.name}::{test}"
            entry = known_failures.entry(name, known)
            if outcome == "failed" and entry is None:
                lines.append(f"failed: {name}: {result.reasons[test]}")
            elif outcome == "passed" and entry and not entry.get("sometimes"):
                lines.append(f"passed, but is listed ({entry['reason']}): {name}")
    return lines


def update(rows: dict[str, dict], found: list[FileResult], plain: list[FileResult]) -> None:
    """Put what was run into `rows`: file -> its counts, the reason of each failure, the commit, and under
    `before` the counts of `--plain`."""
    for result in found:
        failures = {
            t: without_folders(result.reasons[t])
            for t, o in result.outcomes.items()
            if o == "failed"
        }
        before = {k: v for k, v in rows.get(result.name, {}).items() if k == "before"}
        counts = {o: result.count(o) for o in OUTCOMES}
        rows[result.name] = {
            **counts,
            "commit": result.commit,
            "seconds": round(result.seconds),
            "failures": failures,
            **before,
        }
    for result in plain:
        counts = {o: result.count(o) for o in OUTCOMES}
        left = result.collected - sum(test != "(the file)" for test in result.outcomes)
        rows.setdefault(result.name, {})["before"] = {**counts, "left": left if result.ended else 0}


@dataclass(frozen=True)
class Counts:
    """What a version's rows add up to."""

    rows: dict[str, dict]
    known: dict[str, Any]

    @property
    def ran(self) -> list[dict]:
        return [row for row in self.rows.values() if "passed" in row]

    @property
    def totals(self) -> tuple[int, int, int]:
        """Tests that passed, failed, were skipped."""
        passed, failed, skipped = (sum(row[o] for row in self.ran) for o in OUTCOMES)
        return passed, failed, skipped

    @property
    def causes(self) -> collections.Counter[str]:
        """Reason -> tests that fail for it."""
        causes = collections.Counter(
            expected_reason(name, test, self.known["failure"]) or "not listed"
            for name, row in self.rows.items()
            for test in row.get("failures", ())
        )
        if unnamed := self.totals[1] - causes.total():
            causes["recorded by number alone, in an earlier run"] = unnamed
        return causes

    @property
    def share(self) -> float:
        """Of the tests that ran, those that passed."""
        passed, failed, _ = self.totals
        return passed / max(1, passed + failed)

    @property
    def servable_share(self) -> float:
        """The same, without those that need what is `beyond`."""
        beyond = tuple(self.known["beyond"])
        out = sum(count for reason, count in self.causes.items() if reason.startswith(beyond))
        passed, failed, _ = self.totals
        return passed / max(1, passed + failed - out)


def overview(folder: Path, expected: Path) -> str:
    """The page `docs/megatron-tests.md`: a row for each version that has a record in `folder`.

    Args:
        expected: names the failures that are known.
    """
    records = {Version(path.stem): path for path in folder.glob("*.json")}
    beyond = "; ".join(tomllib.loads(expected.read_text())["beyond"])
    lines = [
        "<!-- Written by `make test-megatron MEGATRON=<checkout>`. -->",
        "",
        "# Megatron-LM's own unit tests",
        "",
        f"On {WORLD_SIZE} gloo ranks of a CPU, accel on top (preset fast), without Transformer Engine "
        f"and Apex: {', '.join(FOLDERS)}, and the files beside these folders. The last column "
        f"leaves out the tests that fail for one of these reasons: {beyond}. A version's page has every "
        "file, and why tests fail.",
        "",
        "| Megatron-LM | files | passed | failed | skipped | passed of what ran | without these |",
        "|---|---|---|---|---|---|---|",
    ]
    for version, path in sorted(records.items(), reverse=True):
        of = Counts(json.loads(path.read_text()), known_failures.of(expected, str(version)))
        totals = " | ".join(map(str, of.totals))
        page = f"[{version}]({folder.name}/{version}.md)"
        lines.append(
            f"| {page} | {len(of.ran)} | {totals} | {of.share:.1%} | {of.servable_share:.1%} |"
        )
    return "\n".join(lines) + "\n"


def report(rows: dict[str, dict], known: dict[str, Any], num_files: int, version: str) -> str:
    """A version's page of `rows`, as `update` makes them, of `num_files` files."""
    of = Counts(rows, known)
    passed, failed, skipped = of.totals
    both = [row for row in of.ran if "before" in row]
    compared = "The column `passed before` is filled by `--plain`, which was not run."
    if both:
        counts = ", ".join(f"{sum(row['before'][o] for row in both)} {o}" for o in OUTCOMES)
        now = ", ".join(f"{sum(row[o] for row in both)} {o}" for o in OUTCOMES)
        # old rows do not say
        left = [row["before"]["left"] for row in both if "left" in row["before"]]
        cut = f", and {sum(left)} tests had no time then" if left else ""
        compared = (
            f"Before, with the CPU redirect alone: {counts} in {len(both)} files, which now have {now}; a "
            f"file that cannot be collected is one failure{cut}."
        )
    lines = [
        "<!-- Written by `make test-megatron MEGATRON=<checkout>`. -->",
        "",
        f"# Megatron-LM {version}'s own unit tests",
        "",
        f"On {WORLD_SIZE} gloo ranks on the CPU, "
        "accel on top (preset fast), without Transformer Engine and Apex.",
        "",
        f"**{passed} passed, {failed} failed, {skipped} skipped** in {len(of.ran)} of {num_files} files: "
        f"{of.share:.1%} of the tests that ran, {of.servable_share:.1%} of those that need none of: "
        f"{'; '.join(known['beyond'])}.",
        "",
        compared,
        "",
        *(line for entry in known.get("note", ()) for line in (entry["text"], "")),
        "Test files that import `transformer_engine` themselves, or ask for its version, are shown accel's "
        "layers by the runner, and those that look for `fla` an empty package; outside of these tests both "
        "imports fail as before.",
        "",
        "| why they fail | tests |",
        "|---|---|",
        *(f"| {reason} | {count} |" for reason, count in of.causes.most_common()),
        "",
        "| not run | why |",
        "|---|---|",
        *(f"| {file} | {e['reason']} |" for e in known["not_run"] for file in e["files"]),
        "",
        "| file | passed before | passed | failed | skipped | first reason | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        was = row["before"]["passed"] if "before" in row else ""
        counts = " | ".join(str(row.get(outcome, "")) for outcome in OUTCOMES)
        failures = row.get("failures", {})
        first = next(iter(failures.values()), row.get("first", "")).replace("|", "\\|")[:100]
        commit, _, dirty = (row.get("commit") or "").partition("-")
        lines.append(
            f"| {name} | {was} | {counts} | {first} | {commit[:7]}{dirty and '-' + dirty} |"
        )
    return "\n".join(lines) + "\n"
