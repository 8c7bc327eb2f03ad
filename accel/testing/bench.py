"""The benchmark runner behind `python -m accel bench NAME [--json] [--quick]`.

A benchmark is a file `benchmarks/NAME.py` of the checkout that yields `Case`s. For each case the
runner checks every side against the reference, warms all sides up, times them interleaved in one
process (round after round, one call of each, so that a busy moment hits all), and reports medians.

A fresh 4 KiB page costs 1.1 us, which at default settings is ten times what a norm costs. So the
timing runs in a child process in which glibc keeps freed pages (`MALLOC_REUSE`), for all sides
alike; no environment but the child's is touched. These are CPU timings; a call is taken to be over
when it returns.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

__all__ = ["Case", "main", "run"]

CHECKOUT = Path(__file__).parent.parent.parent

MALLOC_REUSE = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(1 << 30),
}

OURS = "accel"
COPY = "copy"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time, on several sides."""

    name: str
    """What and at which shape and dtype, say "forward 4096x4096 bfloat16"."""
    num_bytes: int
    """What the case must read and write at least; makes GB/s of a time."""
    sides: Mapping[str, Callable[[], object]]
    """"accel" and its peers; each call does the work once."""
    check: Callable[[], None]
    """Raises AssertionError unless every side is right."""
    copy_bytes: int
    """The limit is the bandwidth of copying this many bytes: choose one tensor of the case."""
    min_speedups: Mapping[str, float] = field(default_factory=dict)
    """Peer -> how many times faster we mean to be; together they make the target."""


def run(name: str, *, json: bool = False, quick: bool = False) -> int:
    """Run `benchmarks/NAME.py` in a child process. Returns its exit code; 2 for an unknown NAME."""
    names = sorted(file.stem for file in (CHECKOUT / "benchmarks").glob("[!_]*.py"))
    if name not in names:
        known = f"one of: {', '.join(names)}" if names else f"but {CHECKOUT} is no accel checkout"
        print(f"accel bench: no benchmark {name!r}; expected {known}", file=sys.stderr)
        return 2
    return _run_child(name, ["--json"] * json + ["--quick"] * quick)


def main(name: str, cases: Callable[[bool], Iterable[Case]], argv: list[str] | None = None) -> int:
    """The `main` of a benchmark file: time `cases(quick)`, report, return the exit code.

    Restarts itself as a child process unless it already runs in one that reuses pages.
    """
    parser = argparse.ArgumentParser(prog=f"python -m accel bench {name}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="small shapes and few rounds, to try it"
    )
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if any(os.environ.get(key) != value for key, value in MALLOC_REUSE.items()):
        return _run_child(name, argv)
    rows = []
    for case in cases(args.quick):
        try:
            case.check()
        except AssertionError as error:
            print(
                f"accel bench {name}: {case.name}: wrong result, not timed: {error}",
                file=sys.stderr,
            )
            return 1
        rows += _rows(case, _time_sides(case, num_rounds=7 if args.quick else 31))
    report = {"name": name, "commit": _commit(), "machine": _machine(), "rows": rows}
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0


def _run_child(name: str, argv: list[str]) -> int:
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *argv],
        env={**os.environ, **MALLOC_REUSE, "PYTHONPATH": path},
        cwd=CHECKOUT,
        check=False,
    ).returncode


def _time_sides(case: Case, num_rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each side, and of a copy of `copy_bytes`, one for each round."""
    source = torch.randint(0, 256, (case.copy_bytes,), dtype=torch.uint8)
    target = torch.empty_like(source)
    sides = {**case.sides, COPY: lambda: target.copy_(source)}
    # A round should take long against the clock and the scheduler: repeat short calls up to 5 ms.
    repeats = {}
    for side, call in sides.items():
        call()
        start = time.perf_counter()
        call()
        repeats[side] = max(1, int(5e-3 / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(num_rounds):
        for side, call in sides.items():
            start = time.perf_counter()
            for _ in range(repeats[side]):
                call()
            seconds[side].append((time.perf_counter() - start) / repeats[side])
    return seconds


def _rows(case: Case, seconds: Mapping[str, list[float]]) -> list[dict]:
    """The case as time and as bandwidth. The target is the better of what `min_speedups` asks."""
    median = {side: statistics.median(values) for side, values in seconds.items()}
    copy_gbs = 2 * case.copy_bytes / median[COPY] / 1e9
    targets = [
        median[peer] / speedup for peer, speedup in case.min_speedups.items() if peer in median
    ]
    target = min(targets, default=None)
    spread = ", ".join(
        f"{side} {1e3 * low:.4g} to {1e3 * high:.4g} ms"
        for side, (low, high) in _spread(seconds).items()
    )
    method = (
        f"median of {len(seconds[OURS])} interleaved rounds in one process, "
        f"glibc keeping freed pages for all sides ({', '.join(MALLOC_REUSE)}); "
        f"20th to 80th percentile: {spread}; "
        f"limit: a torch copy of {case.copy_bytes} bytes in the same rounds, {copy_gbs:.4g} GB/s"
    )

    def row(
        metric: str, unit: str, better: str, of: Callable[[float], float], limit: float
    ) -> dict:
        return {
            "case": case.name,
            "metric": metric,
            "unit": unit,
            "better": better,
            "ours": of(median[OURS]),
            "peers": {side: of(median[side]) for side in case.sides if side != OURS},
            "limit": limit,
            "target": None if target is None else of(target),
            "method": method,
        }

    return [
        row("time", "ms", "lower", lambda s: 1e3 * s, case.num_bytes / copy_gbs / 1e6),
        row("bandwidth", "GB/s", "higher", lambda s: case.num_bytes / s / 1e9, copy_gbs),
    ]


def _spread(seconds: Mapping[str, list[float]]) -> dict[str, tuple[float, float]]:
    fifths = {side: statistics.quantiles(values, n=5) for side, values in seconds.items()}
    return {side: (cuts[0], cuts[-1]) for side, cuts in fifths.items()}


def _machine() -> dict:
    from accel.ops import _native  # here: a benchmark of something else needs no kernels

    return {
        "cpu": _cpu_model(),
        "isa": _native.reason() or _native.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout, with "-dirty" where files differ from it; None without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def _table(report: Mapping) -> str:
    lines = [
        f"{report['name']} at commit {report['commit']}",
        ", ".join(f"{key} {value}" for key, value in report["machine"].items()),
        "",
    ]
    for row in report["rows"]:
        peers = "".join(f"  {side} {value:9.4g}" for side, value in row["peers"].items())
        target = "" if row["target"] is None else f"  target {row['target']:9.4g}"
        lines.append(
            f"{row['case']:34} {row['unit']:>5} ({row['better']} is better)"
            f"  {OURS} {row['ours']:9.4g}{peers}  limit {row['limit']:9.4g}{target}"
        )
    lines += ["", *dict.fromkeys(f"{row['case']}: {row['method']}" for row in report["rows"])]
    return "\n".join(lines)
