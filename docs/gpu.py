"""The page about GPUs: which op has which kernels, what they compile to, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accel._peers import LIBRARIES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMPILED = RESULTS / "compile.json"
ACTIVATIONS = {"swiglu", "geglu", "bias_gelu", "squared_relu"}
"""The ops of `accel/ops/activation.py`, each with results of its own."""

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

INTRODUCTION = """\
# GPUs and NPUs

An op is one name in PyTorch's dispatcher, with a kernel for each kind of device: C++ on the CPU, CUDA C++
or Triton on CUDA, torch-npu's own ops on Ascend. Features do not know which one runs.

| environment variable | |
|---|---|
| `ACCEL_CUDA_KERNELS=auto\\|cuda\\|triton` | where an op has both: CUDA C++ (auto), or Triton |
| `ACCEL_CUDA_KERNELS=rms_norm=liger,...` | for single ops `triton`, `liger` or `apex` (table below) |
| `ACCEL_ATTENTION_BACKEND=NAME` | the back end that attention on CUDA tries first, `auto` or one of these |

`flash4`, `flash3`, `cudnn`, `triton`, `flash2`, `flash`: one that is missing, or that does not take a call,
leaves it to the next.

Liger's and Apex's kernels are never used unasked, and serve what accel calls the op for: the norm of a sum
is `add_rms_norm`, and layers of Transformer Engine or Apex call none. Of `activation` Liger serves SwiGLU
without factors of a router. Before an op's first call they compute a small one, which is compared with the
reference: where they are wrong, and for calls that they do not take, ours run, and the log says why. They
round as their library does, so what a feature says of its bits is of ours, and Liger's backwards of
`layer_norm` and `add_rms_norm` are compiled anew for each number of rows that a processor gets. Liger's run
under the contracts of the ops, in Triton's interpreter; Apex's were written from its source and run against
a stand-in of its extension so far.

## How it is proved without a GPU

* Each Triton kernel runs in Triton's interpreter under the contract of its op, the same tests that the
  CPU's kernels pass (`tests/triton`), and is compiled ahead of time for sm_80, sm_90 and sm_100. A spill
  of more bytes than the kernel excuses, none but for attention's backward, fails. What it was compiled to is
  recorded with the source and the compiler (`benchmarks/results/compile.json`); it is compiled again where
  one of them is another, and all by `make test-all`.
* Each CUDA C++ kernel runs on the CPU under the same contract, its blocks' threads as fibers
  (`tests/cuda`), and is compiled for sm_80, sm_90 and sm_100, as `setup.py` builds them.
* Each Ascend kernel runs against torch-npu's own schemas with reference implementations behind them
  (`tests/npu`, [how](ascend.md)): schema-conformant, not yet run on hardware.
* Every op runs on tensors without data: none of them waits for the GPU
  (`tests/ops/test_no_host_sync.py`).

## On a GPU

```bash
make gpu-wheels   # where there is a network: some 4 MB into .gpu-wheels
make gpu-peers    # if wanted: 57 MB more, QuACK and FlashAttention-4 with their compiler
make gpu          # on the GPU: PyTorch >= 2.11 for CUDA, Triton, nvcc, what requirements/gpu.txt begins with
```

It builds, runs the ops' tests, measures the three ceilings (a copy, a product, sustained products), every op
beside its peers, Triton's kernels of the ops that have others in CUDA C++, transfers under products, training
steps shaped like Llama 3 8B and DeepSeekMoE 16B, what the memory features save and cost there, and peers
that compile at their first call (`torch.compile`, QuACK, FlashAttention-4), and writes `results.json` and
`results.md` into `benchmarks/results/<gpu>`. A call takes under nine minutes, all parts may take longer:
repeated, it goes on where it stopped, until all parts are done. `make gpu-rehearsal` runs the same parts on a
CPU at toy sizes. The target of attention (at 0.98) and of grouped products is the rate of the fastest
of all peers that any part has timed.
"""


def pages(docs: Path, generated: str, table: Table) -> dict[Path, str]:
    parts = [generated, INTRODUCTION, "## Kernels", kernels(table)]
    parts += [
        "## Against the best peer",
        "Each op's main row on each machine: accel's time, the fastest other side that was measured there "
        "and is as exact, and how many times faster accel is. Empty: not measured; on Ascend nothing was. "
        "All rows are below and in [benchmarks](benchmarks.md).",
        against_the_best(RESULTS, table),
    ]
    if COMPILED.exists():
        report = json.loads(COMPILED.read_text())
        versions = ", ".join(f"{name} {number}" for name, number in report["compilers"].items())
        parts += [
            "## Compiled",
            f"`make compile-table` ({versions}): registers of a thread at most, shared memory of a block at "
            "most, over all cases. Spills are those of kernels that say why, and how many bytes at most.",
            compiled(report["rows"], table),
        ]
    parts += ["## Measured", measured(table)]
    return {docs / "gpu.md": "\n\n".join(part.rstrip("\n") for part in parts) + "\n"}


def stems(folder: str, suffix: str) -> set[str]:
    return {file.stem for file in (ROOT / folder).glob(f"[!_]*{suffix}")}


def kernels(table: Table) -> str:
    """One line for each op: where it has kernels."""
    cpu, cuda = stems("csrc/cpu", ".cpp"), stems("csrc/cuda", ".cu")
    cpu |= {"grouped_gemm"} if "products" in cpu else set()  # whose many products it computes
    triton, npu = stems("accel/_triton", ".py"), stems("accel/_npu", ".py")
    ops = sorted(stems("accel/ops", ".py") & (cpu | cuda | triton | npu))
    mark = {True: "yes", False: ""}
    kinds = (cpu, triton, cuda, npu, LIBRARIES["liger"], LIBRARIES["apex"])
    rows = [(f"`{op}`", *(mark[op in there] for there in kinds)) for op in ops]
    return table(("op", "CPU, C++", "CUDA, Triton", "CUDA C++", "Ascend", "Liger", "Apex"), rows)


def against_the_best(results: Path, table: Table) -> str:
    """One line for each op that was measured anywhere, one column for each machine."""
    ops = stems("accel/ops", ".py") | ACTIVATIONS
    cells: dict[str, dict[str, str]] = {}
    for file in sorted(results.glob("*/*.json")):
        report, machine = json.loads(file.read_text()), file.parent.name
        if file.name == "results.json":  # of `make gpu`
            rows = [(row["op"], on_a_gpu(row)) for row in report["ops"]]
        else:
            timed = [row for row in report["rows"] if row["metric"] == "time"]
            rows = [(report["name"], on_a_cpu(row)) for row in timed if report["name"] in ops]
        for op, cell in rows:
            if cell:
                cells.setdefault(machine, {}).setdefault(op, cell)  # the first row is the main one
    machines = sorted(cells)
    names = sorted({op for found in cells.values() for op in found})
    lines = [(f"`{op}`", *(cells[machine].get(op, "") for machine in machines)) for op in names]
    return table(("op", *machines), lines)


def on_a_gpu(row: Mapping) -> str:
    """The cell of a row of `make gpu`; empty where accel was not timed."""
    sides = {name: side for name, side in row["sides"].items() if "us" in side}
    ours = sides.pop("accel", None)
    if ours is None:
        return ""
    peers = {
        name: side["us"]
        for name, side in sides.items()
        if name != "accel in Triton" and "less exact" not in side["note"]
    }
    return best_of(f"{row['mode']} {row['shape']}", ours["us"], peers, "us")


def on_a_cpu(row: Mapping) -> str:
    """The cell of a row of times of `make bench`."""
    return best_of(row["case"], row["ours"], row["peers"], row["unit"])


def best_of(case: str, ours: float, peers: Mapping[str, float], unit: str) -> str:
    text = f"{case}: **{number(ours)}** {unit}"
    if not peers:
        return text
    name, best = min(peers.items(), key=lambda peer: peer[1])
    return f"{text}, {name} {number(best)} ({best / ours:.2f}x)"


def number(x: float) -> str:
    return f"{x:.4g}" if x < 1e4 else f"{x:.0f}"


def compiled(rows: Sequence[Mapping], table: Table) -> str:
    """One line for each kernel: the worst over its cases, for each architecture."""
    worst: dict[tuple[str, str], dict[str, tuple[int, int, int]]] = {}
    for row in rows:
        name = row["kernel"].partition("<")[0]  # of a template, for all its types
        archs = worst.setdefault((row["file"], name), {})
        now = (row["registers"], row["shared_bytes"], row["spill_bytes"])
        arch = row["arch"].removesuffix("a")
        before = archs.get(arch, (0, 0, 0))
        archs[arch] = (max(now[0], before[0]), max(now[1], before[1]), max(now[2], before[2]))
    archs = sorted({arch for found in worst.values() for arch in found}, key=lambda a: int(a[3:]))

    def cell(found: tuple[int, int, int] | None) -> str:
        if found is None:
            return ""
        registers, shared, spilled = found
        text = f"{registers}, {shared / 1024:.3g} KiB"
        return f"{text}, {spilled} B spilled" if spilled else text

    lines = [
        (f"`{file.removeprefix('csrc/')}`", f"`{kernel}`", *(cell(found.get(a)) for a in archs))
        for (file, kernel), found in sorted(worst.items())
    ]
    return table(("file", "kernel", *archs), lines)


def measured(table: Table) -> str:
    """What `make gpu` has written, for each machine."""
    parts = []
    for file in sorted(RESULTS.glob("*/results.md")):
        parts += [f"### {file.parent.name}", file.read_text().partition("\n")[2].strip()]
    return "\n\n".join(parts) or "Nothing yet: `make gpu` has not run on a GPU so far."
