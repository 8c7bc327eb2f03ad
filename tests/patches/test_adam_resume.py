"""What torch's Adam lacks in Megatron's checkpoints: a step count where no step was done, or no state is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.patches.adam_resume import counting_steps, step_counts_apart, with_a_step_count

from .test_fused_adamw import build, one_rank, take_steps


@pytest.mark.parametrize("options", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_what_was_saved_before_the_first_step_resumes(options: dict) -> None:
    with one_rank():
        model, optimizer = build(**options)
        (inner,) = optimizer.chained_optimizers
        inner.init_state_fn(inner.optimizer, inner.config)  # as Megatron does before it saves
        saved = optimizer.state_dict()
        model, optimizer = build(**options)
        optimizer.load_state_dict(saved)
        resumed = take_steps(model, optimizer, range(3))
        whole = take_steps(*build(**options), range(3))
    for ours, theirs in zip(
        resumed.main + resumed.moments, whole.main + whole.moments, strict=True
    ):
        assert torch.equal(ours, theirs)


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
