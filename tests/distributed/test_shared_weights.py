"""`--accel-shared-weights` under every layout: the losses and gradient norms of stock, digit for digit, also
across checkpoints that one side writes and the other goes on from in another layout."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.testing.distributed import launch, under_torchrun
from tests.tiers import cases

from .against_stock import FreshStore, check_checkpoints, check_training
from .test_resume import numbers
from .training import MODEL, SCRIPT, train

WITHOUT_TIES = Path(__file__).with_name("stock_without_ties.py")
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


@pytest.mark.parametrize(
    "layout",
    cases(
        LAYOUTS,
        "dp2_loss_scale tp2_sp_distributed_optimizer pp2_tied_embeddings ep2_distributed_optimizer",
    ),
)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(layout: str, fresh_store: FreshStore) -> None:
    check_training(*LAYOUTS[layout], SHARED, STOCK, fresh_store)


@pytest.mark.parametrize("case", cases(CHECKPOINTS, "sharded_pp2_to_dp2"))
@pytest.mark.distributed(world_size=2)
def test_each_goes_on_from_the_others_checkpoint(case: str, fresh_store: FreshStore) -> None:
    check_checkpoints(case, *CHECKPOINTS[case], SHARED, STOCK, fresh_store)


@pytest.mark.distributed(world_size=2)
def test_norm_of_the_weights_is_stocks(fresh_store: FreshStore) -> None:
    """That of the masters, joined for it; each rank has a half of them."""
    flags = ["--bf16", "--use-distributed-optimizer", "--log-params-norm", "--train-iters", "2"]
    ours, stock = (
        [float(norm) for norm in re.findall(r"params norm: (\S+) ", printed)]
        for switch in (SHARED, STOCK)
        for printed in [_printed([*flags, *switch], fresh_store)]
    )
    assert ours == pytest.approx(stock, abs=1.1e-3)  # of what is printed the last digit
    assert len(stock) == 2 * (int(os.environ["RANK"]) == 1)


def _printed(flags: list[str], fresh_store: FreshStore) -> str:
    fresh_store()
    return train(flags)


@pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
def test_200_iterations_are_those_of_stock(tmp_path: Path) -> None:
    """All losses and gradient norms, every weight and every master, bit for bit, beside a stock whose masters
    move where a rounding is a tie. Sooner or later such a move shows in a weight: a stock whose masters stay
    would agree only for as long as none does."""
    steps, end, printed = 200, {}, ""
    for name, script, switch in (("ours", SCRIPT, SHARED), ("stock", WITHOUT_TIES, STOCK)):
        shape = "--num-layers 1 --global-batch-size 2 --bf16 --ckpt-format torch".split()
        shape.append("--no-accel-unbuffered-gradients")  # which need shared weights
        length = ["--train-iters", str(steps), "--save-interval", str(steps)]
        save = ["--save", str(tmp_path / name)]
        printed = launch(1, [str(script), *MODEL, *shape, *length, *save, *switch])
        end[name] = (numbers(printed), *saved(tmp_path / name))
    (log, weights, masters), (expected, stock_weights, stock_masters) = end.values()
    assert log == expected
    assert len(log) == steps
    assert all(map(torch.equal, weights, stock_weights))
    assert all(map(torch.equal, masters, stock_masters))
    ties = int(printed.rpartition("ties: ")[2])
    assert 0 < ties < 2 * steps * sum(m.numel() for m in masters) / 2**17


def saved(folder: Path) -> tuple[list[Any], list[Any]]:
    """Weights and masters of a checkpoint."""
    (path,) = folder.rglob("model_optim_rng.pt")
    state = torch.load(path, weights_only=False)  # our own: it holds Megatron's arguments
    weights = [v for v in state["model"].values() if isinstance(v, torch.Tensor)]
    return weights, [m for group in state["optimizer"]["fp32_from_fp16_params"] for m in group]
