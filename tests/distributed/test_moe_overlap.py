"""`--accel-moe-overlap` and `--accel-hot-experts` under every layout: stock's losses and gradient norms, to
1e-6 in fp32."""

from __future__ import annotations

import pytest

from .against_stock import FreshStore, check_training

OVERLAP = ["--accel-moe-overlap", "--accel-moe-overlap-slices", "2"]
HOT = [*OVERLAP, "--accel-hot-experts", "3", "--accel-hot-experts-price", "0"]
STOCK = ["--no-accel-moe-overlap"]

LOCAL = "--transformer-impl local"
GROUPED = "--moe-grouped-gemm"
EP2 = "--expert-model-parallel-size 2"
SHARED = "--moe-shared-expert-intermediate-size 48"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "local": f"{EP2} {LOCAL}",
    "local_grouped_with_permute_fusion": f"{EP2} {LOCAL} {GROUPED} --moe-permute-fusion",
    "te_shaped": f"{EP2} {GROUPED}",
    "one_expert_each": f"{EP2} {LOCAL} --num-experts 2 --moe-router-topk 1",
    "shared_experts": f"{EP2} {GROUPED} {SHARED}",
    "shared_experts_in_steps": f"{EP2} {LOCAL} {SHARED} --moe-shared-expert-overlap",
    "capacity": f"{EP2} {LOCAL} --moe-expert-capacity-factor 0.6",
    "padded_capacity": f"{EP2} {GROUPED} --moe-expert-capacity-factor 1.1 "
    "--moe-pad-expert-input-to-capacity",
    "sharded_optimizer": f"{EP2} {LOCAL} {GROUPED} {SHARDED}",
    "added_to_main_grads": f"{EP2} {GROUPED} {SHARDED} --accel-gradient-accumulation-fusion",
    "recomputed": f"{EP2} {GROUPED} --recompute-granularity selective --recompute-modules moe",
    "recomputed_activation": f"{EP2} {GROUPED} --recompute-granularity selective "
    "--recompute-modules moe_act",
    "tp2_with_whole_experts": f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-tensor-parallel-size 1 {GROUPED} {SHARED}",
    "pp2_without_other_ranks": f"--pipeline-model-parallel-size 2 {LOCAL}",
}
FOUR = {
    "pp2": f"{EP2} --pipeline-model-parallel-size 2 {GROUPED}",
    "ep4": f"--expert-model-parallel-size 4 {LOCAL} --num-experts 8 --moe-router-topk 3",
    "tp2_ep4": "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-tensor-parallel-size 1 {GROUPED} {SHARDED}",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(layout: str, fresh_store: FreshStore) -> None:
    check_training("moe", LAYOUTS[layout], OVERLAP, STOCK, fresh_store, 1e-6, bf16=False)


@pytest.mark.parametrize("layout", ["local", "shared_experts", "added_to_main_grads", "recomputed"])
@pytest.mark.distributed(world_size=2)
def test_hot_experts_train_as_stock(layout: str, fresh_store: FreshStore) -> None:
    check_training("moe", LAYOUTS[layout], HOT, STOCK, fresh_store, 1e-6, bf16=False)


@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("ours", [OVERLAP, HOT], ids=["overlap", "hot"])
@pytest.mark.distributed(world_size=4)
def test_trains_as_stock_on_four(ours: list[str], layout: str, fresh_store: FreshStore) -> None:
    check_training("moe", FOUR[layout], ours, STOCK, fresh_store, 1e-6, bf16=False)


@pytest.mark.distributed(world_size=2)
def test_trains_in_bf16(fresh_store: FreshStore) -> None:
    """Gradients of copies are rounded on their way, so not digit for digit."""
    flags = f"{EP2} {GROUPED} {SHARED} {SHARDED}"
    check_training("moe", flags, HOT, STOCK, fresh_store, 2e-3)


@pytest.mark.parametrize(
    "flags",
    [
        "--overlap-moe-expert-parallel-comm",
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ],
)
@pytest.mark.distributed(world_size=2)
def test_upstreams_own_overlap_runs_without_transformer_engine(
    flags: str, fresh_store: FreshStore
) -> None:
    check_training("moe", f"{EP2} {GROUPED}", flags.split(), [], fresh_store)
