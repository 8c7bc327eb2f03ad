"""`--accel-shared-weights` under every layout: the losses and gradient norms of stock, digit for digit, also
across checkpoints that one side writes and the other goes on from in another layout."""

from __future__ import annotations

import pytest

from .against_stock import FreshStore, check_checkpoints, check_training

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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(layout: str, fresh_store: FreshStore) -> None:
    check_training(*LAYOUTS[layout], SHARED, STOCK, fresh_store)


@pytest.mark.parametrize("case", CHECKPOINTS)
@pytest.mark.distributed(world_size=2)
def test_each_goes_on_from_the_others_checkpoint(case: str, fresh_store: FreshStore) -> None:
    check_checkpoints(case, *CHECKPOINTS[case], SHARED, STOCK, fresh_store)
