"""`--accel-shared-weights` under every layout: the losses and gradient norms of stock, digit for digit, also
across checkpoints that one side writes and the other goes on from in another layout."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from . import training
from .test_resume import numbers
from .training import KINDS, train

ITERATIONS, SAVED_AT = 4, 2
SHARED, STOCK = ["--accel-shared-weights"], ["--no-accel-shared-weights"]
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "dp2_loss_scale": ("dense", "--loss-scale 1024"),
    "dp2_distributed_optimizer": ("dense", SHARDED),
    "dp2_gradients_in_bf16": ("dense", "--use-distributed-optimizer --grad-reduce-in-bf16"),
    "tp2_sp_distributed_optimizer": (
        "dense",
        f"--tensor-model-parallel-size 2 --sequence-parallel {SHARDED}",
    ),
    "pp2_tied_embeddings": ("tied", "--pipeline-model-parallel-size 2"),
    "pp2_vpp2_distributed_optimizer": (
        "dense",
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {SHARDED}",
    ),
    "ep2_distributed_optimizer": ("moe", f"--expert-model-parallel-size 2 {SHARDED}"),
}

RESHARDABLE = f"{SHARDED} --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CHECKPOINTS = {
    "plain_torch": ("--ckpt-format torch", "--ckpt-format torch"),
    "plain_tp2_to_pp2": (f"--ckpt-format torch_dist {TP2}", f"--ckpt-format torch_dist {PP2}"),
    "sharded_torch": (f"{SHARDED} --ckpt-format torch", f"{SHARDED} --ckpt-format torch"),
    "sharded_pp2_to_dp2": (f"{RESHARDABLE} {PP2}", RESHARDABLE),
}


Run = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def run(fresh_store: Callable[[], None]) -> Run:
    """Trains with the given flags: loss and gradient norm of each iteration, on the last rank."""

    def call(flags: str, *more: str) -> list[tuple[str, str]]:
        fresh_store()
        return numbers(train(["--bf16", "--train-iters", str(ITERATIONS), *flags.split(), *more]))

    return call


def logs() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(layout: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, flags = LAYOUTS[layout]
    if kind == "tied":
        untied = "--untie-embeddings-and-output-weights"
        monkeypatch.setattr(training, "MODEL", [f for f in training.MODEL if f != untied])
    model = KINDS.get(kind, [])
    expected = run(flags, *model, *STOCK)
    assert run(flags, *model, *SHARED) == expected
    assert len(expected) == ITERATIONS * logs()


@pytest.mark.parametrize("case", CHECKPOINTS)
@pytest.mark.distributed(world_size=2)
def test_each_goes_on_from_the_others_checkpoint(case: str, run: Run) -> None:
    first, then = CHECKPOINTS[case]
    root = Path(os.environ.get("ACCEL_TEST_REFERENCE", tempfile.gettempdir()))
    found = {}
    for saved_by in (STOCK, SHARED):
        folder = root / f"{case}-{saved_by[0].strip('-')}-{os.environ['TORCHELASTIC_RUN_ID']}"
        save = ["--save", str(folder), "--save-interval", str(SAVED_AT)]
        found[saved_by[0], "whole"] = run(first, *saved_by, *save)[SAVED_AT:]
        (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
        for loaded_by in (STOCK, SHARED):
            if loaded_by == SHARED or saved_by == SHARED or first != then:
                found[saved_by[0], loaded_by[0]] = run(then, *loaded_by, "--load", str(folder))
    # Megatron averages the first loss that a process logs into the second
    resumed = [numbers for (_, loaded_by), numbers in found.items() if loaded_by != "whole"]
    norms = [[norm for _, norm in numbers] for numbers in found.values()]
    assert all(numbers == resumed[0] for numbers in resumed)
    assert len(resumed[0]) == (ITERATIONS - SAVED_AT) * logs()
    assert first != then or all(row == norms[0] for row in norms)
