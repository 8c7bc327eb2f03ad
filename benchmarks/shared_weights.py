"""`--accel-shared-weights` under Megatron's own optimizers: memory, a step's time, ties, checkpoints.

Memory   what the host allocator holds for a bf16 model of one large layer list after two steps, per parameter
         and rank: weights, masters, moments, gradient buffer; the plain optimizer and the distributed one.
Step     `optimizer.step()` with clipping, sides interleaved in one process, on the same random gradients.
Ties     masters that were a tie in stock's run, and masters that differ from stock's at its end.
Resume   examples/pretrain_gpt.py on two ranks: logged steps after a checkpoint of one side that the other
         goes on from, whose loss or gradient norm is not, digit for digit, that of the uninterrupted run.

Stock is preset off: torch's AdamW and fp32 masters. "whole masters" is accel's one-pass step on these.
"""

import argparse
import contextlib
import json
import logging
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel.testing import bench
from accel.testing.bench import OURS, row

sys.path.insert(0, str(bench.CHECKOUT / "examples" / "demo"))
from training import REPOSITORY, launch

WHOLE, STOCK = "accel, whole masters", "stock"
FEATURES = {OURS: ("fused_adamw", "shared_weights"), WHOLE: ("fused_adamw",), STOCK: ()}
SWITCHES = {OURS: "--accel-shared-weights", STOCK: "--no-accel-shared-weights"}
SIZE, LAYERS, ROUNDS = 1024, 24, 12

MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --bf16 --position-embedding-type rope
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --train-iters 6
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 1000 --eval-iters 0
""".split()
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CHECKPOINTS = {
    "plain, torch": "--ckpt-format torch",
    "plain, torch_dist": "--ckpt-format torch_dist",
    "distributed, torch_dist": f"{SHARDED} --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable",
}


@contextlib.contextmanager
def enabled(side: str) -> Iterator[None]:
    accel.enable(preset="off", **dict.fromkeys(FEATURES[side], True))
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
    linear = [torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
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
    draw = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model.zero_grad_buffer()
    for p in model.parameters():
        p.main_grad.normal_(generator=draw)
    model.start_grad_sync()
    model.finish_grad_sync()


def bytes_per_parameter(side: str, distributed: bool, layers: int) -> float:
    """Of this rank. The process group is there already."""
    from accel.device.cpu.memory import memory_allocated

    with enabled(side):
        before = memory_allocated()
        model, optimizer = build(layers, distributed)
        for step in range(2):
            prepare_step(model, optimizer, step)
            optimizer.step()
        optimizer.zero_grad()
        return round((memory_allocated() - before) / (layers * SIZE * SIZE), 3)


@contextlib.contextmanager
def process_group(**options: Any) -> Iterator[None]:
    accel.enable(preset="off")
    from megatron.core import parallel_state

    dist.init_process_group("gloo", **options)
    parallel_state.initialize_model_parallel()
    accel.disable()
    try:
        yield
    finally:
        dist.destroy_process_group()


def masters(side: str, model: Any, optimizer: Any) -> list[Tensor]:
    from accel.ops import join_remainder

    if side == OURS:
        states = optimizer.chained_optimizers[0].optimizer.state
        return [join_remainder(p.detach(), states[p]["master_param"]) for p in model.parameters()]
    return [p.main_param.detach() for p in model.parameters()]


def step_rows(rounds: int, layers: int) -> list[dict]:
    """Time, ties, and how far the sides are apart, under the plain optimizer."""
    seconds: dict[str, list[float]] = {side: [] for side in FEATURES}
    ties = 0
    with process_group(store=dist.HashStore(), rank=0, world_size=1):
        built = {}
        for side in FEATURES:
            with enabled(side):
                built[side] = build(layers, distributed=False)
        for done in range(rounds):
            for side, (model, optimizer) in built.items():
                with enabled(side):
                    prepare_step(model, optimizer, done)
                    start = time.perf_counter()
                    optimizer.step()
                    seconds[side].append(time.perf_counter() - start)
            for master in masters(STOCK, *built[STOCK]):
                ties += int(((master.view(torch.int32) & 0x1FFFF) == 0x8000).sum())
        ends = {side: masters(side, *built[side]) for side in (OURS, WHOLE)}
        pairs = list(zip(ends[OURS], ends[WHOLE], strict=True))
        differ = sum(int((a != b).sum()) for a, b in pairs)
        weights = sum(
            int((a != b).sum())
            for a, b in zip(built[OURS][0].parameters(), built[WHOLE][0].parameters(), strict=True)
        )
    counted = {side: times[2:] for side, times in seconds.items()}
    ratios = [b / a for a, b in zip(counted[OURS], counted[STOCK], strict=True)]
    numel = layers * SIZE * SIZE
    case = f"{layers} x {SIZE} x {SIZE} bf16, plain optimizer"
    method = (
        f"{len(ratios)} interleaved steps, {torch.get_num_threads()} thread(s); median ratio to stock "
        f"{statistics.median(ratios):.3f}"
    )
    medians = {side: 1e3 * statistics.median(times) for side, times in counted.items()}
    checked = f"{rounds} steps of {numel} masters; random ones: 1 in 2^17"
    return [
        row(case, "step", "ms", medians, method, target=medians[STOCK] / 2),
        row(case, "ties met by stock", "masters", {OURS: ties}, checked),
        row(case, "masters unlike whole ones", "masters", {OURS: differ}, checked, target=ties),
        row(case, "weights unlike those of whole masters", "weights", {OURS: weights}, checked),
    ]


def memory_rows(layers: int, folder: Path) -> list[dict]:
    rows = []
    for ranks in (1, 2):
        log = folder / f"memory{ranks}.log"
        launch(Path(__file__), ["--memory", str(layers)], log, ranks=ranks)
        printed = re.findall(r"^MEMORY (.*)$", log.read_text(), re.MULTILINE)
        for name, values in json.loads(printed[0]).items():
            method = f"{layers} x {SIZE} x {SIZE} bf16, {ranks} rank(s), after two steps"
            case = f"{name} optimizer, DP {ranks}"
            target = values[STOCK] - (2 / ranks if name == "distributed" else 2)
            rows.append(row(case, "memory per parameter", "bytes", values, method, target=target))
    return rows


def print_memory(layers: int) -> None:
    """On each rank of a launch; rank 0 tells."""
    with process_group():
        found = {
            name: {
                side: bytes_per_parameter(side, name == "distributed", layers) for side in FEATURES
            }
            for name in ("plain", "distributed")
        }
        if dist.get_rank() == 0:
            print(f"MEMORY {json.dumps(found)}", flush=True)


def resume_rows(cases: dict[str, str], folder: Path) -> list[dict]:
    def train(name: str, *flags: str) -> list[tuple[str, str]]:
        log = folder / f"{name}.log"
        launch(REPOSITORY / "examples" / "pretrain_gpt.py", [*MODEL, *flags], log, ranks=2)
        return re.findall(r"lm loss: (\S+) .*?grad norm: (\S+) ", log.read_text())

    rows = []
    for number, (case, flags) in enumerate(cases.items()):
        whole = {}
        for side, switch in SWITCHES.items():
            saved = folder / f"{number}-{side}"
            save = ["--save", str(saved), "--save-interval", "3"]
            whole[side] = train(f"{number}-{side}", *flags.split(), switch, *save)
            (saved / "latest_checkpointed_iteration.txt").write_text("3")
        for saved_by, loaded_by in ((OURS, OURS), (OURS, STOCK), (STOCK, OURS)):
            load = ["--load", str(folder / f"{number}-{saved_by}")]
            found = train(
                f"{number}-{saved_by}-{loaded_by}", *flags.split(), SWITCHES[loaded_by], *load
            )
            # Megatron averages the first loss that a process logs into the second
            pairs = list(zip(found, whole[STOCK][3:], strict=True))
            differ = sum(
                a[1] != b[1] or (i != 1 and a[0] != b[0]) for i, (a, b) in enumerate(pairs)
            )
            metric = f"resumed steps unlike stock's, saved by {saved_by}, loaded by {loaded_by}"
            rows.append(row(case, metric, "steps", {OURS: differ}, f"{len(pairs)} steps, DP 2"))
    return rows


def rows(quick: bool) -> list[dict]:
    layers = 2 if quick else LAYERS
    cases = dict(list(CHECKPOINTS.items())[-1:]) if quick else CHECKPOINTS
    with tempfile.TemporaryDirectory() as name:
        return [
            *step_rows(4 if quick else ROUNDS, layers),
            *memory_rows(layers, Path(name)),
            *resume_rows(cases, Path(name)),
        ]


def main(argv: list[str] | None = None) -> int:
    parser = bench.parser("shared_weights")
    parser.add_argument("--memory", type=int, metavar="LAYERS", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    logging.disable(logging.INFO)  # Megatron turns it on, on standard output
    if args.memory is not None:
        print_memory(args.memory)
        return 0
    return bench.run_rows("shared_weights", rows, args)


if __name__ == "__main__":
    sys.exit(main())
