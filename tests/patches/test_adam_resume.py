"""What torch's Adam lacks in Megatron's checkpoints: a step count where no step was done, or no state is."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.patches.adam_resume import (
    counting_steps,
    step_counts_apart,
    with_a_step_count,
    with_step_counts_from_the_start,
    without_a_step,
)
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

from .test_fused_adamw import build, one_rank, one_step, take_steps


def assert_same(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.main + ours.moments, theirs.main + theirs.moments, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("by_stock", [False, True], ids=["ours", "stock's"])
@pytest.mark.parametrize("options", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_what_was_saved_before_the_first_step_resumes(options: dict, by_stock: bool) -> None:
    with one_rank():
        model, optimizer = build(**options)
        (inner,) = optimizer.chained_optimizers
        inner.init_state_fn(inner.optimizer, inner.config)  # as Megatron does before it loads
        saved = optimizer.state_dict()
        states = (saved.get("optimizer") or saved)["state"]  # FP32Optimizer saves torch's
        if by_stock:
            for state in states.values():
                del state["step"]
        assert all(("step" in state) is not by_stock for state in states.values())
        model, optimizer = build(**options)
        optimizer.load_state_dict(saved)
        resumed = take_steps(model, optimizer, range(3))
        whole = take_steps(*build(**options), range(3))
    assert_same(resumed, whole)


@pytest.mark.parametrize(
    "options",
    [{"bf16": True}, {"bf16": True, "use_precision_aware_optimizer": True}, {}],
    ids=["plain", "precision_aware", "fp32"],
)
def test_what_a_distributed_optimizer_saves_before_its_first_step_resumes(options: dict) -> None:
    """``--fp16`` skips steps until its loss scale fits."""
    options = {**options, "use_distributed_optimizer": True}
    with one_rank():
        _, optimizer = build(**options)
        (inner,) = optimizer.chained_optimizers
        saved = optimizer.state_dict()
        states = inner.get_parameter_state_dp_zero(use_gloo_comm=False)
        ((bucket,),) = inner.get_parameter_state_dp_reshardable()[0].values()
        model, optimizer = build(**options)
        (inner,) = optimizer.chained_optimizers
        optimizer.load_state_dict(saved)
        inner.load_parameter_state_from_dp_zero(states)
        resumed = take_steps(model, optimizer, range(3))
        whole = take_steps(*build(**options), range(3))
    assert bucket
    assert all({"param", "exp_avg", "exp_avg_sq"} <= row.keys() for row in bucket)
    assert_same(resumed, whole)


@pytest.mark.parametrize("options", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_states_that_were_made_ahead_can_step(options: dict) -> None:
    with one_rank():
        model, optimizer = build(**options)
        (inner,) = optimizer.chained_optimizers
        inner.init_state_fn(inner.optimizer, inner.config)
        stepped = take_steps(model, optimizer, range(3))
        whole = take_steps(*build(**options), range(3))
    assert_same(stepped, whole)


def test_a_state_that_is_made_late_has_the_step_count_of_the_others() -> None:
    """Megatron saves one count for all parameters, and refuses others."""
    optimizer = torch.optim.AdamW([torch.zeros(1), torch.zeros(1)])
    first, second = optimizer.param_groups[0]["params"]
    optimizer.state[first] = {"exp_avg": first, "exp_avg_sq": first, "step": torch.tensor(3.0)}

    def init_states(optimizer: torch.optim.Optimizer, config: object) -> None:
        optimizer.state[second] = {"exp_avg": second, "exp_avg_sq": second}

    def init(self: Any, optimizer: Any, config: Any, init_state_fn: Any) -> None:
        init_state_fn(optimizer, config)

    with_step_counts_from_the_start(init)(None, optimizer, None, init_states)
    assert optimizer.state[second]["step"] == 3.0
    assert optimizer.state[second]["step"] is not optimizer.state[first]["step"]


def test_moments_without_a_step_count_are_refused() -> None:
    with one_rank():
        model, optimizer = build(bf16=True)
        take_steps(model, optimizer, range(2))
        saved = optimizer.state_dict()
        for state in saved["optimizer"]["state"].values():
            del state["step"]
        with pytest.raises(ValueError, match="has moments, but no step count"):
            build(bf16=True)[1].load_state_dict(saved)


@pytest.mark.parametrize("options", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_a_step_count_of_the_group_is_taken(options: dict) -> None:
    """Where Apex's Adam and Transformer Engine's keep it."""
    with one_rank():
        model, optimizer = build(**options)
        take_steps(model, optimizer, range(2))
        saved = optimizer.state_dict()
        inner = saved.get("optimizer") or saved
        for state in inner["state"].values():
            del state["step"]
        for group in inner["param_groups"]:
            group["step"] = 2
        model, optimizer = build(**options)
        optimizer.load_state_dict(saved)
        (torchs,) = (o.optimizer for o in optimizer.chained_optimizers)
    assert {float(state["step"]) for state in torchs.state.values()} == {2.0}
    assert not any("step" in group for group in torchs.param_groups)


def test_a_rank_without_parameters_counts_its_steps() -> None:
    """Upstream looks for the count among the states, and there are none."""

    def step_counts(self: Any) -> set[float]:
        return {state["step"].item() for state in self.optimizer.state_dict()["state"].values()}

    def init(self: Any, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    wrapper = SimpleNamespace()
    counting_steps(init)(wrapper, torch.optim.AdamW([torch.zeros(1)]))
    wrapper.optimizer.param_groups[0]["params"] = []
    assert with_a_step_count(step_counts)(wrapper) == {0.0}
    for _ in range(3):
        wrapper.optimizer.step()
    assert with_a_step_count(step_counts)(wrapper) == {3.0}
    assert not wrapper.optimizer.state
    step_counts_apart(lambda self, saved: None)(
        wrapper, {"optimizer": {"param_groups": [{"step": 7}]}}
    )
    wrapper.optimizer.step()
    assert with_a_step_count(step_counts)(wrapper) == {8.0}


class Lion(torch.optim.Optimizer):
    """As of `emerging_optimizers`, which Megatron takes it from: one moment, no step count."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(moment.lerp(p.grad, 1 - first).sign(), alpha=group["lr"])
                moment.lerp_(p.grad, 1 - second)


class FusedAdam(torch.optim.Optimizer):
    """Counts by group, as Transformer Engine's and Apex's do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = parameter.grad.clone()
                parameter.data *= 1 - group["lr"]


def optimizer_before_a_load(init_states: Any, kind: Any) -> Any:
    """Megatron-FSDP's distributed optimizer, as far as its states go, when they have been made."""
    parameters = [torch.nn.Parameter(torch.full((3,), float(n))) for n in (1, 2)]
    groups = [{"params": [p], "lr": 0.1 * n} for n, p in enumerate(parameters, 1)]
    made = SimpleNamespace(optimizer=kind(groups, {"lr": 1.0, "weight_decay": 0.5}))
    made.accel_step_count = 0
    made.optimizer.register_step_post_hook(
        lambda *_: setattr(made, "accel_step_count", made.accel_step_count + 1)
    )
    init_states(made)
    return made


def check_states_without_a_step() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def adam(groups: Any, defaults: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, **defaults)

    upstream = DistributedOptimizer._init_optimizer_states_with_dummy_values
    stock = optimizer_before_a_load(upstream, adam)
    assert stock.accel_step_count == 1, "upstream is right: remove the patch"
    ours = without_a_step(upstream)
    for kind in (adam, FusedAdam):
        made = optimizer_before_a_load(ours, kind)
        groups = made.optimizer.param_groups
        for number, group in enumerate(groups, 1):
            (parameter,) = group["params"]
            assert torch.equal(parameter, torch.full((3,), float(number))), "it decayed"
            assert parameter.grad is None
            state = made.optimizer.state[parameter]
            assert not state["exp_avg"].any()
            assert float(state.get("step", 0)) == group.get("step", 0) == 0
            assert group["lr"] == 0.1 * number
        assert made.accel_step_count == 0
        before = {p: dict(state) for p, state in made.optimizer.state.items()}
        ours(made)
        assert made.accel_step_count == 0
        for parameter, state in made.optimizer.state.items():
            assert all(state[key] is value for key, value in before[parameter].items())


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_states_that_megatron_fsdp_makes_ahead_of_a_load_come_without_a_step(version: str) -> None:
    run_on(version, check_states_without_a_step)


def build_lion() -> tuple[Any, Any, Any]:
    """A model, its optimizer, and the distributed part of it, as Muon's scalar optimizer makes it."""
    model, optimizer = build(bf16=True, use_distributed_optimizer=True)
    (inner,) = optimizer.chained_optimizers
    inner.config.optimizer = "lion"
    groups = [{**group, "betas": (0.95, 0.98)} for group in inner.optimizer.param_groups]
    inner.optimizer = Lion(groups, lr=1e-2, betas=(0.95, 0.98), weight_decay=0.1)
    for group in groups:  # Megatron makes the states ahead of a load
        for p in group["params"]:
            inner.optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
    return model, optimizer, inner


@pytest.mark.parametrize("steps", [0, 2])
def test_a_distributed_lion_resumes(steps: int) -> None:
    """Upstream asks every optimizer for Adam's step count, if Apex and Transformer Engine are not there."""
    with one_rank():
        model, optimizer, inner = build_lion()
        for step in range(steps):
            one_step(model, optimizer, step)
        saved = optimizer.state_dict()
        assert all("step" not in group for group in saved["optimizer"]["param_groups"])
        later, resumed, its_inner = build_lion()
        with torch.no_grad():
            for mine, other in zip(later.parameters(), model.parameters(), strict=True):
                mine.copy_(other)
        resumed.load_state_dict(saved)
        state = inner.get_parameter_state_dp_zero(use_gloo_comm=False)
        its_inner.load_parameter_state_from_dp_zero(state)
        assert all("step" not in state for state in its_inner.optimizer.state.values())
        for each, its in ((model, optimizer), (later, resumed)):
            for step in range(steps, 4):
                one_step(each, its, step)
        for mine, other in zip(later.parameters(), model.parameters(), strict=True):
            assert mine.equal(other)


def test_an_optimizer_that_counts_by_group_keeps_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Apex and Transformer Engine, which upstream asks for nothing else if they are there."""
    from megatron.core.optimizer import distrib_optimizer

    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    groups = [{"params": [torch.zeros(1)], "step": 5}]
    optimizer = Lion(groups, lr=1.0, betas=(0.9, 0.9), weight_decay=0.0)
    wrapper, loaded = SimpleNamespace(optimizer=optimizer), []
    saved = with_a_step_count(lambda self: {"optimizer": self.optimizer.state_dict()})(wrapper)
    assert saved["optimizer"]["param_groups"][0]["step"] == 5
    step_counts_apart(lambda self, state_dict: loaded.append(state_dict))(wrapper, saved)
    assert loaded == [saved]
    assert optimizer.param_groups[0]["step"] == 5
    assert not optimizer.state


def test_a_hybrid_optimizer_counts_each_parameters_steps() -> None:
    """Upstream gives all of them one step count, which each increments."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    shared = torch.tensor(7.0)

    def load_state_dict(self: Any, state_dict: Any) -> None:
        for state in self.optimizer.state.values():
            state["step"] = shared

    with one_rank():
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        kind = torch.optim.AdamW
        hybrid = HybridDeviceOptimizer(parameters, cpu_optimizer_cls=kind, gpu_optimizer_cls=kind)
        for p in parameters:
            p.grad = torch.ones(3)
        hybrid.step()
        saved = {"optimizer": {"param_groups": [{"step": 7.0}]}}
        step_counts_apart(load_state_dict)(SimpleNamespace(optimizer=hybrid), saved)
        hybrid.step()
        assert [hybrid.state[p]["step"].item() for p in parameters] == [8.0, 8.0]


@pytest.mark.parametrize("distributed", [True, False])
def test_an_adam_of_ours_resumes_beside_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, distributed: bool
) -> None:
    """Whose own counts by group, where upstream looks for the count then, and asks its groups whether to
    correct the bias."""
    from megatron.core.optimizer import distrib_optimizer

    for name in ("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER"):
        monkeypatch.setattr(distrib_optimizer, name, True)
    with one_rank(shared_weights=True):
        options = {"bf16": True, "use_distributed_optimizer": distributed}
        model, optimizer = build(**options)
        (unstarted,) = {g["step"] for g in optimizer.state_dict()["optimizer"]["param_groups"]}
        take_steps(model, optimizer, range(3))
        saved = optimizer.state_dict()
        _, resumed = build(**options)
        resumed.load_state_dict(copy.deepcopy(saved))
        inner = resumed.chained_optimizers[0].optimizer
    assert unstarted == 0
    groups = saved["optimizer"]["param_groups"]
    assert all(type(group["step"]) is int and group["step"] == 3 for group in groups)
    assert all(group["bias_correction"] is True for group in groups)
    assert not any("step" in state for state in saved["optimizer"].get("state", {}).values())
    assert {state["step"].item() for state in inner.state.values()} == {3}
    assert not any("step" in group for group in inner.param_groups), "it would be stale"
