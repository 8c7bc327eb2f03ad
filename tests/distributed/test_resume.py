"""A resumed run is the uninterrupted one: dropout, data order, optimizer, step counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from accel.testing.distributed import launch, under_torchrun
from tests.tiers import cases

from .training import MODEL, SCRIPT

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
CASES = {
    "one_rank_dropout": (1, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "dp2_distributed_optimizer_bf16": (2, "--bf16 --use-distributed-optimizer"),
    "dp2_fully_reshardable_fp32": (
        2,
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist",
    ),
    # there are norms of which a rank holds nothing
    "dp4_megatron_fsdp_bf16": (
        4,
        "--num-layers 1 --bf16 --no-gradient-accumulation-fusion --use-megatron-fsdp"
        " --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor",
    ),
}
SKIPS = """
    --num-layers 1 --fp16 --initial-loss-scale 16777216 --hysteresis 1 --use-distributed-optimizer
    --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist --train-iters 7 --lr-decay-iters 7
""".split()


@pytest.mark.parametrize("case", cases(CASES, "one_rank_dropout dp2_distributed_optimizer_bf16"))
def test_resumed_run_equals_the_uninterrupted_one(case: str, tmp_path: Path) -> None:
    ranks, flags = CASES[case]
    check_resumption(ranks, flags.split(), tmp_path)


def test_a_run_that_skipped_all_its_steps_resumes(tmp_path: Path) -> None:
    command = [str(SCRIPT), *MODEL, *SKIPS]
    whole = numbers(launch(1, [*command, "--save", str(tmp_path), "--save-interval", "2"]))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = numbers(launch(1, [*command, "--load", str(tmp_path)]))
    assert 2 <= len(whole) <= 5, "the loss scale is as large as it should not be"
    assert [norm for _, norm in resumed] == [norm for _, norm in whole]
    assert resumed[-1] == whole[-1]


def check_resumption(
    ranks: int, flags: list[str], folder: Path, first: Sequence[str] = (), then: Sequence[str] = ()
) -> None:
    """A run with the flags `first` is gone on with from its second iteration with `then`: to the same end."""
    command = [str(SCRIPT), *MODEL, *flags, "--train-iters", "5", "--lr-decay-iters", "5"]
    save = ["--save", str(folder), "--save-interval", "2"]
    whole = numbers(launch(ranks, [*command, *first, *save]))
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = numbers(launch(ranks, [*command, *then, "--load", str(folder)]))
    assert len(whole) == 5
    assert len(resumed) == 3
    # Megatron averages the first loss that a process logs into the second, so that one is left out
    assert [norm for _, norm in resumed] == [norm for _, norm in whole[2:]]
    assert [resumed[i][0] for i in (0, 2)] == [whole[i][0] for i in (2, 4)]


def numbers(log: str) -> list[tuple[str, str]]:
    """Loss and gradient norm of each logged iteration, as printed."""
    return re.findall(r"lm loss: (\S+) .*?grad norm: (\S+) ", log)
