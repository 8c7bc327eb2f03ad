"""`--accel-expert-migration`: experts change ranks and training goes on as stock's, to 1e-6 in fp32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from accel.patches import expert_migration
from accel.testing.distributed import under_torchrun
from tests.tiers import cases

from .against_stock import FreshStore, check_training
from .test_resume import numbers
from .training import KINDS, shared_folder, train

OURS = "--accel-expert-migration 1 --accel-expert-migration-threshold 0".split()
LOCAL = "--transformer-impl local"
EP2 = "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
LAYOUTS = {
    "one_after_the_other": f"{EP2} {LOCAL}",
    "grouped_with_expert_bias": f"{EP2} --moe-grouped-gemm {BIAS}",
    "sharded": f"{EP2} --moe-grouped-gemm {SHARDED}",
    "with_copies": f"{EP2} --moe-grouped-gemm --accel-moe-overlap --accel-hot-experts 1 "
    "--accel-hot-experts-price 0",
    "whole_experts": f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm",
}
ROUNDED = {
    "masters": f"{EP2} --moe-grouped-gemm",
    "sharded": f"{EP2} --moe-grouped-gemm {SHARDED}",
    "precision_aware": f"{EP2} --moe-grouped-gemm {SHARDED} --use-precision-aware-optimizer",
    "shared_weights": f"{EP2} --moe-grouped-gemm {SHARDED} --accel-shared-weights",
}
FOUR = {
    "two_replicas_sharded": f"{EP2} --moe-grouped-gemm {SHARDED}",
    "pp2": f"{EP2} --pipeline-model-parallel-size 2 {LOCAL}",
    "gathered_in_the_step": f"{EP2} --moe-grouped-gemm {SHARDED} --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --overlap-param-gather-with-optimizer-step --ckpt-format torch",
    "split_experts": f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-tensor-parallel-size 2 {LOCAL}",
}


@pytest.fixture(autouse=True)
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of each time experts moved, in how many layers; never would be a test of nothing."""
    times: list[int] = []
    migrate = expert_migration.migrate

    def counting(model: Any, states: Any, orders: dict[int, list[int]]) -> None:
        times.append(len(orders))
        migrate(model, states, orders)

    monkeypatch.setattr(expert_migration, "migrate", counting)
    yield times
    assert times or not under_torchrun()


@pytest.mark.parametrize("layout", cases(LAYOUTS, "one_after_the_other with_copies whole_experts"))
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(layout: str, fresh_store: FreshStore) -> None:
    check_training("moe", LAYOUTS[layout], OURS, [], fresh_store, 1e-6, bf16=False)


@pytest.mark.parametrize("layout", cases(ROUNDED, "shared_weights"))
@pytest.mark.distributed(world_size=2)
def test_trains_in_bf16(layout: str, fresh_store: FreshStore) -> None:
    """A token's sum over its experts is rounded in another order."""
    check_training("moe", ROUNDED[layout], OURS, [], fresh_store, 2e-3)


@pytest.mark.parametrize("layout", cases(FOUR, "gathered_in_the_step"))
@pytest.mark.distributed(world_size=4)
def test_trains_as_stock_on_four(layout: str, fresh_store: FreshStore) -> None:
    check_training("moe", FOUR[layout], OURS, [], fresh_store, 1e-6, bf16=False)


@pytest.mark.parametrize("sharded", ["", SHARDED], ids=["plain", "sharded"])
@pytest.mark.distributed(world_size=2)
def test_stock_goes_on_from_its_checkpoint(sharded: str, fresh_store: FreshStore) -> None:
    folder = shared_folder(f"migrated-{bool(sharded)}")
    flags = [*KINDS["moe"], *EP2.split(), *LOCAL.split(), *sharded.split(), "--train-iters", "5"]
    fresh_store()
    whole = numbers(train([*flags, *OURS, "--save", str(folder), "--save-interval", "2"]))
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    fresh_store()
    resumed = numbers(train([*flags, "--load", str(folder)]))
    if int(os.environ["RANK"]) == 1:
        norms, losses = ([float(each[at]) for each in resumed] for at in (1, 0))
        assert norms == pytest.approx([float(norm) for _, norm in whole[2:]], rel=1e-6)
        # Megatron averages the first loss that a process logs into the second
        expected = [float(whole[at][0]) for at in (2, 4)]
        assert losses[::2] == pytest.approx(expected, rel=1e-6)
