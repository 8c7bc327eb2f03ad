"""`--accel-shared-weights` under Megatron's own optimizers: memory, a step's time, ties, checkpoints.

Memory   what the host allocator holds for a bf16 model of one large layer list after two steps, per parameter
         and rank: weights, masters, moments, gradient buffer; the plain optimizer and the distributed one.
Step     `optimizer.step()` with clipping, sides interleaved in one process, on the same random gradients.
Ties     masters that were a tie in stock's run, and masters that differ from stock's at its end.
Resume   examples/pretrain_gpt.py on two ranks: logged steps after a checkpoint of one side that the other
         goes on from, whose loss or gradient norm is not, digit for digit, that of the uninterrupted run.

Stock is preset off: torch's AdamW and fp32 masters. "whole masters" is accel's one-pass step on these.
"""

import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.testing.bench import OURS, row
from benchmarks import _optimizer
from benchmarks._optimizer import REPOSITORY, SIZE, launch

WHOLE, STOCK = "accel, whole masters", "stock"
SIDES = {
    OURS: {"fused_adamw": True, "shared_weights": True},
    WHOLE: {"fused_adamw": True},
    STOCK: {},
}
SWITCHES = {OURS: "--accel-shared-weights", STOCK: "--no-accel-shared-weights"}
LAYERS, ROUNDS = 24, 12

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


def masters(side: str, model: Any, optimizer: Any) -> list[Tensor]:
    from accel.ops import join_remainder

    if side == OURS:
        states = optimizer.chained_optimizers[0].optimizer.state
        return [join_remainder(p.detach(), states[p]["master_param"]) for p in model.parameters()]
    return [p.main_param.detach() for p in model.parameters()]


def step_rows(rounds: int, layers: int) -> list[dict]:
    """Time, ties, and how far the sides are apart, under the plain optimizer."""
    ties = 0

    def count() -> None:
        nonlocal ties
        for master in masters(STOCK, *built[STOCK]):
            ties += int(((master.view(torch.int32) & 0x1FFFF) == 0x8000).sum())

    with _optimizer.alone():
        built = {}
        for side, options in SIDES.items():
            with _optimizer.enabled(options):
                built[side] = _optimizer.build(layers, distributed=False)
        seconds = _optimizer.take_steps(SIDES, built, rounds, after=count)
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


def memory_target(values: dict[str, float], distributed: bool, ranks: int) -> float:
    """Without the weights' second copy in fp32 masters."""
    return values[STOCK] - (2 / ranks if distributed else 2)


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
            *_optimizer.memory_rows(Path(__file__), layers, Path(name), memory_target),
            *resume_rows(cases, Path(name)),
        ]


def main(argv: list[str] | None = None) -> int:
    return _optimizer.main("shared_weights", SIDES, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
