"""`PrecisionAwareAdam`: steps, what its states are kept as and told as, and how they resume."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from accel.device.cpu import memory
from accel.memory.precision_aware_adam import PrecisionAwareAdam
from accel.ops import adamw, join_remainder, split_remainder
from tests.ops.contract import needs_native

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 5
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-11, torch.uint8: 2**-4}
"""Dtype of a state -> the largest relative error of one rounding."""


def parameter(dtype: torch.dtype, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(3, 17, generator=draw) + 0.5).to(dtype).requires_grad_()


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.rand(3, 17, generator=draw) + 0.5).to(dtype) for _ in range(STEPS)]


def made(param: Tensor, **options: object) -> PrecisionAwareAdam:
    groups = [{"params": [param], "weight_decay": HYPER["weight_decay"]}]
    return PrecisionAwareAdam(groups, **HYPER, use_decoupled_grad=True, **options)


def train(optimizer: PrecisionAwareAdam, grads: list[Tensor]) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.decoupled_grad = grad
        optimizer.step()
        optimizer.zero_grad()
        assert param.decoupled_grad is None


def by_master(param: Tensor, grads: list[Tensor], decoupled: bool = True) -> list[Tensor]:
    """Master, moments and model weight as stock has them."""
    master, copy = param.detach().float().clone(), param.detach().clone()
    m, v, step = torch.zeros_like(master), torch.zeros_like(master), torch.tensor(0.0)
    for grad in grads:
        adamw([master], [grad], [m], [v], [step], [copy], **HYPER, decoupled=decoupled)
    return [master, m, v, copy]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remainders", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_with_fp32_states_it_steps_as_stock_does(dtype, remainders, grad_dtype, decoupled) -> None:
    param, grads = parameter(dtype), gradients(grad_dtype)
    expected = by_master(param, grads, decoupled)
    optimizer = made(param, store_param_remainders=remainders, adam_w_mode=decoupled)
    train(optimizer, grads)
    kept = optimizer.state[param]["master_param"]
    assert kept.dtype == (torch.int16 if remainders and dtype == torch.bfloat16 else torch.float32)
    if dtype == torch.float32:
        assert kept.data_ptr() == param.data_ptr()  # no second one
    names = ("master_param", "exp_avg", "exp_avg_sq")
    for name, exact in zip(names, expected[:3], strict=True):
        assert torch.equal(optimizer.get_unscaled_state(param, name), exact), name
    assert torch.equal(param, expected[3])
    assert optimizer.state[param]["step"] == STEPS


@pytest.mark.parametrize(
    ("name", "dtype", "relative"),
    [
        *[("exp_avg", dtype, error) for dtype, error in ROUNDING.items()],
        *[("exp_avg_sq", dtype, error) for dtype, error in ROUNDING.items()],
        ("master_weight", torch.float16, ROUNDING[torch.float16]),
    ],
)
def test_smaller_states_are_rounded_once_a_step(
    name: str, dtype: torch.dtype, relative: float
) -> None:
    param = parameter(torch.bfloat16)
    start, grads = param.detach().float(), gradients()
    expected = by_master(param, grads)
    optimizer = made(param, **{f"{name}_dtype": dtype}, store_param_remainders=True)
    train(optimizer, grads)
    master = optimizer.get_unscaled_state(param, "master_param")
    if name == "master_weight":
        # each step rounds a number below 2, scaled so that the largest is half of fp16's range
        torch.testing.assert_close(master, expected[0], rtol=0, atol=STEPS * 2 * relative)
    else:
        # gradients of one sign and size: an update is at most lr times 1 + what rounding adds to it, in each
        # step once more
        moved = (start - expected[0]).abs().max().item()
        torch.testing.assert_close(master, expected[0], rtol=0, atol=moved * STEPS * relative)
    torch.testing.assert_close(param, master.to(torch.bfloat16), rtol=0, atol=0)


def test_states_are_told_in_fp32_and_taken_back() -> None:
    param = parameter(torch.bfloat16)
    optimizer = made(
        param,
        store_param_remainders=True,
        exp_avg_dtype=torch.float16,
        exp_avg_sq_dtype=torch.uint8,
    )
    train(optimizer, gradients())
    names = ("master_param", "exp_avg", "exp_avg_sq")
    told = {name: optimizer.get_unscaled_state(param, name).clone() for name in names}
    assert {t.dtype for t in told.values()} == {torch.float32}
    other = parameter(torch.bfloat16, seed=3)
    resumed = made(
        other,
        store_param_remainders=True,
        exp_avg_dtype=torch.float16,
        exp_avg_sq_dtype=torch.uint8,
    )
    for name, value in told.items():
        resumed.set_scaled_state(other, name, value)
        assert torch.equal(resumed.get_unscaled_state(other, name), value), name
    assert torch.equal(other, param)  # a master brings its weight


@pytest.mark.parametrize("first", ["step", "reload_masters", "get_unscaled_state"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_that_somebody_has_begun_is_completed(dtype, moments, first) -> None:
    """Programs give moments to parameters that have none, as torch's Adam would have them."""
    grads = gradients()
    begun = {name: g.to(dtype) for name, g in zip(("exp_avg", "exp_avg_sq"), grads, strict=False)}
    options = {
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        "store_param_remainders": True,
    }
    param, expected = parameter(dtype), parameter(dtype)
    optimizer, whole = made(param, **options), made(expected, **options)
    whole.initialize_state(expected)
    for name, value in begun.items():
        optimizer.state[param][name] = value
        whole.set_scaled_state(expected, name, value.float())
    if first == "reload_masters":
        optimizer.reload_masters()
    elif first == "get_unscaled_state":
        assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), param.float())
    train(optimizer, grads[2:])
    train(whole, grads[2:])
    assert torch.equal(param, expected)
    assert optimizer.state[param]["exp_avg"].dtype == whole.state[expected]["exp_avg"].dtype
    for name in ("master_param", *begun):
        values = (o.get_unscaled_state(p, name) for o, p in ((optimizer, param), (whole, expected)))
        assert torch.equal(*values)


def test_remainders_of_transformer_engine_are_taken() -> None:
    """It rounds ties up, also to an odd weight."""
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    weight = torch.tensor([0x3F81], dtype=torch.int16).view(torch.bfloat16)
    param = weight.clone().requires_grad_()
    optimizer = made(param, store_param_remainders=True)
    remainder = torch.tensor([-(2**15)], dtype=torch.int16)
    optimizer.set_scaled_state(param, "master_param", remainder)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), tie)
    assert torch.equal(param, weight)
    assert torch.equal(
        join_remainder(*split_remainder(tie)), torch.nextafter(tie, tie.new_zeros(1))
    )


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_state_dict_resumes_to_the_bit(moments: torch.dtype) -> None:
    grads, options = gradients(), {"store_param_remainders": True, "exp_avg_dtype": moments}
    param = parameter(torch.bfloat16)
    whole = made(param, **options)
    train(whole, grads)

    half = parameter(torch.bfloat16)
    first = made(half, **options)
    train(first, grads[:2])
    state = first.state_dict()
    resumed = half.detach().clone().requires_grad_()
    second = made(resumed, **options)
    second.load_state_dict(state)
    train(second, grads[2:])
    assert torch.equal(resumed, param)
    for name, value in whole.state[param].items():
        kept = second.state[resumed][name]
        same = (
            torch.equal(kept.float(), value.float()) if isinstance(value, Tensor) else kept == value
        )
        assert same, name


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_loaded_groups_need_not_say_how_weights_decay(adam_w_mode: bool) -> None:
    """Transformer Engine's do not."""
    optimizer = made(parameter(torch.bfloat16), adam_w_mode=adam_w_mode)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is adam_w_mode


def test_a_state_of_another_dtype_is_refused_by_name() -> None:
    param = parameter(torch.bfloat16)
    optimizer = made(param)
    train(optimizer, gradients()[:1])
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].bfloat16()
    with pytest.raises(ValueError, match=r"exp_avg of parameter.* kept as torch\.float32"):
        made(parameter(torch.bfloat16)).load_state_dict(state)


def test_a_parameter_without_a_gradient_stays() -> None:
    param = parameter(torch.bfloat16)
    before = param.detach().clone()
    optimizer = made(param, store_param_remainders=True)
    optimizer.step()
    assert torch.equal(param, before)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capturable": True}, "capturable=True"),
        ({"master_weights": False}, "master_weights=False"),
        ({"master_weight_dtype": torch.bfloat16}, "master_weight_dtype=torch.bfloat16: use one of"),
        ({"exp_avg_dtype": torch.float64}, "exp_avg_dtype=torch.float64: use one of"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(parameter(torch.bfloat16), **options)


@needs_native
@pytest.mark.usefixtures("counted")
def test_a_step_needs_no_workspace_and_changes_nobody_elses_names() -> None:
    """A weight and its remainder are joined and split in registers."""
    numel, ceil = 1 << 20, math.ceil
    param = torch.ones(numel, dtype=torch.bfloat16, requires_grad=True)
    optimizer = made(param, store_param_remainders=True)
    param.decoupled_grad = torch.ones(numel)
    optimizer.initialize_state(param)
    with memory.limit(memory.memory_allocated() + (64 << 10)):
        optimizer.step()
    assert optimizer.state[param]["step"] == 1
    assert math.ceil is ceil


@pytest.mark.parametrize(
    "dtypes",
    [
        {"exp_avg_dtype": torch.float16},
        {"exp_avg_dtype": torch.uint8},
        {"exp_avg_sq_dtype": torch.float16},
        {"exp_avg_sq_dtype": torch.uint8},
    ],
    ids=str,
)
def test_moments_fade_to_0_without_a_gradient(dtypes: dict[str, torch.dtype]) -> None:
    """Their divisor with them, which no fp32 number is small enough for at last."""
    param = torch.ones(4, requires_grad=True)
    optimizer = PrecisionAwareAdam([param], lr=1e-2, betas=(0.5, 0.5), **dtypes)
    for step in range(200):
        param.grad = torch.tensor([float(step == 0), 0, 0, 0])
        optimizer.step()
        assert param.isfinite().all(), step
    assert param[0] < 1
    assert torch.equal(param[1:].detach(), torch.ones(3))
