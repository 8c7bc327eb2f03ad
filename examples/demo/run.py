"""Train the same model with stock Megatron-LM and with accel, and compare.

    python examples/demo/run.py [--quick]

Two ranks on the CPU, tensor parallelism 2 with sequence parallelism, bf16. Both sides are alive at
the same time and take turns every few iterations. Everything ends up in ``runs/demo/``:
``report.html``, ``report.json``, the logs and the checkpoints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import corpus
from corpus import Corpus
from measure import Comparison, Run, compare, parse
from report import print_report, to_html
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from training import (
    QUICK,
    RANKS,
    REPOSITORY,
    SIDES,
    LaunchError,
    Plan,
    Side,
    launch,
    launch_both,
    turn_flags,
)

from accel.ops.host_gemm import has_native_bf16

RUNS = REPOSITORY / "runs" / "demo"
OURS = (
    *("stock", "accel", "turns", "logs", "index", "generation"),
    *("step_memory.json", "report.html", "report.json"),
)
"""What a run replaces in its folder; whatever else lies there stays."""
MARKER = ".accel-demo"
"""In a folder that the demo has written to, which had nothing of these names before."""

PROMPTS = ("def __init__(self", "class Test", "    def test_")
"""Without a blank at the end: the tokenizer joins a blank to the word after it."""

CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Those that decide how fast matrix products are."""


def train(plan: Plan, data: Corpus, folder: Path, console: Console) -> dict[str, Run]:
    """Both sides at once, in turns; side -> what it logged."""
    turns = folder / "turns"
    turns.mkdir()
    columns = (
        TextColumn("{task.description:<6}"),
        BarColumn(),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f} iterations  {task.fields[loss]:<12}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        launch_both(
            [partial(_train_side, plan, side, data, folder, progress) for side in SIDES.values()]
        )
    runs = {}
    for name in SIDES:
        runs[name] = parse((folder / "logs" / f"{name}.log").read_text().splitlines())
        runs[name].seconds = json.loads((turns / f"{name}.json").read_text())
        if not console.is_terminal and runs[name].intervals:
            last = runs[name].intervals[-1]
            console.print(
                f"{name}: iteration {last.iteration}, loss {last.loss:.3f}", highlight=False
            )
    return runs


def _train_side(
    plan: Plan,
    side: Side,
    data: Corpus,
    folder: Path,
    progress: Progress,
    on_start: Callable[[subprocess.Popen[str]], None],
) -> None:
    bar = progress.add_task(side.name, total=plan.iterations, loss="starting")

    def show(line: str) -> None:
        for interval in parse([line]).intervals:
            progress.update(bar, completed=interval.iteration, loss=f"loss {interval.loss:.3f}")

    flags = [
        *turn_flags(side.name, folder / "turns", plan.turn_steps),
        *plan.training_flags(data, folder / side.name, folder / "index" / side.name),
        *side.flags,
    ]
    script = REPOSITORY / "examples" / "take_turns.py"
    log = folder / "logs" / f"{side.name}.log"
    launch(script, flags, log, ranks=RANKS, on_line=show, on_start=on_start)


def generate(plan: Plan, data: Corpus, folder: Path) -> list[str]:
    """Continue each of :data:`PROMPTS` with the model that the accel side has trained."""
    work = folder / "generation"
    work.mkdir()
    (work / "prompts.json").write_text(json.dumps(PROMPTS))
    flags = [
        *plan.model_flags(data),
        *("--load", str(folder / "accel")),
        *("--no-load-optim", "--no-load-rng"),
        *("--prompts", str(work / "prompts.json")),
        *("--texts", str(work / "texts.json")),
    ]
    script = Path(__file__).with_name("generate.py")
    launch(script, flags, folder / "logs" / "generate.log", ranks=1, threads=RANKS)
    texts: list[str] = json.loads((work / "texts.json").read_text())
    return texts


def step_memory(folder: Path, quick: bool) -> dict[str, Any]:
    """Bytes after each operation of a step, stock's and ours, of the block that is benchmarked.

    The small one where stock's bf16 products would take minutes; the report names the shape.
    """
    quick = quick or not has_native_bf16()
    path = folder / "step_memory.json"
    flags = ["--samples", str(path), *(["--quick"] if quick else [])]
    script = REPOSITORY / "benchmarks" / "activation_memory.py"
    launch(script, flags, folder / "logs" / "step_memory.log", ranks=1, threads=RANKS)
    found = json.loads(path.read_text())
    path.unlink()
    return {"shape": found["shape"], "stock": found["stock"], "accel": found["accel, swapped too"]}


def make_report(
    plan: Plan,
    data: Corpus,
    runs: dict[str, Run],
    result: Comparison,
    samples: list[str],
    memory: dict[str, Any],
) -> dict[str, Any]:
    """The content of ``report.json``: plain types only."""
    return {
        **result.to_json(),
        "features": {name: run.features for name, run in runs.items()},
        "patches": runs["accel"].patches,
        "notes": runs["accel"].notes,
        "samples": samples,
        "step_memory": memory,
        "plan": asdict(plan),
        "corpus": data.manifest,
        "method": method(plan, data),
        "machine": {"accel start-up": runs["accel"].head, **machine()},
    }


def method(plan: Plan, data: Corpus) -> list[str]:
    """What a reader must know to judge the figures."""
    stock, accel = SIDES["stock"], SIDES["accel"]
    return [
        f"stock: {stock.what} ({' '.join(stock.flags)}).",
        "stock has --no-gradient-accumulation-fusion because without Apex Megatron demands it, and "
        "--accel-norm because without Apex or Transformer Engine Megatron refuses "
        "--sequence-parallel; it runs torch's own RMSNorm, with stock numerics.",
        "stock has --accel-host-bf16-gemm as well, because on CPUs without bf16 instructions ATen's "
        "bf16 product is about a hundred times slower than its fp32 product, and the comparison "
        "would be about nothing else. On CPUs that have them the feature is idle on both sides.",
        f"accel: {accel.what}.",
        f"Model: {plan.num_layers} layers, hidden size {plan.hidden_size}, SwiGLU of "
        f"{plan.ffn_hidden_size}, {plan.num_heads} heads over {plan.num_kv_heads} key/value heads, "
        f"sequences of {plan.seq_length}, {plan.tokens_per_iteration} tokens for each iteration.",
        f"Parallel: {RANKS} ranks, tensor parallelism {RANKS}, --sequence-parallel, "
        "bf16, one thread for each rank.",
        "Order: both sides run at the same time and take turns: while one trains "
        f"{plan.turn_steps} iterations the other sleeps. The same seed, hence the same initial weights "
        "and the same data in the same order.",
        f"Loss: Megatron's log, mean over {plan.log_interval} iterations; the first line is iteration "
        "1 alone. The kernels round differently, and training amplifies rounding.",
        "Tokens per second: from the median time of a training step, between two barriers, without "
        "the first two turns. The ratio is the median over pairs of neighbouring turns.",
        "Peak memory: the largest 'max allocated' that Megatron logged for each rank, summed over "
        "ranks.",
        f"Data: {data}.",
    ]


def machine() -> dict[str, str]:
    """Processor and versions."""
    packages = ("torch", "megatron-core", "transformers", "tokenizers")
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "CPU features found": ", ".join(cpu_features()) or "none of those looked for",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def cpu_features() -> list[str]:
    """Those of :data:`CPU_FEATURES` that the kernel reports."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return [name for name in CPU_FEATURES if name in flags]


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next(
        (v.strip() for k, _, v in (s.partition(":") for s in lines) if k.strip() == key), ""
    )


def clear(folder: Path) -> None:
    """Remove what an earlier run of the demo left, and nothing else.

    Raises:
        ValueError: the folder has things of these names that may be somebody else's.
    """
    theirs = [name for name in OURS if (folder / name).exists()]
    if theirs and not (folder / MARKER).exists() and folder.resolve() != RUNS.resolve():
        raise ValueError(
            f"--folder {folder} is not the demo's and has {', '.join(theirs)}, which a run would replace: "
            "give a new folder"
        )
    for name in theirs:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def demo(plan: Plan, folder: Path, console: Console) -> None:
    """The whole demo.

    Raises:
        LaunchError: a training or the generation failed.
        ValueError: the logs do not add up to a comparison; a folder of somebody else.
    """
    start = time.monotonic()
    data = corpus.build(corpus.Recipe.of_this_python())
    console.print(f"{data}\n", highlight=False)
    clear(folder)
    runs = train(plan, data, folder, console)
    tokens = plan.tokens_per_iteration
    result = compare(runs["stock"], runs["accel"], tokens, plan.turn_steps)
    samples = generate(plan, data, folder)
    memory = step_memory(folder, quick=plan is QUICK)
    report = make_report(plan, data, runs, result, samples, memory)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.html").write_text(to_html(report))
    console.print()
    print_report(report, console)
    console.print("\nwhat the accel side's model writes:")
    for text in samples:
        console.rule(style="dim")
        console.print(text, markup=False, highlight=False)
    console.rule(style="dim")
    where = os.path.relpath(folder / "report.html")
    console.print(f"{where} and report.json beside it ({time.monotonic() - start:.0f} s in all)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny and short: does it all work?")
    parser.add_argument("--folder", type=Path, default=RUNS, help="where to write (%(default)s)")
    options = parser.parse_args()
    console = Console(soft_wrap=not sys.stdout.isatty())
    try:
        demo(QUICK if options.quick else Plan(), options.folder, console)
    except (LaunchError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
