"""`--accel-memory-budget` under layouts: stock's losses and gradient norms, before the plan and after it."""

from __future__ import annotations

from typing import Any

import pytest

from accel.patches import memory_budget
from accel.patches.memory_budget import Planner
from tests.tiers import cases

from .against_stock import FreshStore, check_training
from .test_host_optimizer import SHARDED

TIGHT = "--accel-memory-budget 0.0001"
"""GiB: everything is computed again, for good."""
LAYOUTS = {
    "tp2_sp": ("dense", f"--tensor-model-parallel-size 2 --sequence-parallel {SHARDED}"),
    "pp2_vpp2": (
        "dense",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "ep2": ("moe", "--expert-model-parallel-size 2 --moe-grouped-gemm"),
}


@pytest.mark.parametrize("layout", cases(LAYOUTS, "pp2_vpp2 ep2"))
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(
    layout: str, share: float, fresh_store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget: a share of what keeping everything adds to the least."""
    decide, largest, names, in_flight = Planner._decide, memory_budget.largest_of_stage, [], []

    def agreed(*figures: Any) -> Any:
        found = largest(*figures)
        everything = sum(costs.num_bytes for _, costs in found.layers)
        memory_budget.ON.value.budget = found.peak + int(share * everything)
        return found

    def observed(self: Planner, passes: Any) -> None:
        decide(self, passes)
        assert self.plan is not None
        names.extend(choice.name for choice in self.plan.choices)
        in_flight.extend(m.in_flight for m in self.layers.values())

    monkeypatch.setattr(memory_budget, "largest_of_stage", agreed)
    monkeypatch.setattr(Planner, "_decide", observed)
    kind, flags = LAYOUTS[layout]
    check_training(kind, flags, TIGHT.split(), [], fresh_store)
    assert len(names) == (2 if "pipeline" in flags else 4)
    assert any(name.startswith("recompute") for name in names)
    assert max(in_flight) > 1 or "pipeline" not in flags
