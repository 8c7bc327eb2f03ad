"""Megatron's optimizers on a list of large layers: what benchmarks of optimizer features share. They run on
whatever accel runs on here."""

import argparse
import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import accel
from accel.testing import bench
from accel.testing.bench import row

sys.path.insert(0, str(bench.CHECKOUT / "examples" / "demo"))
from training import REPOSITORY, launch

__all__ = [
    "REPOSITORY", "SIZE", "Sides", "alone", "build", "enabled", "launch", "main", "memory_rows", "take_steps",
]  # fmt: skip

SIZE = 1024

Sides = Mapping[str, Mapping[str, Any]]
"""Name -> options of `accel.enable`."""

KINDS = {"plain": False, "distributed": True}
"""Megatron's mixed-precision optimizers."""


@contextlib.contextmanager
def enabled(options: Mapping[str, Any]) -> Iterator[None]:
    accel.enable(preset="off", **options)
    try:
        yield
    finally:
        accel.disable()


def build(layers: int, distributed: bool) -> tuple[Any, Any]:
    """A list of square layers in Megatron's DDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    like = {"bias": False, "dtype": torch.bfloat16, "device": torch.cuda.current_device()}
    linear = [torch.nn.Linear(SIZE, SIZE, **like) for _ in range(layers)]
    sharded = {"use_distributed_optimizer": distributed}
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, **sharded),
        torch.nn.Sequential(*linear),
    )
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, weight_decay=0.1, bf16=True, clip_grad=1.0, **sharded
    )
    return model, get_megatron_optimizer(config, [model])


def prepare_step(model: Any, optimizer: Any, seed: int) -> None:
    """Random gradients, the same for each side."""
    optimizer.zero_grad()
    model.zero_grad_buffer()
    torch.cuda.manual_seed(seed)
    for p in model.parameters():
        p.main_grad.normal_()
    model.start_grad_sync()
    model.finish_grad_sync()


def take_steps(
    sides: Sides,
    built: Mapping[str, tuple[Any, Any]],
    rounds: int,
    after: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of `optimizer.step()`, clipping included, the sides in turn; `after` each round."""
    seconds: dict[str, list[float]] = {side: [] for side in built}
    for done in range(rounds):
        for side, (model, optimizer) in built.items():
            with enabled(sides[side]):
                prepare_step(model, optimizer, done)
                torch.cuda.synchronize()
                start = time.perf_counter()
                optimizer.step()
                torch.cuda.synchronize()
                seconds[side].append(time.perf_counter() - start)
        after()
    return seconds


@contextlib.contextmanager
def process_group(**options: Any) -> Iterator[None]:
    accel.enable(preset="off")
    from megatron.core import parallel_state

    dist.init_process_group("nccl", **options)
    parallel_state.initialize_model_parallel()
    accel.disable()
    try:
        yield
    finally:
        dist.destroy_process_group()


def alone() -> contextlib.AbstractContextManager[None]:
    """Megatron's groups with this process alone."""
    return process_group(store=dist.HashStore(), rank=0, world_size=1)


def device_bytes(options: Mapping[str, Any], distributed: bool, layers: int) -> float:
    """Of this rank after two steps, per parameter. The process group is there already."""
    with enabled(options):
        before = torch.cuda.memory_allocated()
        model, optimizer = build(layers, distributed)
        for step in range(2):
            prepare_step(model, optimizer, step)
            optimizer.step()
        optimizer.zero_grad()
        return round((torch.cuda.memory_allocated() - before) / (layers * SIZE * SIZE), 3)


def print_memory(sides: Sides, layers: int) -> None:
    """On each rank of a launch; rank 0 tells."""
    with process_group():
        found = {
            name: {side: device_bytes(options, kind, layers) for side, options in sides.items()}
            for name, kind in KINDS.items()
        }
        if dist.get_rank() == 0:
            print(f"MEMORY {json.dumps(found)}", flush=True)


def memory_rows(
    script: Path,
    layers: int,
    folder: Path,
    target: Callable[[Mapping[str, float], bool, int], float],
) -> list[dict]:
    """`script --memory LAYERS` prints them, on each number of ranks.

    Args:
        target: of bytes per parameter, from those of all sides, whether the optimizer is the distributed one,
            and the number of ranks.
    """
    rows = []
    for ranks in (1, 2):
        log = folder / f"memory{ranks}.log"
        launch(script, ["--memory", str(layers)], log, ranks=ranks)
        printed = re.findall(r"^MEMORY (.*)$", log.read_text(), re.MULTILINE)
        for name, values in json.loads(printed[0]).items():
            method = f"{layers} x {SIZE} x {SIZE} bf16, {ranks} rank(s), after two steps"
            case = f"{name} optimizer, DP {ranks}"
            goal = target(values, KINDS[name], ranks)
            rows.append(row(case, "memory per parameter", "bytes", values, method, target=goal))
    return rows


def main(
    name: str, sides: Sides, rows: Callable[[bool], list[dict]], argv: list[str] | None
) -> int:
    """`bench.run_rows`, and in a launch of `memory_rows` what that one reads."""
    parser = bench.parser(name)
    parser.add_argument("--memory", type=int, metavar="LAYERS", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    logging.disable(logging.INFO)  # Megatron turns it on, on standard output
    if args.memory is not None:
        print_memory(sides, args.memory)
        return 0
    return bench.run_rows(name, rows, args)
