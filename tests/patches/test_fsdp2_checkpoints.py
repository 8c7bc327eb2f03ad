"""What `--use-torch-fsdp2` saves and loads of an optimizer, on the first of two ranks that never speak."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.feature import Context
from accel.patches import fsdp2_checkpoints
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

STEPS = 3.0
_IDENTIFIERS = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
}


@contextlib.contextmanager
def two_ranks() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: Any, rows: int = 4) -> torch.nn.Parameter:
    local = torch.ones((rows + 1) // 2, 3)
    return torch.nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((rows, 3)), stride=(3, 1))
    )


def adam(params: list[Tensor]) -> torch.optim.Adam:
    """With the states that Megatron makes ahead of a load, and that `adam_resume` counts from 0."""
    optimizer = torch.optim.Adam([{"params": params, **_IDENTIFIERS}], lr=0.1)
    for param in params:
        zeros = (torch.zeros_like(param.data) for _ in range(2))
        names = ("exp_avg", "exp_avg_sq", "step")
        optimizer.state[param] = dict(zip(names, (*zeros, torch.tensor(0.0)), strict=True))
    return optimizer


def loaded(optimizer: torch.optim.Adam) -> dict[str, Any]:
    """What `dist_checkpointing.load` returns for it."""
    found = optimizer.state_dict()
    moments = {"exp_avg": torch.full((2, 3), 2.0), "exp_avg_sq": torch.full((2, 3), 5.0)}
    state: dict[Any, Any] = {number: {**moments} for number in found["state"]}
    return {**found, "state": {**state, "common_step": torch.tensor(STEPS)}}


def check_loaded(optimizer: torch.optim.Adam) -> None:
    states = list(optimizer.state.values())
    assert len({id(state["step"]) for state in states}) == len(states)
    for state in states:
        assert float(state["step"]) == STEPS
        for name, value in (("exp_avg", 2.0), ("exp_avg_sq", 5.0)):
            assert isinstance(state[name], DTensor)
            assert torch.equal(state[name].to_local(), torch.full((2, 3), value))


def check_states_go_into_the_shards() -> None:
    from megatron.core.optimizer.optimizer import (
        Float16OptimizerWithFloat16Params as Mixed,
    )
    from megatron.core.optimizer.optimizer import FP32Optimizer as Single

    with two_ranks() as mesh:
        single = Single.__new__(Single)
        single.optimizer = adam([sharded(mesh), sharded(mesh)])
        load = fsdp2_checkpoints.into_held_shards(Single.load_state_dict)
        load(single, loaded(single.optimizer))
        check_loaded(single.optimizer)

        mixed = Mixed.__new__(Mixed)
        masters = [sharded(mesh).detach() for _ in range(2)]
        mixed.optimizer, mixed.fp32_from_float16_groups = adam(masters), [masters]
        mixed.config, mixed.grad_scaler = SimpleNamespace(fp16=False), None
        saved = [[torch.full((2, 3), 7.0) for _ in masters]]
        load = fsdp2_checkpoints.into_held_shards(Mixed.load_state_dict)
        load(mixed, {"optimizer": loaded(mixed.optimizer), "fp32_from_fp16_params": saved})
        check_loaded(mixed.optimizer)
        assert all(torch.equal(master.to_local(), saved[0][0]) for master in masters)


def check_parameters_are_found_by_their_shards() -> None:
    from megatron.core.dist_checkpointing.optimizer import get_optim_param_to_id_map

    whole = torch.nn.Parameter(torch.ones(2))
    with two_ranks() as mesh:
        params = [sharded(mesh), whole, sharded(mesh)]
        found = fsdp2_checkpoints.by_held_shards(get_optim_param_to_id_map)(iter(params))
        held = [params[0]._local_tensor, whole, params[2]._local_tensor]
        assert found == {id(tensor): number for number, tensor in enumerate(held)}


def check() -> None:
    """Both, in one process of a version."""
    check_states_go_into_the_shards()
    check_parameters_are_found_by_their_shards()


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_shards_that_are_held_are_found_and_filled(version: str) -> None:
    run_on(version, check)


def test_what_cannot_be_shared_out_evenly_is_refused() -> None:
    with two_ranks() as mesh:
        find = fsdp2_checkpoints.by_held_shards(lambda params: dict(enumerate(map(id, params))))
        with pytest.raises(ValueError, match=r"parameter \[5, 3\] .* on 2 data-parallel ranks"):
            find([sharded(mesh), sharded(mesh, rows=5)])


def test_an_optimizer_of_whole_parameters_loads_as_ever() -> None:
    given = {"state": {}, "param_groups": []}
    for inner in (adam([torch.nn.Parameter(torch.ones(2))]), None):
        seen: list[Any] = []
        load = fsdp2_checkpoints.into_held_shards(lambda self, state_dict: seen.append(state_dict))
        load(SimpleNamespace(optimizer=inner), given)
        assert seen[0] is given


def test_optimizers_are_loaded_behind_sharded_models_alone() -> None:
    from megatron.core.distributed.torch_fully_sharded_data_parallel import (
        TorchFullyShardedDataParallel,
    )

    sharded_model = TorchFullyShardedDataParallel.__new__(TorchFullyShardedDataParallel)
    load = fsdp2_checkpoints.with_optimizers(lambda model, optimizer, **options: options)
    skip = {"skip_load_to_model_and_opt": True, "strict": True}
    assert load([sharded_model], None, **skip) == {"strict": True}
    assert load([torch.nn.Linear(1, 1)], None, **skip) == skip


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (None, None),
        ({"use_torch_fsdp2": True}, None),
        ({"use_torch_fsdp2": False}, "--use-torch-fsdp2 is not given"),
    ],
)
def test_where_it_is_idle(args: dict | None, reason: str | None) -> None:
    given = None if args is None else SimpleNamespace(**args)
    assert fsdp2_checkpoints.FEATURE.idle(Context("cpu", "0.19.2", given)) == reason
