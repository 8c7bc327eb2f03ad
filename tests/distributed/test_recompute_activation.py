"""`--accel-recompute-activation` under layouts: stock's losses and gradient norms, digit for digit."""

from __future__ import annotations

import pytest

from accel.memory.recompute import Recomputed

from .against_stock import FreshStore, check_training
from .test_host_optimizer import SHARDED

OURS = ["--accel-recompute-activation"]
STOCK = ["--no-accel-recompute-activation"]
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "tp2_sp": ("dense", f"{TP2} {SHARDED}", OURS),
    "pp2_vpp2_one_layer": (
        "dense",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        ["--recompute-activation-function", "--recompute-activation-function-num-layers", "1"],
    ),
    "ep2_and_whole_layers": (
        "moe",
        "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 64"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        OURS,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(
    layout: str, fresh_store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = []
    free = Recomputed.free
    monkeypatch.setattr(Recomputed, "free", lambda *args: freed.append(free(*args)))
    kind, flags, ours = LAYOUTS[layout]
    check_training(kind, flags, ours, STOCK, fresh_store)
    assert sum(freed) > 0
