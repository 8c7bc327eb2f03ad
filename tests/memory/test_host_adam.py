"""`HostAdam`: the steps of `PrecisionAwareAdam` to the bit, its bytes, and the order of its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.device.cpu import memory
from accel.memory.host_adam import Budget, HostAdam, HostOptions
from accel.memory.lanes import HostLanes
from accel.memory.precision_aware_adam import PrecisionAwareAdam
from tests.ops.contract import needs_native

from .shuffled_lanes import ShuffledLanes

SHAPES = [(3,), (40, 17), (0,), (7, 9), (1,), (260,), (5, 5)]
BUCKET = 128
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
OPTIONS = {"use_decoupled_grad": True}
NAMES = ("master_param", "exp_avg", "exp_avg_sq")


def shuffled(seed: int = 0) -> Callable[[torch.device], ShuffledLanes]:
    return lambda device: ShuffledLanes(seed)


def at_once(device: torch.device) -> HostLanes:
    return HostLanes()


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in SHAPES]


def grouped(params: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": params[:4], "weight_decay": 0.1},
        {"params": params[4:], "weight_decay": 0.0, "lr": 3e-2},
    ]


def on_device(params: list[Tensor], **options: Any) -> PrecisionAwareAdam:
    return PrecisionAwareAdam(grouped(params), **HYPER, **OPTIONS, **options)


def on_host(params: list[Tensor], host: dict[str, Any], **options: Any) -> HostAdam:
    found = HostOptions(**{"bucket_numel": BUCKET, "lanes": at_once, **host})
    return HostAdam(grouped(params), **HYPER, **OPTIONS, **options, host=found)


def give_gradients(params: list[Tensor], step: int, dtype: torch.dtype = torch.float32) -> None:
    """All have one but the second in every second step, and the fourth in none."""
    draw = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=draw).to(dtype)
        p.decoupled_grad = None if i == 3 or (i == 1 and step % 2) else grad


def train(optimizer: Any, params: list[Tensor], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(ours: Any, params: list[Tensor], theirs: Any, expected: list[Tensor]) -> None:
    for i, (p, q) in enumerate(zip(params, expected, strict=True)):
        assert torch.equal(p, q), f"weight {i}"
        assert bool(ours.state[p]) == bool(theirs.state[q])
        if ours.state[p]:
            for name in NAMES:
                a, b = ours.get_unscaled_state(p, name), theirs.get_unscaled_state(q, name)
                assert torch.equal(a, b), f"{name} of {i}"
            assert ours.state[p]["step"] == theirs.state[q]["step"]


@pytest.mark.parametrize("remainders", [True, False], ids=["remainders", "whole masters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ratio", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("lanes", [at_once, shuffled(0), shuffled(1), shuffled(2)])
def test_steps_are_those_of_states_on_the_device(lanes, ratio, dtype, remainders) -> None:
    expected, params = parameters(dtype), parameters(dtype)
    theirs = on_device(expected, store_param_remainders=remainders)
    host = {"lanes": lanes, "ratio": ratio}
    ours = on_host(params, host, store_param_remainders=remainders)
    train(theirs, expected, range(4))
    train(ours, params, range(4))
    assert_same(ours, params, theirs, expected)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_gradients_of_several_dtypes(ratio: float) -> None:
    expected, params = parameters(), parameters()
    theirs, ours = on_device(expected), on_host(params, {"lanes": shuffled(), "ratio": ratio})
    for optimizer, these in ((theirs, expected), (ours, params)):
        for step in range(2):
            give_gradients(these, step, torch.bfloat16)
            these[0].decoupled_grad = these[0].decoupled_grad.float()
            optimizer.step()
    assert_same(ours, params, theirs, expected)


def test_shared_weights_are_stepped_by_the_device() -> None:
    params = parameters()
    params[1].accel_replicated = True
    ours = on_host(params, {"ratio": 1.0})
    train(ours, params, range(1))
    ratios = {p.numel(): ours.ratio(a, torch.float32) for p, a in ours._arenas.items()}
    assert ratios.pop(params[1].numel()) == 0
    assert set(ratios.values()) == {1.0}


@pytest.mark.parametrize("limit", [0, 2_000, 8_000, 100_000])
def test_no_more_than_the_limit_is_on_the_host(limit: int) -> None:
    expected, params = parameters(), parameters()
    params[0].accel_replicated = True  # a second kind
    theirs, ours = on_device(expected), on_host(params, {"budget": Budget(limit)})
    train(theirs, expected, range(2))
    train(ours, params, range(2))
    assert_same(ours, params, theirs, expected)
    kept = sum(arena.num_bytes() for arena in ours._all_arenas())
    assert kept <= limit
    assert (kept > 0) == (limit > 0)
    everything = 12 * sum(p.numel() for p in params)
    assert (len(ours._arenas) == sum(p.numel() > 0 for p in params)) == (limit > 2 * everything)


def test_one_budget_is_for_all_optimizers() -> None:
    """Megatron has one for dense parameters and one for experts."""
    budget = Budget(20_000)
    found = []
    for params in (parameters(), parameters()):
        found.append(on_host(params, {"budget": budget}))
        train(found[-1], params, range(1))
    kept = [sum(arena.num_bytes() for arena in ours._all_arenas()) for ours in found]
    assert sum(kept) == 20_000 - budget.left <= 20_000
    assert min(kept) > 0


def test_two_optimizers_do_not_know_each_other() -> None:
    expected, first, second = parameters(), parameters(), parameters()
    theirs = on_device(expected)
    lanes = ShuffledLanes(5)
    ours = [on_host(p, {"lanes": lambda device: lanes, "ratio": 0.5}) for p in (first, second)]
    for step in range(3):
        train(theirs, expected, range(step, step + 1))
        for optimizer, params in zip(ours, (first, second), strict=True):
            train(optimizer, params, range(step, step + 1))
    for optimizer, params in zip(ours, (first, second), strict=True):
        assert_same(optimizer, params, theirs, expected)


def test_states_put_in_place_of_ours_are_taken_over() -> None:
    """As Megatron does that brings an optimizer back from the host, or loads a step count."""
    expected, params = parameters(), parameters()
    theirs, ours = on_device(expected), on_host(params, {})
    train(theirs, expected, range(1))
    train(ours, params, range(1))
    for optimizer in (theirs, ours):
        for state in optimizer.state.values():
            for name in NAMES:
                state[name] = state[name].clone()
            state["exp_avg"].mul_(0.5)
    for state in ours.state.values():
        state["step"] = int(state["step"])  # FusedAdam's is a number
    train(theirs, expected, range(1, 3))
    train(ours, params, range(1, 3))
    assert_same(ours, params, theirs, expected)
    p = params[1]
    assert ours.state[p]["exp_avg"].data_ptr() == ours._arenas[p].view(p, "exp_avg").data_ptr()


@pytest.mark.parametrize("host", [True, False])
def test_an_fp32_weight_that_gets_other_memory_is_its_master_there(host: bool) -> None:
    expected, params = parameters(torch.float32), parameters(torch.float32)
    theirs = on_device(expected)
    ours = on_host(params, {}) if host else on_device(params)
    train(theirs, expected, range(1))
    train(ours, params, range(1))
    for p in params:
        p.data = p.data.clone()
    train(theirs, expected, range(1, 3))
    train(ours, params, range(1, 3))
    assert_same(ours, params, theirs, expected)


def test_hooks_are_called_once_a_step() -> None:
    PrecisionAwareAdam(parameters())  # torch wraps the `step` of each class that it meets
    params = parameters()
    ours, called = on_host(params, {}), []
    ours.register_step_pre_hook(lambda *_: called.append("before"))
    ours.register_step_post_hook(lambda *_: called.append("after"))
    train(ours, params, range(1))
    assert called == ["before", "after"]


@pytest.mark.parametrize("saved_by_host", [True, False])
@pytest.mark.parametrize("loaded_by_host", [True, False])
def test_a_state_dict_goes_on_to_the_bit(saved_by_host: bool, loaded_by_host: bool) -> None:
    def made(params: list[Tensor], host: bool) -> Any:
        options = {"store_param_remainders": True}
        return on_host(params, {}, **options) if host else on_device(params, **options)

    expected = parameters()
    whole = made(expected, False)
    train(whole, expected, range(3))
    first = parameters()
    half = made(first, saved_by_host)
    train(half, first, range(2))
    saved = copy.deepcopy(half.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    params = [p.detach().clone().requires_grad_() for p in first]
    resumed = made(params, loaded_by_host)
    resumed.load_state_dict(saved)
    train(resumed, params, range(2, 3))
    assert_same(resumed, params, whole, expected)


def test_its_own_state_dict_may_be_loaded_back() -> None:
    """It holds the very tensors that a load writes to."""
    params = parameters()
    ours = on_host(params, {})
    train(ours, params, range(2))
    before = copy.deepcopy(ours.state_dict())
    ours.load_state_dict(ours.state_dict())
    assert str(ours.state_dict()) == str(before)


def test_weights_from_elsewhere_become_the_masters() -> None:
    expected, params = parameters(), parameters()
    theirs, ours = on_device(expected), on_host(params, {})
    for optimizer, these in ((theirs, expected), (ours, params)):
        train(optimizer, these, range(1))
        for p in these:
            p.data.mul_(1.5)
        optimizer.reload_masters()
        train(optimizer, these, range(1, 2))
    assert_same(ours, params, theirs, expected)


def test_no_state_is_a_whole_storage() -> None:
    """Megatron clones views before it writes a checkpoint in the background, while training goes on."""
    param = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    ours = HostAdam([param], **HYPER, **OPTIONS, host=HostOptions())
    ours.initialize_all_states()
    for name in NAMES:
        state = ours.state[param][name]
        assert state.untyped_storage().size() > state.numel() * state.itemsize


def test_nothing_of_torch_is_changed() -> None:
    methods = ("copy_", "cpu", "clone", "detach", "to")
    before = [getattr(torch.Tensor, name) for name in methods]
    params = parameters()
    train(on_host(params, {"ratio": 0.5}), params, range(1))
    assert [getattr(torch.Tensor, name) for name in methods] == before
    assert torch.empty(2).copy_(torch.ones(2)).sum() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exp_avg_dtype": torch.bfloat16}, "exp_avg is torch.bfloat16"),
        ({"master_weight_dtype": torch.float16}, "master_param is torch.float16"),
    ],
)
def test_smaller_states_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_host(parameters(), {}, **options)
    with pytest.raises(ValueError, match=r"within 0 and 1, got 1\.5"):
        HostOptions(ratio=1.5)


def test_these_lanes_find_a_copy_that_is_too_early() -> None:
    found = set()
    for seed in range(20):
        lanes, log = ShuffledLanes(seed), []
        lanes.open()
        first = lanes.run("in", lambda log=log: log.append("in"))
        lanes.run("compute", lambda log=log: log.append("compute"))  # does not wait for it
        lanes.run("out", lambda log=log: log.append("out"), [first])
        lanes.close()
        found.add(tuple(log))
    assert len(found) == 3  # every order in which "in" is before "out"


def test_copies_in_and_out_may_go_on_at_once() -> None:
    """In some order the second bucket comes in before the first one went out."""
    orders = set()
    for seed in range(8):
        lanes = ShuffledLanes(seed)
        params = parameters()
        ours = on_host(params, {"lanes": lambda device, lanes=lanes: lanes, "ratio": 0.0})
        train(ours, params, range(1))
        orders.add(tuple(lanes.log[:2]))
    assert ("states in", "states in") in orders


# The device's bytes

LARGE = 1 << 20


@needs_native
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("ratio", "remainders"), [(0.0, False), (0.5, False), (1.0, False), (0.5, True)]
)
def test_a_step_needs_two_buffers_of_the_device_and_nothing_else(ratio, remainders) -> None:
    params = [torch.zeros(LARGE, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    for p in params:
        p.decoupled_grad = torch.ones(LARGE)
    before = memory.memory_allocated()
    bucket = LARGE // 8
    host = HostOptions(bucket_numel=bucket, ratio=ratio, lanes=at_once)
    options = {**HYPER, **OPTIONS, "store_param_remainders": remainders}
    ours = HostAdam(params, **options, host=host)
    buffers = 0 if ratio == 1 else 2 * bucket * (10 if remainders else 12)
    with memory.limit(before + buffers + (64 << 10)):  # and what is small: step counts
        for _ in range(2):
            ours.step()
    assert memory.memory_allocated() - before < 64 << 10
    with (
        memory.limit(before + 8 * LARGE),
        pytest.raises(torch.OutOfMemoryError, match=str(before + 8 * LARGE)),
    ):
        PrecisionAwareAdam(params, **options).step()


@needs_native
@pytest.mark.usefixtures("counted")
def test_buffers_live_until_the_last_copy_has_read_them() -> None:
    class Watched(HostLanes):
        shares_host_memory = False
        at_close = 0

        def close(self) -> None:
            self.at_close = memory.memory_allocated()

    lanes = Watched()
    param = torch.zeros(LARGE, dtype=torch.bfloat16, requires_grad=True)
    param.decoupled_grad = torch.ones(LARGE)
    host = HostOptions(bucket_numel=LARGE // 4, ratio=0.5, lanes=lambda device: lanes)
    ours = HostAdam([param], **HYPER, **OPTIONS, host=host)
    before = memory.memory_allocated()
    ours.step()
    assert lanes.at_close - before >= 2 * 12 * (LARGE // 4)
    assert memory.memory_allocated() - before < 64 << 10


@needs_native
@pytest.mark.usefixtures("counted")
def test_a_step_without_room_for_its_buffers_changes_nothing() -> None:
    sizes = (LARGE, LARGE // 2)
    params = [torch.zeros(n, dtype=torch.bfloat16, requires_grad=True) for n in sizes]
    for p in params:
        p.decoupled_grad = torch.ones(p.shape)
    budget = Budget(13 * LARGE)  # the larger one
    ours = HostAdam(params, **HYPER, **OPTIONS, host=HostOptions(ratio=0.0, budget=budget))
    ours.initialize_all_states()
    with (
        memory.limit(memory.memory_allocated() + LARGE),
        pytest.raises(torch.OutOfMemoryError),
    ):
        ours.step()
    assert not any(p.any() for p in params)
    assert {float(state["step"]) for state in ours.state.values()} == {0.0}
