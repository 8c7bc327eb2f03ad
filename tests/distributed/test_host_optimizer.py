"""`--accel-host-optimizer` under layouts: the losses and gradient norms of states on the device, digit for
digit, also across checkpoints that one side writes and the other goes on from in another layout."""

from __future__ import annotations

import os

import pytest

from accel.memory.host_adam import HostAdam
from tests.tiers import cases

from .against_stock import FreshStore, check_checkpoints, check_training
from .test_shared_weights import CHECKPOINTS, SHARDED

HALF = ["--accel-host-optimizer", "--accel-host-optimizer-ratio", "0.5"]
STOCK = ["--no-accel-host-optimizer"]
SHARED = ["--accel-shared-weights"]
LAYOUTS = {
    "dp2_loss_scale": ("dense", "--loss-scale 1024", HALF, STOCK),
    "dp2_distributed_optimizer_and_shared_weights": (
        "dense",
        SHARDED,
        [*HALF, *SHARED],
        [*STOCK, *SHARED],
    ),
    "pp2_tied_embeddings_and_a_size_for_each_stage": (
        "tied",
        f"--pipeline-model-parallel-size 2 {SHARDED}",
        ["--virtual-optimizer", "0.0005", "all"],
        STOCK,
    ),
    "ep2_precision_aware_optimizer": (
        "moe",
        f"--expert-model-parallel-size 2 {SHARDED} --use-precision-aware-optimizer",
        ["--swap-optimizer"],
        STOCK,
    ),
}
EXPERTS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    f" --expert-tensor-parallel-size 1 {SHARDED}"
)
OF_FOUR = {
    "dp4": ("dense", SHARDED),
    "dp2_tp2_ep2": ("moe", EXPERTS),
    "pp2_tp2_ep2": ("moe", f"--pipeline-model-parallel-size 2 {EXPERTS}"),
}
CASES = ("plain_tp2_to_pp2", "sharded_torch", "sharded_pp2_to_dp2")


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes on the host at each step of a `HostAdam`."""
    found: list[int] = []
    take_step = HostAdam._take_step

    def recorded(self: HostAdam) -> None:
        take_step(self)
        found.append(sum(arena.num_bytes() for arena in self._all_arenas()))

    monkeypatch.setattr(HostAdam, "_take_step", recorded)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=2)
def test_trains_as_with_states_on_the_device(
    layout: str, fresh_store: FreshStore, stepped: list[int]
) -> None:
    check_training(*LAYOUTS[layout], fresh_store)
    assert stepped, "states were on the device"
    assert min(stepped) > 0
    if layout.startswith("pp2") and os.environ["RANK"] == "0":
        assert max(stepped) <= 0.0005 * 2**30


@pytest.mark.parametrize("layout", cases(OF_FOUR, "dp2_tp2_ep2"))
@pytest.mark.distributed(world_size=4)
def test_four_ranks_with_shared_weights_train_as_stock(
    layout: str, fresh_store: FreshStore, stepped: list[int]
) -> None:
    stock = [*STOCK, "--no-accel-shared-weights"]
    check_training(*OF_FOUR[layout], [*HALF, *SHARED], stock, fresh_store)
    assert stepped, "states were on the device"


@pytest.mark.parametrize("case", cases(CASES, "sharded_torch"))
@pytest.mark.distributed(world_size=2)
def test_each_goes_on_from_the_others_checkpoint(case: str, fresh_store: FreshStore) -> None:
    check_checkpoints(case, *CHECKPOINTS[case], HALF, STOCK, fresh_store)
