"""What `--accel-expert-migration` takes, plans and refuses; trainings: tests/distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accel
from accel.feature import Context
from accel.parallel.experts import load
from accel.parallel.experts.load import LayerLoad
from accel.patches import expert_migration
from accel.patches._param_states import ParamStates
from accel.patches.expert_migration import FEATURE, ON, Migration

SHOWN = {"num_experts": 8, "expert_model_parallel_size": 2}


def context(**args: Any) -> Context:
    return Context("cpu", "0.19.2", SimpleNamespace(**{**SHOWN, **args}))


def test_moves_the_few_that_even_out(capsys: pytest.CaptureFixture[str]) -> None:
    migration = Migration(every=10, threshold=0.08)
    rows = (40, 30, 5, 5, 10, 10, 0, 0)
    orders = migration.orders([LayerLoad(3, rows, (80, 20)), LayerLoad(4, (1,) * 8, (4, 4))])
    assert set(orders) == {3}, "the fourth layer is even"
    order = orders[3]
    assert sorted(order) == list(range(8))
    assert sum(rows[e] for e in order[:4]) <= 55
    assert sum(slot == e for slot, e in enumerate(order)) >= 4
    assert migration.averages[3] == [rows[e] for e in order], "counted by the new numbers"
    assert migration.averages[4] == [1.0] * 8
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("accel: expert_migration, layer 3: 2 experts change ranks, longest over")


def test_averages_before_it_moves() -> None:
    """What one interval loads and the next does not."""
    migration = Migration(every=10, threshold=0.3)
    assert migration.orders([LayerLoad(1, (6, 6, 4, 4), (12, 8))]) == {}
    assert migration.orders([LayerLoad(1, (4, 4, 6, 6), (8, 12))]) == {}
    assert migration.averages[1] == [5.0] * 4


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"moe_router_num_groups": 2}, "groups of experts"),
        ({"moe_router_topk_limited_devices": 2}, "groups of experts"),
        ({"fp8": "hybrid"}, "--fp8"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"moe_router_force_biased": 1.0}, "--moe-router-force-biased"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"optimizer": "sgd"}, "--optimizer sgd"),
        ({"use_layer_wise_distributed_optimizer": True}, "layer-wise"),
        ({}, None),
    ],
)
def test_refuses(args: dict[str, Any], says: str | None) -> None:
    found = FEATURE.refuses(context(**args))
    assert found is None if says is None else says in str(found)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, None),
        ({"num_experts": None}, "there are no experts"),
        ({"expert_model_parallel_size": 1}, "there is one expert-parallel rank"),
    ],
)
def test_idle(args: dict[str, Any], says: str | None) -> None:
    assert FEATURE.idle(context(**args)) == says


@pytest.mark.parametrize("value", [0, -1, "x", 1.5])
def test_refuses_an_interval(value: Any) -> None:
    with pytest.raises(ValueError, match=r"is no number of iterations: give 1 or more"):
        accel.enable(preset="off", expert_migration=value)


@pytest.mark.parametrize("value", [-0.1, "x", float("nan"), float("inf")])
def test_refuses_a_threshold(value: Any) -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        accel.enable(preset="off", expert_migration=1, expert_migration_threshold=value)


def test_counts_only_while_it_is_on() -> None:
    accel.enable(preset="off", expert_migration=5, expert_migration_threshold=0.25)
    try:
        assert (ON.value.every, ON.value.threshold) == (5, 0.25)
        assert len(load.ON) == 1
        assert load.ON[0] is ON.value.recorder
    finally:
        accel.disable()
    assert not ON
    assert not load.ON


def test_refuses_an_optimizer_that_it_does_not_know() -> None:
    class Strange:
        optimizer = object()

    with pytest.raises(ValueError, match=r"Strange cannot be moved .* --use-distributed-optimizer"):
        ParamStates([], Strange())


def test_refuses_states_that_adam_does_not_keep() -> None:
    from megatron.core.optimizer.optimizer import FP32Optimizer

    weight = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    sgd.step()
    config = SimpleNamespace(fp16=False, bf16=False, optimizer_cpu_offload=False)
    optimizer = FP32Optimizer.__new__(FP32Optimizer)
    optimizer.optimizer, optimizer.config = sgd, config
    with pytest.raises(ValueError, match=r"the momentum_buffer \[3\] .* --optimizer adam"):
        ParamStates([], optimizer).whole(weight)


def test_refuses_experts_in_one_tensor() -> None:
    class Experts(torch.nn.Module):
        num_local_experts = 2

        def __init__(self) -> None:
            super().__init__()
            self.weight1 = torch.nn.Parameter(torch.zeros(2, 3))
            self.weight2 = torch.nn.Parameter(torch.zeros(2, 3))

    with pytest.raises(ValueError, match=r"weight1.* of Experts cannot be told from another's"):
        expert_migration._params_of(Experts(), 1)
