"""A whole training step on the CPU: Megatron-LM with accel's preset fast beside stock Megatron-LM.

Both sides run examples/pretrain_gpt.py at the same time and take turns every few steps
(`accel.testing.turns`); the ratio is the median over pairs of neighbouring turns. Stock is preset off
(what lets Megatron run here at all), with `--transformer-impl local` and
`--no-gradient-accumulation-fusion`, which Megatron demands without Transformer Engine and Apex, and,
where it shards sequences, `--accel-norm`, without which it refuses. Both sides have the allocator of
glibc as it is, without `host_huge_pages`; what that adds is a row of its own, preset fast with it in turns
with preset fast without.

Limit: the tokens per second if the step were nothing but its matrix products, which the profile of one
more turn gives, together with the share of attention and the rest. Of the memory: what weights, gradients,
masters and moments take, without any activation. Not compared: the data (mock, the same on both sides), other
numbers of threads.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accel.testing import bench
from accel.testing.bench import OURS, row
from accel.testing.turns import Ratio, compare_turns

sys.path.insert(0, str(bench.CHECKOUT / "examples" / "demo"))
from measure import Run, parse
from training import REPOSITORY, launch, launch_both, turn_flags

STOCK = "stock"
SMALL_PAGES = ("--no-accel-host-huge-pages",)
STOCK_FLAGS = (
    *("--accel-preset", "off"),
    *("--transformer-impl", "local", "--no-gradient-accumulation-fusion"),
)


@dataclass(frozen=True)
class Shape:
    """A model and how it is trained."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    ranks: int
    threads: int
    """Of each rank."""
    min_speedup: float | None
    steps: int = 24
    turn_steps: int = 2
    flags: tuple[str, ...] = ()
    stock_flags: tuple[str, ...] = ()
    measures_pages: bool = False
    """Whether tensors are large enough for `host_huge_pages`."""

    @property
    def tokens(self) -> int:
        return self.seq_length * self.micro_batch_size

    def megatron_flags(self) -> list[str]:
        values = {
            "num-layers": self.num_layers,
            "hidden-size": self.hidden_size,
            "ffn-hidden-size": self.ffn_hidden_size,
            "num-attention-heads": self.num_heads,
            "num-query-groups": self.num_kv_heads,
            "seq-length": self.seq_length,
            "max-position-embeddings": self.seq_length,
            "micro-batch-size": self.micro_batch_size,
            "global-batch-size": self.micro_batch_size,
            "vocab-size": self.vocab_size,
            "make-vocab-size-divisible-by": 64,
            "tensor-model-parallel-size": self.ranks,
            "train-iters": self.steps,
            "normalization": "RMSNorm",
            "position-embedding-type": "rope",
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "tokenizer-type": "NullTokenizer",
            "split": "100,0,0",
            "eval-iters": 0,
            "eval-interval": 1000,
            "lr": 1e-4,  # at 1e-3 without warm-up the losses jump, and the sides part by whole nats
            "clip-grad": 1.0,
            "log-interval": 1,
            "log-memory-interval": self.steps,
        }
        flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        switches = ["group-query-attention", "swiglu", "disable-bias-linear", "bf16", "mock-data"]
        return [*flags, *(f"--{name}" for name in switches), *self.flags]


DEMO = Shape(
    "demo: 2 layers, hidden 192, TP 2",
    *(2, 192, 512, 4, 2),
    seq_length=256,
    micro_batch_size=4,
    vocab_size=2047,  # 2048 with the tokenizer's own
    ranks=2,
    threads=1,
    min_speedup=1.6,
    steps=100,
    turn_steps=5,
    flags=("--sequence-parallel",),
    stock_flags=("--accel-norm",),
)
SECOND = Shape(
    "4 layers, hidden 1024, sequence 1024",
    *(4, 1024, 2816, 16, 4),
    seq_length=1024,
    micro_batch_size=1,
    vocab_size=31999,
    ranks=1,
    threads=2,
    min_speedup=1.4,
    flags=("--untie-embeddings-and-output-weights",),
    measures_pages=True,
)
SHAPES = (DEMO, SECOND)
QUICK = replace(DEMO, name="demo, a few steps", steps=14, turn_steps=2, min_speedup=None)


def state_bytes(ranks: int) -> int:
    """What a parameter takes, without sharding: its bf16 weight and what that lacks of the fp32 master, two
    fp32 moments, and the gradient, in fp32 where it is summed or reduced. A step here is one micro-batch."""
    return 2 + 2 + 2 * 4 + (4 if ranks > 1 else 2)


KINDS = {
    "matrix products": (
        "aten::mm",
        "aten::addmm",
        "accel::gemm_",
        "accel::linear_",
        "accel::grouped",
    ),
    "attention": (
        "aten::bmm",
        "aten::baddbmm",
        "aten::_softmax",
        "aten::masked_fill",
        "accel::attention",
    ),
    "communication": ("c10d::", "gloo:", "record_param_comms", "accel::_shared_memory"),
}
"""Kind of work -> how the profiler's names of its operators begin. All else is "other"."""


def train(shape: Shape, folder: Path, extra: dict[str, Sequence[str]]) -> dict[str, Run]:
    """Both sides, in turns; side -> what it logged, with the seconds of its steps.

    `extra`: side -> its flags beside the shape's; the names are those of the demo's sides.
    """

    def start(side: str, on_start: Any) -> None:
        flags = [
            *turn_flags(side, folder, shape.turn_steps),
            "--profile",
            *shape.megatron_flags(),
            *extra[side],
        ]
        script, log = REPOSITORY / "examples" / "take_turns.py", folder / f"{side}.log"
        launch(script, flags, log, ranks=shape.ranks, threads=shape.threads, on_start=on_start)

    launch_both([partial(start, side) for side in extra])
    runs = {}
    for side in extra:
        runs[side] = parse((folder / f"{side}.log").read_text().splitlines())
        seconds = json.loads((folder / f"{side}.json").read_text())
        runs[side].seconds = seconds[: -2 * shape.turn_steps]  # one turn profiled, one to end on
    return runs


def peak_of(shape: Shape, folder: Path, *flags: str) -> float:
    """MiB, the sum over ranks, of a short run of ours by itself."""
    log, short = folder / "alone.log", replace(shape, steps=4)
    script = REPOSITORY / "examples" / "pretrain_gpt.py"
    launch(
        script,
        [*short.megatron_flags(), *flags],
        log,
        ranks=shape.ranks,
        threads=shape.threads,
    )
    peaks = parse(log.read_text().splitlines()).peak_bytes
    if len(peaks) != shape.ranks:
        raise RuntimeError(f"{shape.ranks} ranks, but memory of {sorted(peaks)} alone in {log}")
    return sum(peaks.values()) / 2**20


def by_kind(profile: Path) -> dict[str, float]:
    """Kind of work -> seconds of one step on rank 0, operators' own time."""
    seconds = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, value in json.loads(profile.read_text()).items():
        kind = next((k for k, starts in KINDS.items() if name.startswith(starts)), "other")
        seconds[kind] += value
    return seconds


def shape_rows(shape: Shape) -> list[dict]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock_flags = (*STOCK_FLAGS, *shape.stock_flags)
        runs = train(shape, folder, {STOCK: stock_flags, OURS: SMALL_PAGES})
        kinds = {side: by_kind(folder / f"{side}.profile.json") for side in runs}
        least = peak_of(shape, folder, "--accel-preset", "max")
    ratio = compare_turns(runs[OURS].seconds, runs[STOCK].seconds, shape.turn_steps)
    ours, stock = ratio.step_seconds
    method = _turns(ratio, shape)

    peak = {side: sum(run.peak_bytes.values()) / 2**20 for side, run in runs.items()}
    pairs = zip(runs[OURS].intervals, runs[STOCK].intervals, strict=True)
    differences = [abs(a.loss - b.loss) for a, b in pairs]
    difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    tokens_per_second = {OURS: shape.tokens / ours, STOCK: shape.tokens / stock}
    target = shape.min_speedup and shape.min_speedup * tokens_per_second[STOCK]
    goal = 0.65 * peak[STOCK]
    parameters = sum(runs[OURS].num_parameters.values())
    states = state_bytes(shape.ranks) * parameters / 2**20
    bound = shape.tokens / kinds[OURS]["matrix products"]
    make = partial(row, shape.name)
    result = [
        make(
            "tokens per second",
            "1/s",
            tokens_per_second,
            method,
            better="higher",
            limit=bound,
            target=target,
        ),
        make("peak memory", "MiB", peak, method, limit=states, target=goal),
        make(
            "peak memory, preset max",
            "MiB",
            {OURS: least, STOCK: peak[STOCK]},
            "ours: 4 steps by itself; stock: as without the preset",
            limit=states,
            target=goal,
        ),
        make("largest loss difference", "nats", {OURS: difference, STOCK: 0.0}, method),
    ]
    if shape.measures_pages:
        result.append(pages_row(shape))
    return result + [
        make(f"time in {kind}", "ms", {side: 1e3 * kinds[side][kind] for side in kinds}, method)
        for kind in kinds[OURS]
    ]


def pages_row(shape: Shape) -> dict:
    """Ours with `host_huge_pages` and without, in more turns: they differ by less than two turns do."""
    shape = replace(shape, steps=64)
    with tempfile.TemporaryDirectory() as name:
        runs = train(shape, Path(name), {STOCK: SMALL_PAGES, OURS: ()})
    ratio = compare_turns(runs[OURS].seconds, runs[STOCK].seconds, shape.turn_steps)
    ours, without = (shape.tokens / seconds for seconds in ratio.step_seconds)
    method = f"{_turns(ratio, shape)}; the same bits"
    return row(
        shape.name,
        "tokens per second, huge pages",
        "1/s",
        {OURS: ours, "pages of 4 KiB": without},
        method,
        better="higher",
    )


def _turns(ratio: Ratio, shape: Shape) -> str:
    low, high = ratio.quartiles
    return (
        f"{ratio.num_turns} pairs of turns of {shape.turn_steps} steps, {shape.ranks} rank(s) of "
        f"{shape.threads} thread(s); median ratio {ratio.median:.3f}, middle half {low:.3f} to {high:.3f}"
    )


def rows(quick: bool) -> list[dict]:
    for name in bench.MALLOC_REUSE:  # which `accel bench` sets for all benchmarks
        os.environ.pop(name, None)
    return [line for shape in ((QUICK,) if quick else SHAPES) for line in shape_rows(shape)]


def main(argv: list[str] | None = None) -> int:
    return bench.run_rows("step", rows, bench.parser("step").parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
