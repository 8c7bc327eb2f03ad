"""What torch's Adam lacks in Megatron's checkpoints: a step count where no step was done, or no state is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.patches.adam_resume import (
    counting_steps,
    step_counts_apart,
    with_a_step_count,
    with_step_counts_from_the_start,
)

from .test_fused_adamw import build, one_rank, take_steps


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
