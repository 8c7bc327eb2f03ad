"""`--accel-moe-load-report` under layouts: stock's numbers, the totals of one rank, each row once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel.parallel.experts import expert_overlap as overlap
from accel.parallel.experts.load import LayerLoad
from accel.patches import moe_load_report
from tests.tiers import cases

from .against_stock import FreshStore
from .test_resume import numbers
from .training import KINDS, _alone, from_checkpoint, reference, train

REPORT = "--accel-moe-load-report 1".split()
CAPACITY = "--moe-expert-capacity-factor 1.0"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "ep2_capacity": ("--expert-model-parallel-size 2", CAPACITY),
    "pp2_recompute": (f"--pipeline-model-parallel-size 2 {RECOMPUTE}", ""),
    "tp2_sp_ep2_evaluation": (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
        " --expert-tensor-parallel-size 1 --eval-interval 1 --eval-iters 2",
        "",
    ),
}
"""And flags that change what is computed."""
LAYERS, EXPERTS, ITERATIONS = 4, 4, 2
EXPERT_BYTES = 4 * 3 * 64 * 128
"""Of three matrices in fp32."""
ROWS = 8 * 64 * 2
"""Of a layer: sequences of an iteration, tokens of each, experts of each token."""


@pytest.mark.parametrize("layout", cases(LAYOUTS, "ep2_capacity pp2_recompute"))
@pytest.mark.distributed(world_size=2)
def test_counts_each_row_once_and_changes_nothing(
    layout: str, fresh_store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    checkpoint, _ = reference("moe")
    flags, changes = LAYOUTS[layout]
    model = [*KINDS["moe"], *changes.split(), *from_checkpoint(checkpoint)]
    model += ["--train-iters", str(ITERATIONS)]
    stock = train([*model, *flags.split()])

    told: list[Sequence[LayerLoad]] = []
    dispatched: list[torch.Tensor] = []
    seen = torch.zeros(EXPERTS, dtype=torch.int64)
    tell, preprocess = moe_load_report._tell, MoEAlltoAllTokenDispatcher.dispatch_preprocess

    def dispatching(self: Any, hidden_states: Any, routing_map: torch.Tensor, probs: Any) -> Any:
        if torch.is_grad_enabled():  # of two passes the second; in evaluation never
            seen.add_(routing_map.sum(0))
        return preprocess(self, hidden_states, routing_map, probs)

    def telling(iteration: int, layers: Sequence[LayerLoad], args: Any) -> None:
        everywhere = seen.clone()
        seen.zero_()
        dist.all_reduce(everywhere)
        dispatched.append(everywhere)
        told.append(layers)
        tell(iteration, layers, args)

    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "dispatch_preprocess", dispatching)
    monkeypatch.setattr(moe_load_report, "_tell", telling)
    fresh_store()
    ours = train([*model, *flags.split(), *REPORT])
    assert numbers(ours) == numbers(stock)
    assert len(dispatched) == ITERATIONS
    if int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) - 1:
        assert told == [[]] * ITERATIONS, "the last rank tells"
        return
    assert len(numbers(ours)) == ITERATIONS
    for layers, everywhere in zip(told, dispatched, strict=True):
        assert [layer.layer for layer in layers] == [1, 2, 3, 4]
        assert [sum(layer.rows) + layer.dropped for layer in layers] == [ROWS] * LAYERS
        assert all((layer.dropped > 0) == bool(changes) for layer in layers)
        assert sum(torch.tensor(layer.rows) for layer in layers).tolist() == everywhere.tolist()
        assert all(sum(layer.ranks) == sum(layer.rows) for layer in layers)
        assert all(len(layer.ranks) == 1 + ("ep2" in layout) for layer in layers)
    # later iterations may route near ties another way
    assert figures(ours) == figures(_alone([*model, *REPORT]))


@pytest.mark.parametrize(
    "price", [["--accel-hot-experts-price", "0"], []], ids=["given", "measured"]
)
@pytest.mark.distributed(world_size=2)
def test_tells_what_copies_of_hot_experts_did(
    price: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whoever asks, and as curves."""
    from megatron.training import global_vars

    checkpoint, _ = reference("moe")
    told: list[Sequence[LayerLoad]] = []
    curves: dict[str, float] = {}
    tell = moe_load_report._tell

    def telling(iteration: int, layers: Sequence[LayerLoad], args: Any) -> None:
        told.append(layers)
        tell(iteration, layers, args)

    board = SimpleNamespace(add_scalar=lambda name, value, _: curves.update({name: value}))
    monkeypatch.setattr(moe_load_report, "_tell", telling)
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: board)
    plans: list[int] = []
    plan = overlap.plan_copies

    def planned(*args: Any) -> Any:
        copies = plan(*args)
        plans.append(len(copies) if torch.is_grad_enabled() else 0)
        return copies

    monkeypatch.setattr(overlap, "plan_copies", planned)
    train(
        [
            *KINDS["moe"],
            *from_checkpoint(checkpoint),
            *"--expert-model-parallel-size 2 --moe-grouped-gemm --train-iters 1".split(),
            *"--accel-moe-overlap --accel-hot-experts 2".split(),
            *price,
            *REPORT,
        ]
    )
    assert len(told) == 1
    assert plans
    if int(os.environ["RANK"]) == 0:
        assert told == [[]]
        return
    found = [layer.copies for layer in told[0] if layer.copies is not None]
    moved = sum(copies.bytes_moved for copies in found)
    assert moved == sum(plans) * 2 * EXPERT_BYTES, "there, and as gradients back"
    if price:
        assert sum(plans) > 0, "no copy is too small to save more than nothing"
    for layer in told[0]:
        if layer.copies is not None:
            assert sum(layer.copies.ranks) == sum(layer.ranks)
            assert layer.copies.seconds_saved != 0
            name = f"accel/moe/layer {layer.layer}"
            assert curves[f"{name}/bytes moved"] == layer.copies.bytes_moved > 0
            assert curves[f"{name}/seconds saved"] == layer.copies.seconds_saved


def figures(log: str) -> list[list[str]]:
    """Of the first table, without what only some layouts have."""
    lines = log.splitlines()
    at = lines.index("accel: loads of experts, iteration 1:")
    rows = [line.split() for line in lines[at + 2 : at + 2 + LAYERS]]
    return [row[:2] + row[4:] for row in rows]
