"""`--use-precision-aware-optimizer` under Megatron's distributed optimizer steps as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel.memory.precision_aware_adam import PrecisionAwareAdam
from accel.patches._param_states import ParamStates
from tests.ops.contract import needs_native

from .test_fused_adamw import build, one_rank, one_step

pytestmark = needs_native
STEPS = 20
STOCK = {"bf16": True, "use_distributed_optimizer": True}
AWARE = {**STOCK, "use_precision_aware_optimizer": True}


def steps(model: Any, optimizer: Any, which: range) -> list[float]:
    norms = []
    for step in which:
        successful, norm, _ = one_step(model, optimizer, step)
        assert successful
        norms.append(norm)
    return norms


def states(model: Any, optimizer: Any) -> dict[str, list[Tensor]]:
    """What Megatron would save, and the model's weights."""
    (inner,) = optimizer.chained_optimizers
    found: dict[str, list[Tensor]] = {"model": [p.detach().clone() for p in model.parameters()]}
    for p in model.parameters():
        for name, value in inner._get_main_param_and_optimizer_states(p).items():
            if name != "step":
                found.setdefault(name, []).append(value.detach().clone())
    return found


def test_it_steps_as_without_and_saves_the_same() -> None:
    with one_rank(fused_adamw=True):
        stock = build(**STOCK)
        norms = steps(*stock, range(STEPS))
        expected = states(*stock)
        aware = build(**AWARE)
        (inner,) = aware[1].chained_optimizers
        assert type(inner.optimizer) is PrecisionAwareAdam
        assert steps(*aware, range(STEPS)) == norms
        found = states(*aware)
        kept = {s["master_param"].dtype for s in inner.optimizer.state.values()}
    assert kept == {torch.int16}
    assert found.keys() == expected.keys() == {"model", "param", "exp_avg", "exp_avg_sq"}
    for name, values in expected.items():
        for ours, theirs in zip(found[name], values, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), name  # no master was a tie


@pytest.mark.parametrize("aware_first", [True, False])
def test_states_move_both_ways(aware_first: bool) -> None:
    first, then = (AWARE, STOCK) if aware_first else (STOCK, AWARE)
    with one_rank(fused_adamw=True):
        whole = build(**first)
        steps(*whole, range(STEPS))
        model, optimizer = build(**first)
        steps(model, optimizer, range(5))
        saved = states(model, optimizer)
        resumed, other = build(**then)
        steps(resumed, other, range(5))  # states of its own, which are replaced
        (inner,) = other.chained_optimizers
        for i, p in enumerate(resumed.parameters()):
            p.data.copy_(saved["model"][i])
            names = ("param", "exp_avg", "exp_avg_sq")
            inner._set_main_param_and_optimizer_states(p, {n: saved[n][i] for n in names})
        steps(resumed, other, range(5, STEPS))
        for name, values in states(*whole).items():
            for ours, theirs in zip(states(resumed, other)[name], values, strict=True):
                assert torch.equal(ours, theirs), name


def test_states_in_fewer_bytes() -> None:
    smaller = {
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.uint8,
    }
    with one_rank():
        model, optimizer = build(**AWARE, **smaller)
        steps(model, optimizer, range(3))
        (inner,) = optimizer.chained_optimizers
        for state in inner.optimizer.state.values():
            assert state["master_param"].dtype == torch.float16
            assert state["exp_avg"].dtype == torch.bfloat16
            assert state["exp_avg_sq"].element_size() == 1
        for p in model.parameters():
            assert p.isfinite().all()
            told = inner._get_main_param_and_optimizer_states(p)
            assert {told[name].dtype for name in ("param", "exp_avg", "exp_avg_sq")} == {
                torch.float32
            }


def test_off_the_flag_is_refused_by_megatron() -> None:
    with (
        one_rank(precision_aware_optimizer=False),
        pytest.raises(RuntimeError, match="requires FusedAdam"),
    ):
        build(**AWARE)


def test_not_with_megatron_fsdp() -> None:
    from types import SimpleNamespace

    from accel.feature import Context
    from accel.patches import precision_aware_optimizer

    prepare = precision_aware_optimizer.FEATURE.prepare
    args = SimpleNamespace(use_precision_aware_optimizer=True, use_megatron_fsdp=False)
    assert not prepare(Context("cpu", "0.19.2", args))
    args.use_megatron_fsdp = True
    with pytest.raises(ValueError, match="need Transformer Engine: accel's Adam takes no shards"):
        prepare(Context("cpu", "0.19.2", args))


def test_states_can_be_moved_before_the_first_step() -> None:
    """With fp16 the first steps may all be skipped."""
    with one_rank():
        model, optimizer = build(**AWARE)
        moved = ParamStates([model], optimizer)
        param = next(model.parameters())
        weight, *moments = moved.whole(param)
    assert torch.equal(weight, param.detach().float().flatten())
    assert not any(moment.any() for moment in moments)
