"""`--accel-recompute-activation`, `--accel-recompute-norm`, `--accel-swap-attention` and
`--accel-memory-budget`: activations of a block of Megatron's local spec, Llama-shaped, in bf16, without
dropout, and a whole run.

Held     bytes that the allocator counts between the forward and the backward pass, the output included.
Freed    these against what is kept without recomputation, and how many bytes that is off the formula:
         of each layer a recomputed activation's output, and the outputs of two norms and their `rstd`, less
         the states of the random generators that each recomputed norm remembers.
Bits     gradients of the input and the weights that differ from those where all is kept.
Step     forward and backward pass, the sides in turn in one process. On the CPU runtime the host is the
         device: the copies of "swapped" take the time of the kernels and hide behind none.
Peak     of such a step above what was there before it. The weights' gradients were there, as in Megatron's
         gradient buffers.
Budget   a step that may take, above what a step that keeps everything takes without its activations, half of
         stock's or half of its own. The plan is made again for each round, from what is measured then.
Run      peak memory of examples/pretrain_gpt.py at a sequence of 4096. Not with --quick.

Stock is preset off. All other sides have the kernels of presets fast and max that a block meets; "accel"
recomputes activations and norms. `--picture FILE` draws a step's memory, operation by operation, and
`--samples FILE` writes the numbers.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from accel.device.cpu import memory
from accel.patches import memory_budget
from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks._optimizer import alone, enabled
from benchmarks.step import SECOND, STOCK_FLAGS, Shape, peak_of

NAME = "activation_memory"
KEPT, ACTIVATION, NORM, SWAPPED, STOCK, BUDGET, TIGHT = (
    "accel, all kept",
    "accel, activation",
    "accel, norm",
    "accel, swapped too",
    "stock",
    "accel, half of stock's",
    "accel, half of its own",
)
FUSED = dict.fromkeys(
    (
        "fused_norm",
        "fused_attention",
        "fused_activation",
        "fused_rope",
        "inplace_activation_grad",
        "host_bf16_gemm",
    ),
    True,
)
BOTH = {**FUSED, "recompute_activation": True, "recompute_norm": True}
SIDES: dict[str, dict[str, Any]] = {
    KEPT: FUSED,
    ACTIVATION: {**FUSED, "recompute_activation": True},
    NORM: {**FUSED, "recompute_norm": True},
    OURS: BOTH,
    SWAPPED: {**BOTH, "swap_attention": "all"},
    STOCK: {},
    BUDGET: {**FUSED, "memory_budget": 1.0},
    TIGHT: {**FUSED, "memory_budget": 1.0},
}
HALF_OF = {BUDGET: STOCK, TIGHT: KEPT}
"""Sides with a budget, which `plan` sets: half of the activations of another."""
RECOMPUTING = (ACTIVATION, NORM, OURS)

FULL = replace(SECOND, min_speedup=None)
QUICK = replace(
    FULL,
    name="2 layers, hidden 256, sequence 256",
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=704,
    num_heads=4,
    num_kv_heads=2,
    seq_length=256,
    threads=1,
)
LONG = replace(FULL, name="4 layers, hidden 1024, sequence 4096", seq_length=4096)
LEAST_FLAGS = (
    *("--accel-preset", "max", "--accel-recompute-activation", "--accel-recompute-norm"),
    *("--accel-swap-attention", "all"),
)
ROUNDS = 12
SLOWER, SLOWER_IN_BUDGET = 1.04, 1.1
"""A step may take that much longer than one that keeps everything."""
MIB = 2**20


@contextlib.contextmanager
def one_rank(threads: int) -> Iterator[None]:
    """Megatron's groups with this process alone, which leave nothing behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with alone():
            from megatron.core import parallel_state

            try:
                yield
            finally:
                parallel_state.destroy_model_parallel()
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Given:
    """What the block is called with, and the gradient of what it gives."""

    x: Tensor
    gradient: Tensor
    mask: Tensor
    angles: Tensor


def draw(shape: Shape) -> Given:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    size = (shape.seq_length, shape.micro_batch_size, shape.hidden_size)
    generator = torch.Generator().manual_seed(2)
    x, gradient = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
    mask = torch.ones(1, 1, shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)
    angles = RotaryEmbedding(shape.hidden_size // shape.num_heads, 1.0)(shape.seq_length)
    return Given(x.requires_grad_(), gradient, mask, angles)


def build(shape: Shape) -> Any:
    """The `TransformerBlock`, in bf16 as `Float16Module` has it, with Megatron's default fusions."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=True,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return TransformerBlock(config, spec).bfloat16()


def forward(block: Any, given: Given) -> Tensor:
    return block(given.x, given.mask, rotary_pos_emb=given.angles)


def clear(block: Any, given: Given) -> None:
    """Gradients of zero, where there are gradients."""
    for tensor in (given.x, *block.parameters()):
        if tensor.grad is not None:
            tensor.grad.zero_()


def seconds(block: Any, given: Given) -> float:
    """Of a forward and a backward pass."""
    clear(block, given)
    torch.cuda.synchronize()
    start = time.perf_counter()
    forward(block, given).backward(given.gradient)
    torch.cuda.synchronize()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Found:
    """Of one side, in bytes, and the gradients of the input and the weights."""

    held: int
    requested: int
    peak: int
    gradients: list[Tensor]


def measure(block: Any, given: Given) -> Found:
    seconds(block, given)  # makes the gradients, and what is cached
    gc.collect()
    clear(block, given)
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    output = forward(block, given)
    held = memory.memory_allocated() - before
    output.backward(given.gradient)
    del output
    peak = memory.max_memory_allocated() - before
    gradients = [tensor.grad.clone() for tensor in (given.x, *block.parameters())]
    return Found(held, requested_bytes(block, given), peak, gradients)


def requested_bytes(block: Any, given: Given) -> int:
    """What is held after the forward pass, without what malloc adds to each block."""
    clear(block, given)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        output = forward(block, given)
    output.backward(given.gradient)
    events = recorded.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def state_bytes() -> int:
    """What a recomputed norm remembers of random generators: the host's and the device's state."""
    return torch.get_rng_state().nbytes + torch.cuda.get_rng_state().nbytes


def formula(side: str, shape: Shape) -> int:
    """Bytes that a side frees."""
    activation = shape.tokens * 2 * shape.ffn_hidden_size
    norm = shape.tokens * (2 * shape.hidden_size + 4) - state_bytes()
    freed = {ACTIVATION: activation, NORM: 2 * norm, OURS: activation + 2 * norm}
    return shape.num_layers * freed[side]


def plan(block: Any, given: Given, num_bytes: int) -> str:
    """Run steps until there is a plan for so many bytes above those that are there, and return its table."""
    planner = memory_budget.ON.value
    seconds(block, given)  # makes the gradients
    gc.collect()
    planner.budget = memory.memory_allocated() + num_bytes
    with contextlib.redirect_stdout(io.StringIO()) as told:
        while planner.plan is None:
            with planner.watched():
                seconds(block, given)
    return told.getvalue()


def time_sides(
    blocks: Mapping[str, Any], given: Given, budgets: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step. Features are switched, plans and pinned memory are made, in steps before it."""
    found: dict[str, list[float]] = {side: [] for side in blocks}
    for _ in range(rounds):
        for side, block in blocks.items():
            with enabled(SIDES[side]):
                if side in budgets:
                    plan(block, given, budgets[side])
                seconds(block, given)
                found[side].append(seconds(block, given))
    return found


def block_rows(shape: Shape, rounds: int) -> list[dict]:
    blocks: dict[str, Any] = {}
    found: dict[str, Found] = {}
    budgets: dict[str, int] = {}
    tables: dict[str, str] = {}
    with one_rank(shape.threads):
        with enabled({}):
            given = draw(shape)
            formulas = {side: formula(side, shape) for side in RECOMPUTING}
        for side in SIDES:
            if side in HALF_OF:
                kept = found[KEPT]
                budgets[side] = kept.peak - kept.held + found[HALF_OF[side]].held // 2
            with enabled(SIDES[side]):
                blocks[side] = build(shape)
                if side in budgets:
                    tables[side] = plan(blocks[side], given, budgets[side])
                found[side] = measure(blocks[side], given)
        times = time_sides(blocks, given, budgets, rounds)
    return [
        *memory_rows(shape, found),
        *(freed_row(shape, side, found, formulas[side]) for side in RECOMPUTING),
        *gradient_rows(shape, found),
        time_row(shape, times),
        *budget_rows(shape, found, budgets, tables, times),
    ]


def memory_rows(shape: Shape, found: Mapping[str, Found]) -> list[dict]:
    method = (
        "what PyTorch's CPU allocator handed out and had not got back; pinned memory is the host's"
    )
    sides = [side for side in found if side not in HALF_OF]
    held = {side: found[side].held / MIB for side in sides}
    peak = {side: found[side].peak / MIB for side in sides}
    return [
        row(
            shape.name,
            "bytes of activations",
            "MiB",
            held,
            f"between forward and backward, above what was there before; {method}",
        ),
        row(
            shape.name,
            "peak of a step",
            "MiB",
            peak,
            f"above what was there before, gradients of weights among it; {method}",
        ),
    ]


def freed_row(shape: Shape, side: str, found: Mapping[str, Found], expected: int) -> dict:
    freed = found[KEPT].requested - found[side].requested
    counted = found[KEPT].held - found[side].held
    layer = {
        ACTIVATION: "T ffn 2",
        NORM: "2 (T hidden 2 + T 4 - R)",
        OURS: "(T ffn 2 + 2 (T hidden 2 + T 4 - R))",
    }[side]
    method = (
        f"{freed} bytes freed, as torch's profiler reports each allocation, and {counted} by the allocator's "
        f"count, which has malloc's padding; formula: {expected} = layers {layer}, T {shape.tokens} tokens, "
        "T 4 a norm's rstd, R the states of random generators that a recomputed norm remembers"
    )
    off = {OURS: abs(freed - expected)}
    return row(f"{shape.name}, {side}", "bytes off the formula", "bytes", off, method, target=0)


def gradient_rows(shape: Shape, found: Mapping[str, Found]) -> list[dict]:
    differ = {
        side: sum(
            int((a != b).sum()) for a, b in zip(one.gradients, found[KEPT].gradients, strict=True)
        )
        for side, one in found.items()
    }
    total = sum(tensor.numel() for tensor in found[KEPT].gradients)
    method = f"of {total} elements of the input's and the weights', against {KEPT}"
    return [
        row(
            f"{shape.name}, {side}",
            "gradients that differ",
            "elements",
            {OURS: differ[side], STOCK: differ[STOCK]},
            method,
            target=0,
        )
        for side in (*RECOMPUTING, SWAPPED, *HALF_OF)
    ]


def time_row(shape: Shape, times: Mapping[str, list[float]]) -> dict:
    sides = [side for side in times if side not in HALF_OF]
    medians = {side: 1e3 * statistics.median(times[side]) for side in sides}
    ratios = "; ".join(
        f"{side} {ratio_to_kept(times[side], times[KEPT])}" for side in sides if side != KEPT
    )
    method = (
        f"{len(times[KEPT])} rounds, the sides in turn in one process, {shape.threads} thread(s); "
        f"median of the rounds' ratios to {KEPT}, and its middle half: {ratios}; the copies of "
        f"{SWAPPED} hide behind nothing on the CPU runtime"
    )
    target = None if shape is QUICK else SLOWER * medians[KEPT]
    return row(shape.name, "step time", "ms", medians, method, target=target)


def budget_rows(
    shape: Shape,
    found: Mapping[str, Found],
    budgets: Mapping[str, int],
    tables: Mapping[str, str],
    times: Mapping[str, list[float]],
) -> list[dict]:
    rows = []
    for side, budget in budgets.items():
        name = f"{shape.name}, {side} activations"
        told = tables[side].splitlines()
        begin = next(n for n, line in enumerate(told) if ": layers" in line)
        chosen = "; ".join(" ".join(line.split(": ")[-1].split()) for line in told[begin:])
        method = f"above what was there before; the plan for it: {chosen}"
        peak = {OURS: found[side].peak / MIB, KEPT: found[KEPT].peak / MIB}
        rows.append(row(name, "peak in a budget", "MiB", peak, method, target=budget / MIB))
        medians = {OURS: times[side], KEPT: times[KEPT]}
        taken = {who: 1e3 * statistics.median(each) for who, each in medians.items()}
        target = None if shape is QUICK else SLOWER_IN_BUDGET * taken[KEPT]
        ratios = ratio_to_kept(times[side], times[KEPT])
        method = f"median of the rounds' ratios to {KEPT}, and its middle half: {ratios}"
        rows.append(row(name, "step time in a budget", "ms", taken, method, target=target))
    return rows


def ratio_to_kept(taken: Sequence[float], kept: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(taken, kept, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f}, {low:.3f} to {high:.3f}"


def run_row(shape: Shape) -> dict:
    for name in bench.MALLOC_REUSE:  # which `accel bench` sets for all benchmarks
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as name:
        peak = {
            OURS: peak_of(shape, Path(name), *LEAST_FLAGS),
            STOCK: peak_of(shape, Path(name), *STOCK_FLAGS),
        }
    method = (
        f"4 steps of examples/pretrain_gpt.py, {shape.ranks} rank(s) of {shape.threads} thread(s), by "
        f"itself; ours: {' '.join(LEAST_FLAGS)}; stock: {' '.join(STOCK_FLAGS)}"
    )
    return row(shape.name, "peak memory of a run", "MiB", peak, method, target=peak[STOCK] / 2)


class Samples(TorchDispatchMode):
    """Bytes after each operation: all that is allocated, and the gradients of weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        self.allocated: list[int] = []
        self.gradients: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.allocated.append(memory.memory_allocated())
        self.gradients.append(sum(w.grad.nbytes for w in self.weights if w.grad is not None))
        return result


@dataclass(frozen=True)
class Line:
    """Bytes after each operation of a step."""

    weights: int
    gradients: list[int]
    rest: list[int]
    """Activations and temporaries."""
    backward: int
    """The number of the first operation of the backward pass."""


def sample(side: str, shape: Shape) -> Line:
    """The allocator's bytes are those of the block; the input and its gradient were there before."""
    with enabled(SIDES[side]):
        given = draw(shape)
        given.x.grad = torch.zeros_like(given.x)
        block = build(shape)
        weights = list(block.parameters())
        seconds(block, given)
        clear(block, given)
        gc.collect()
        before = memory.memory_allocated()
        there = sum(w.grad.nbytes for w in weights)
        with Samples(weights) as samples:
            output = forward(block, given)
            backward = len(samples.allocated)
            output.backward(given.gradient)
        rest = [
            now - before + there - gradients
            for now, gradients in zip(samples.allocated, samples.gradients, strict=True)
        ]
        return Line(sum(w.nbytes for w in weights), samples.gradients, rest, backward)


def lines_of(shape: Shape) -> dict[str, Line]:
    """Of a step of stock and of ours."""
    with one_rank(shape.threads):
        return {side: sample(side, shape) for side in (STOCK, SWAPPED)}


def draw_lines(path: Path, shape: Shape, lines: Mapping[str, Line]) -> None:
    """As a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {STOCK: "stock", SWAPPED: "recomputed activations and norms, swapped attention"}
    figure, panels = pyplot.subplots(1, 2, sharey=True, figsize=(11, 4.5), layout="constrained")
    for panel, (side, line) in zip(panels, lines.items(), strict=True):
        weights = [line.weights] * len(line.rest)
        areas = [[n / MIB for n in part] for part in (weights, line.gradients, line.rest)]
        labels = ("weights", "gradients", "activations and temporaries")
        panel.stackplot(range(len(line.rest)), *areas, labels=labels)
        panel.axvline(line.backward, color="black", linewidth=0.8, linestyle=":")
        panel.set_title(titles[side])
        panel.set_xlabel("operations of one step, in order; backward pass from the dotted line")
    panels[0].set_ylabel("allocated bytes, MiB")
    panels[1].legend(loc="upper right")
    figure.suptitle(f"{shape.name}, bf16")
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def rows(quick: bool) -> list[dict]:
    if quick:
        return block_rows(QUICK, 2)
    return [*block_rows(FULL, ROUNDS), run_row(LONG)]


def main(argv: list[str] | None = None) -> int:
    parser = bench.parser(NAME)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw a step, as PNG, and end")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="write a step's bytes as JSON, and end"
    )
    args = parser.parse_args(argv)
    logging.disable(logging.INFO)  # Megatron turns it on, on standard output
    if args.picture or args.samples:
        shape = QUICK if args.quick else FULL
        lines = lines_of(shape)
        if args.picture:
            draw_lines(args.picture, shape, lines)
        if args.samples:
            content = {"shape": shape.name, **{side: asdict(line) for side, line in lines.items()}}
            args.samples.write_text(json.dumps(content) + "\n")
        return 0
    return bench.run_rows(NAME, rows, args)


if __name__ == "__main__":
    sys.exit(main())
