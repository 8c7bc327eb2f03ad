"""The driver of `make gpu`: see the package's docstring."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.setting import CHECKOUT, PATHS, write_json

PACKAGE = "benchmarks.gpu"
MINUTES = 8.7
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """A module of this package, run as a process."""

    name: str
    seconds: float
    """At most; less where less is left of the whole."""
    leaves: tuple[str, ...] = ()
    """What it writes into the folder, and where it was cut short goes on from."""


PARTS = (
    Part("build", 170),
    Part("tests", 180, ("tests.json", "tests.jsonl")),
    Part("ceilings", 30, ("ceilings.json",)),
    Part("ops", 180, ("ops.jsonl",)),
    Part("triton_ops", 60, ("triton_ops.jsonl",)),
    Part("overlap", 40, ("overlap.json",)),
    Part("training", 150, ("training.json",)),
    Part("moe", 110, ("moe.json",)),
    Part("memory", 270, ("memory.json",)),
    Part("compiled_ops", 200, ("compiled_ops.jsonl",)),
)
SOURCES = ("accel", "csrc", "benchmarks", "examples", "tests", "setup.py")
"""What results depend on."""


def fingerprint() -> str:
    """Of the sources as they lie there: a tree that is carried may have no git, or changes of its own."""
    digest = hashlib.sha256()
    for name in SOURCES:
        top = CHECKOUT / name
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            if file.suffix in (".py", ".cu", ".cpp", ".h") and file.is_file():
                digest.update(f"{file.relative_to(CHECKOUT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def begin_anew(parts: Sequence[Part], folder: Path) -> None:
    """Forget what these parts have left: it is of other sources, or no longer wanted."""
    for name in (name for part in parts for name in part.leaves):
        (folder / name).unlink(missing_ok=True)


def run_part(part: Part, seconds: float, folder: Path, rehearse: bool) -> dict:
    """Run it, with its output in a log. Returns its state: `status`, `seconds`, `why` if not done."""
    command = [sys.executable, "-m", f"{PACKAGE}.{part.name}"]
    command += ["--folder", str(folder), "--seconds", str(seconds)]
    command += ["--rehearse"] * rehearse
    path = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    if rehearse:
        environment |= {"TRITON_INTERPRET": "1", "ACCEL_DEVICE": "cpu"}
    log, begin = folder / f"{part.name}.log", time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds + 5)
            why = None if code == 0 else f"exit code {code}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            why = f"not done after {seconds:.0f} s: {last_line(log)}"
        finally:
            end_group(process)
    state = {"status": "failed" if why else "done", "seconds": time.monotonic() - begin}
    return state | ({"why": why} if why else {})


def end_group(process: subprocess.Popen) -> None:
    """End a part and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def last_line(log: Path) -> str:
    """What a part said last."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def main(argv: list[str] | None = None) -> int:
    """Run the parts that are not done yet. Returns 0 if all of them are done then."""
    parser = argparse.ArgumentParser(description="build, prove and measure on a GPU")
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "runs" / "gpu")
    parser.add_argument("--results", type=Path, help="where to write results.json and results.md")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in PARTS], metavar="PART")
    parser.add_argument("--again", action="store_true", help="also what is done for these sources")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at toy sizes")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "state.json"
    here = {"sources": fingerprint(), "rehearse": args.rehearse}
    state = json.loads(file.read_text()) if file.exists() else {}
    if {key: state.get(key) for key in here} != here:
        state = {**here, "parts": {}}
        begin_anew(PARTS, args.folder)
    for part in PARTS:
        if args.only and part.name not in args.only:
            continue
        if args.again:
            begin_anew([part], args.folder)
        if not args.again and state["parts"].get(part.name, {}).get("status") == "done":
            print(f"{part.name:10} done before", flush=True)
            continue
        left = deadline - time.monotonic() - REPORT_SECONDS
        if left < REPORT_SECONDS:
            print(f"{part.name:10} no time left; run the command again", flush=True)
            continue
        state["parts"][part.name] = run_part(
            part, min(part.seconds, left), args.folder, args.rehearse
        )
        write_json(file, state)
        now = state["parts"][part.name]
        print(
            f"{part.name:10} {now['status']} in {now['seconds']:.0f} s {now.get('why', '')}",
            flush=True,
        )
    report = run_part(Part("report", 60), 60, args.folder, args.rehearse)
    print((args.folder / "report.log").read_text())
    if args.results and report["status"] == "done":
        args.results.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "results.md"):
            (args.results / name).write_text((args.folder / name).read_text())
    done = all(state["parts"].get(part.name, {}).get("status") == "done" for part in PARTS)
    return 0 if done and report["status"] == "done" else 1


if __name__ == "__main__":
    sys.exit(main())
