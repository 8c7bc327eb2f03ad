"""The benchmark runner behind `python -m accel bench NAME [--json] [--quick]`.

A benchmark is a file `benchmarks/NAME.py` of the checkout. What calls an op yields `Case`s (`main`).
For each case the runner checks every side against the reference, warms all sides up, times them
interleaved in one process (round after round, one call of each, so that a busy moment hits all), and
reports medians. What trains or launches ranks measures by itself and makes each `row` (`run_rows`).

A fresh 4 KiB page costs 1.1 us, which at default settings is ten times what a norm costs. So the
timing runs in a child process in which glibc keeps freed pages (`MALLOC_REUSE`), for all sides
alike; no environment but the child's is touched. These are CPU timings; a call is taken to be over
when it returns.

A step of training moves gigabytes between two calls of one op, so what is larger than a cache is timed
from memory: the calls of every side go round `input_sets` of `ROTATED_BYTES` in all, their results are
kept until as many others have been written, and the copy that sets the limit is that large too. With
one set of 32 MiB, each side found some of its input in a 32 MiB cache, and so did the copy: 34 to 82
GB/s from run to run where memory gives 44. Smaller inputs stay in the caches, for all sides alike.
"""

import argparse
import ctypes
import itertools
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.ops import _native

__all__ = [
    "Case",
    "advantage",
    "commit",
    "input_sets",
    "machine_name",
    "main",
    "outcome",
    "parser",
    "row",
    "run",
    "run_rows",
    "verdict",
]

CHECKOUT = Path(__file__).parent.parent.parent

MALLOC_REUSE = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(1 << 30),
}

OURS = "accel"
COPY, STREAM_COPY, GEMM = "copy", "stream copy", "gemm"

ROTATED_BYTES = 256 << 20  # several times the share of a last-level cache that a few cores have
CACHED_BYTES = 8 << 20  # inputs below this are meant to be found in the caches


def input_sets(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The arguments of one call, and so many copies of them that `ROTATED_BYTES` are reached.

    For `Case.input_sets`. Copies keep what requires a gradient. Tensors that are below `CACHED_BYTES`
    in all come back alone.
    """
    nbytes = sum(t.nbytes for t in tensors)
    num_sets = 1 if nbytes < CACHED_BYTES else max(2, -(-ROTATED_BYTES // nbytes))
    copies = (
        tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
        for _ in range(num_sets - 1)
    )
    return [tensors, *copies]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time, on several sides.

    Its limit is a rate, measured in the same rounds: that of copying `copy_bytes` for work that is
    bound by memory (`num_bytes`), that of one matrix product for work that is bound by arithmetic
    (`num_flops`).
    """

    name: str
    """What and at which shape and dtype, say "forward 4096x4096 bfloat16"."""
    sides: Mapping[str, Callable[..., object]]
    """"accel" and its peers; each call does the work once, on one of the `input_sets`."""
    check: Callable[[], None]
    """Raises AssertionError unless every side is right."""
    input_sets: Sequence[tuple[Any, ...]] = ((),)
    """The arguments of successive calls; more than one set makes the limit a copy from memory."""
    num_bytes: int = 0
    """What the case must read and write at least; makes GB/s of a time."""
    num_flops: int = 0
    """What the case must multiply and add at least; makes GFLOP/s of a time."""
    copy_bytes: int = 0
    """With `num_bytes`: the limit is copying this many, or `ROTATED_BYTES` where the calls go round
    several `input_sets`; choose one tensor of the case."""
    gemm: tuple[int, int, int] | None = None
    """With `num_flops`: the limit is torch's product of [M, K] and [K, N], for this (M, N, K)."""
    gemm_dtype: torch.dtype = torch.bfloat16
    min_speedups: Mapping[str, float] = field(default_factory=dict)
    """Peer -> how many times faster we mean to be."""
    min_over_best: float | None = None
    """How many times faster than the fastest peer."""
    min_of_limit: float | None = None
    """The share of the limit that we mean to reach, 0 to 1."""
    max_extra_bytes: int | None = None
    """How much host memory one call may hold at its peak, result included; makes a row of its own."""

    def __post_init__(self) -> None:
        if bool(self.num_bytes) == bool(self.num_flops):
            raise ValueError(f"{self.name}: give num_bytes or num_flops, one of them")
        if (self.num_bytes and not self.copy_bytes) or (self.num_flops and self.gemm is None):
            raise ValueError(f"{self.name}: num_bytes needs copy_bytes, num_flops needs gemm")


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
    argv = sys.argv[1:] if argv is None else argv
    args = parser(name).parse_args(argv)
    if any(os.environ.get(key) != value for key, value in MALLOC_REUSE.items()):
        return _run_child(name, argv)
    at = commit()
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
    _print_report(name, at, rows, as_json=args.json)
    return 0


def run_rows(name: str, rows: Callable[[bool], list[dict]], args: argparse.Namespace) -> int:
    """The `main` of a benchmark that measures by itself: report `rows(quick)`, return the exit code.

    A failed child process, one that was not done in time, RuntimeError and ValueError become a message on
    standard error, and 1. SIGTERM is a SystemExit, so that what `rows` has started is taken down.
    """
    at = commit()
    try:
        with _sigterm_exits(), redirect_stdout(sys.stderr):  # Megatron's log is on standard output
            made = rows(args.quick)
    except (subprocess.SubprocessError, TimeoutError, RuntimeError, ValueError) as error:
        print(f"accel bench {name}: {error}", file=sys.stderr)
        return 1
    _print_report(name, at, made, as_json=args.json)
    return 0


def parser(name: str) -> argparse.ArgumentParser:
    """What every benchmark takes: --json and --quick."""
    made = argparse.ArgumentParser(prog=f"python -m accel bench {name}")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--quick", action="store_true", help="small and short, to try it")
    return made


def row(
    case: str,
    metric: str,
    unit: str,
    sides: Mapping[str, float],
    method: str,
    *,
    better: str = "lower",
    limit: float | None = None,
    target: float | None = None,
) -> dict:
    """One line of a result.

    Args:
        case: what was measured, at which sizes.
        metric: which property of it, say "time".
        unit: of all the numbers here.
        sides: `OURS` and its peers, a number for each.
        method: how the numbers came about.
        better: "lower" or "higher".
        limit: what the machine can do at best.
        target: what we mean to reach.
    """
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "better": better,
        "ours": sides[OURS],
        "peers": {side: value for side, value in sides.items() if side != OURS},
        "limit": limit,
        "target": target,
        "method": method,
    }


def _print_report(name: str, at: str | None, rows: list[dict], *, as_json: bool) -> None:
    """What a benchmark prints: its rows with the commit at its start and the machine, as JSON or a table."""
    report = {"name": name, "commit": at, "machine": _machine(), "rows": rows}
    print(json.dumps(report, indent=2) if as_json else _table(report))


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """The first one; others do not interrupt what it takes down."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_child(name: str, argv: list[str]) -> int:
    """Its exit status. What ends this process ends the child first, which takes down its links and ranks;
    asked again, it is killed."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    running: list[subprocess.Popen] = []
    asked = 0

    def end(*_: object) -> None:
        nonlocal asked
        asked += 1
        for process in running:
            process.terminate() if asked == 1 else process.kill()

    ends = [s for s in _ENDS if signal.getsignal(s) is not signal.SIG_IGN]  # as nohup has it
    before = [signal.signal(s, end) for s in ends]
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{name}", *argv],
            env={**os.environ, **MALLOC_REUSE, "PYTHONPATH": path},
            cwd=CHECKOUT,
            start_new_session=True,  # Ctrl-C is for this process alone
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        running.append(child)
        if asked:
            child.terminate()
        status = child.wait()
    finally:
        for each, handler in zip(ends, before, strict=True):
            signal.signal(each, handler)
    return status if status >= 0 else 128 - status


_ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _end_with_parent() -> None:
    """SIGTERM for this process when its parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _limit_sides(case: Case) -> dict[str, Callable[[], object]]:
    """What the machine can do at best, to be timed beside the sides."""
    if case.gemm is not None:
        m, n, k = case.gemm
        a_MK, b_KN = (torch.randn(size).to(case.gemm_dtype) for size in ((m, k), (k, n)))
        out_MN = a_MK.new_empty((m, n))
        return {GEMM: lambda: torch.mm(a_MK, b_KN, out=out_MN)}
    whole_steps = -(-_copied_bytes(case) // 256) * 64  # floats, in steps of the streaming copy
    source = torch.randn(whole_steps)
    target = torch.empty_like(source)
    copies: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(source)}
    if _native.reason() is None:
        copies[STREAM_COPY] = lambda: torch.ops.accel._stream_copy(source, target)
    return copies


CASE_SECONDS, MIN_ROUNDS = 15, 5
"""Calls of a second and more are timed in fewer rounds: no new one after so long, but so many."""


def _copied_bytes(case: Case) -> int:
    """How large the copy is that sets the limit: from memory where the calls' inputs are."""
    from_memory = len(case.input_sets) > 1
    return max(case.copy_bytes, ROTATED_BYTES) if from_memory else case.copy_bytes


def _rotating(call: Callable[..., object], sets: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
    """Calls with each of the sets in turn. Results live until all the other sets have had theirs, so
    that neither inputs nor outputs are what the call before has left in a cache."""
    turns = itertools.cycle(sets)
    results: deque[object] = deque(maxlen=len(sets) - 1)

    def call_next() -> None:
        results.append(call(*next(turns)))

    return call_next


def _time_sides(case: Case, num_rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each side, and of what sets the limit, one for each round."""
    sides: dict[str, Callable[[], object]] = {
        side: _rotating(call, case.input_sets) for side, call in case.sides.items()
    }
    sides |= _limit_sides(case)
    # A round should take long against the clock, the scheduler and what the side before has left in
    # the caches: repeat short calls up to 20 ms.
    repeats = {}
    for side, call in sides.items():
        for _ in case.input_sets:  # every page that the calls will use is touched here
            call()
        start = time.perf_counter()
        call()
        repeats[side] = max(1, int(20e-3 / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    begin = time.perf_counter()
    for done in range(num_rounds):
        if done >= MIN_ROUNDS and time.perf_counter() - begin > CASE_SECONDS:
            break
        for side, call in sides.items():
            start = time.perf_counter()
            for _ in range(repeats[side]):
                call()
            seconds[side].append((time.perf_counter() - start) / repeats[side])
    return seconds


def _peak_bytes(call: Callable[[], object]) -> int:
    """Host memory that one call holds at its peak, its result included."""
    torch.ops.accel._host_memory_install()
    try:
        torch.ops.accel._host_memory_reset_peak()
        before = torch.ops.accel._host_memory_stats()[0]
        result = call()  # alive until the peak is read
        peak = torch.ops.accel._host_memory_stats()[1]
        del result
        return peak - before
    finally:
        torch.ops.accel._host_memory_uninstall()


def _rows(case: Case, seconds: Mapping[str, list[float]]) -> list[dict]:
    """The case as time, as a rate, and as memory where that has a bound."""
    median = {side: statistics.median(values) for side, values in seconds.items()}
    peers = {side: median[side] for side in case.sides if side != OURS}
    limit_seconds, limit_text = _limit(case, median)
    wanted = [peers[peer] / n for peer, n in case.min_speedups.items() if peer in peers]
    if case.min_over_best is not None and peers:
        wanted.append(min(peers.values()) / case.min_over_best)
    if case.min_of_limit is not None:
        wanted.append(limit_seconds / case.min_of_limit)
    spread = ", ".join(
        f"{side} {1e3 * low:.4g} to {1e3 * high:.4g} ms"
        for side, (low, high) in _spread(seconds).items()
    )
    method = (
        f"median of {len(seconds[OURS])} interleaved rounds in one process "
        f"(no new one after {CASE_SECONDS} s, but {MIN_ROUNDS} at least), "
        f"glibc keeping freed pages for all sides ({', '.join(MALLOC_REUSE)}), "
        f"{_rotation(case)}; "
        f"20th to 80th percentile: {spread}; limit: {limit_text}"
    )

    def in_unit(metric: str, unit: str, better: str, of: Callable[[float], float]) -> dict:
        sides = {side: of(median[side]) for side in case.sides}
        target = of(min(wanted)) if wanted else None
        limit = of(limit_seconds)
        return row(
            case.name, metric, unit, sides, method, better=better, limit=limit, target=target
        )

    work = case.num_bytes or case.num_flops
    rate = ("bandwidth", "GB/s") if case.num_bytes else ("rate", "GFLOP/s")
    rows = [
        in_unit("time", "ms", "lower", lambda s: 1e3 * s),
        in_unit(*rate, "higher", lambda s: work / s / 1e9),
    ]
    return rows + _memory_rows(case)


def _rotation(case: Case) -> str:
    num_sets = len(case.input_sets)
    return f"calls going round {num_sets} sets of inputs" if num_sets > 1 else "on the same inputs"


def _limit(case: Case, median: Mapping[str, float]) -> tuple[float, str]:
    """Seconds that the case's bytes or FLOPs take at the limit, and what the limit is."""
    if case.gemm is not None:
        m, n, k = case.gemm
        rate = 2 * m * n * k / median[GEMM]
        dtype = str(case.gemm_dtype).removeprefix("torch.")
        text = f"torch.mm of {m}x{k} and {k}x{n} {dtype} in the same rounds"
        return case.num_flops / rate, f"{text}, {rate / 1e9:.4g} GFLOP/s"
    fastest = min((c for c in (COPY, STREAM_COPY) if c in median), key=lambda c: median[c])
    rate = 2 * _copied_bytes(case) / median[fastest]
    text = f"a {'torch' if fastest == COPY else 'streaming'} copy of {_copied_bytes(case)} bytes"
    return case.num_bytes / rate, f"{text} in the same rounds, {rate / 1e9:.4g} GB/s"


def _memory_rows(case: Case) -> list[dict]:
    if case.max_extra_bytes is None or _native.reason() is not None:
        return []
    inputs = case.input_sets[0]
    peaks = {s: _peak_bytes(partial(call, *inputs)) / 2**20 for s, call in case.sides.items()}
    method = (
        "what PyTorch's CPU allocator handed out and had not got back at the peak of "
        "one call, its result included and its inputs not"
    )
    target = case.max_extra_bytes / 2**20
    return [row(case.name, "peak memory", "MiB", peaks, method, target=target)]


def _spread(seconds: Mapping[str, list[float]]) -> dict[str, tuple[float, float]]:
    fifths = {side: statistics.quantiles(values, n=5) for side, values in seconds.items()}
    return {side: (cuts[0], cuts[-1]) for side, cuts in fifths.items()}


def machine_name() -> str:
    """The folder of this machine's results, say "amd-epyc-avx512-2cpu"."""
    isa = "torch" if _native.reason() else _native.isa()
    words = re.findall(r"[a-z0-9]+", _cpu_model().lower())
    return "-".join([*words, isa, f"{os.cpu_count()}cpu"])


def _machine() -> dict:
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


def commit() -> str | None:
    """The commit of the checkout, with "-dirty" where files differ from it that are no results and pages made
    of them (`REWRITTEN`); None without git."""
    try:
        head = _git("rev-parse", "HEAD")
        head.check_returncode()
        changed = _git("diff", "--quiet", "HEAD", "--", ".", *(f":(exclude){p}" for p in REWRITTEN))
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + "-dirty" * bool(changed.returncode)


REWRITTEN = ("benchmarks/results", *(f"docs/*.{kind}" for kind in ("json", "md", "svg")))
"""By `make bench` and the like, one after the other: a result does not depend on those before it."""


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def _table(report: Mapping) -> str:
    lines = [
        f"{report['name']} at commit {report['commit']}",
        ", ".join(f"{key} {value}" for key, value in report["machine"].items()),
        "",
    ]
    for row in report["rows"]:
        peers = "".join(
            f"  {side} {value:9.4g}{advantage(row, value)}" for side, value in row["peers"].items()
        )
        limit = "" if row["limit"] is None else f"  limit {row['limit']:9.4g}"
        lines.append(
            f"{row['case']:34} {row['metric']} ({row['unit']}, {row['better']} is better):"
            f"  {OURS} {row['ours']:9.4g}{peers}{limit}{verdict(row)}"
        )
    lines += ["", *dict.fromkeys(f"{row['case']}: {row['method']}" for row in report["rows"])]
    return "\n".join(lines)


def advantage(row: Mapping, peer: float) -> str:
    """How many times better than a peer we are, in brackets, " (1.50x)"; empty where that says nothing."""
    ours = row["ours"]
    if not peer or not ours or row["metric"].startswith("time in"):
        return ""
    return f" ({peer / ours if row['better'] == 'lower' else ours / peer:.2f}x)"


def verdict(row: Mapping) -> str:
    """The target of a row, and whether it is met; empty where there is none."""
    if row["target"] is None:
        return ""
    became = outcome(row)
    return f"  target {row['target']:9.4g} {became if became == 'met' else became.upper()}"


def outcome(row: Mapping) -> str:
    """What became of a row's target: "met" or "falls short", with "(beyond the limit)" where it asks for more
    than the limit, and the limit holds: neither we nor a peer are better than it."""
    sign = 1 if row["better"] == "lower" else -1
    ours, target = sign * row["ours"], sign * row["target"]
    if ours <= target:
        return "met"
    best = min([ours, *(sign * peer for peer in row["peers"].values())])
    beyond = row["limit"] is not None and target < sign * row["limit"] <= best
    return "falls short (beyond the limit)" if beyond else "falls short"


def show_results(folder: Path) -> None:
    """Print the tables of all results in a folder, as `make bench` does at its end."""
    for path in sorted(folder.glob("*.json")):
        print(_table(json.loads(path.read_text())), end="\n\n")


if __name__ == "__main__":
    show_results(Path(sys.argv[1]))
