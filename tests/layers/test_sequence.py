"""Transformer Engine's operations in a `Sequential`, as Megatron's grouped experts are made of them."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from accel.layers import stand_in
from accel.ops.activation import activation_ref

ops = stand_in.modules({}, {})["transformer_engine.pytorch.ops"]
E, K, F = 3, 6, 8
COUNTS = torch.tensor([5, 0, 4])
KINDS = {
    "swiglu": (ops.ScaledSwiGLU, {}),
    "swiglu_in_blocks": (lambda: ops.ScaledSwiGLU(glu_interleave_size=4), {}),
    "quick_geglu": (
        lambda: ops.ScaledClampedQGeGLU(limit=0.5),
        {"clamp_value": 0.5, "offset": 1.0},
    ),
    "squared_relu": (ops.ScaledSReLU, {}),
}


def grouped(n: int, k: int, **options: bool) -> torch.nn.Module:
    op = ops.GroupedLinear(E, k, n, device="meta", dtype=torch.float64, **options)
    for e in range(E):
        op.register_parameter(f"weight{e}", parameter(n, k))
        if op.use_bias:
            op.register_parameter(f"bias{e}", parameter(n))
    return op


def parameter(*size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(size, dtype=torch.float64))


def by_expert(op: torch.nn.Module, x: Tensor, scales: Tensor | None = None) -> Tensor:
    """The definition of correct."""
    rows = []
    for e, x_e in enumerate(x.split(COUNTS.tolist())):
        y = x_e @ op.get_parameter(f"weight{e}").T
        if op.use_bias:
            bias = op.get_parameter(f"bias{e}").expand_as(y)
            y = y + (bias if scales is None else bias * scales.split(COUNTS.tolist())[e][:, None])
        rows.append(y)
    return torch.cat(rows)


def in_halves(x: Tensor, block: int) -> Tensor:
    """Gate and up, which alternate in blocks."""
    blocks = x.split(block, dim=-1)
    return torch.cat([*blocks[::2], *blocks[1::2]], dim=-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_experts_are_one_mlp_for_each_group(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    make, options = KINDS[kind]
    width = F if kind == "squared_relu" else 2 * F
    fc1, fc2 = grouped(width, K, bias=bias), grouped(K, F, bias=bias, scale_bias=bias)
    x, probs = parameter(9, K), parameter(9)
    extra = (COUNTS, probs, COUNTS, *([probs] if bias else []))
    y = ops.Sequential(fc1, make(), fc2)(x, *extra)

    h = by_expert(fc1, x)
    if kind == "swiglu_in_blocks":
        h = in_halves(h, 4)
    name = kind.removesuffix("_in_blocks")
    expected = by_expert(fc2, activation_ref(name, h, None, probs, **options), probs)
    torch.testing.assert_close(y, expected)
    inputs = [x, probs, *fc1.parameters(), *fc2.parameters()]
    dy = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, dy),
        torch.autograd.grad(expected, inputs, dy, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_delayed_gradient_is_the_same_one() -> None:
    op = grouped(K, F, bias=False, delay_wgrad_compute=True)
    assert op.need_backward_dw()
    x = torch.randn(9, F, dtype=torch.float64)
    by_expert(op, x).sum().backward()
    expected = [op.get_parameter(f"weight{e}").grad for e in range(E)]
    op.zero_grad()
    op(x.requires_grad_(), COUNTS).sum().backward()
    assert op.get_parameter("weight0").grad is None
    op.backward_dw()
    for e in range(E):
        torch.testing.assert_close(op.get_parameter(f"weight{e}").grad, expected[e])


def test_inputs_that_belong_to_no_piece_are_refused() -> None:
    with pytest.raises(TypeError, match="1 of 2 extra inputs"):
        ops.Sequential(ops.ScaledSReLU())(torch.zeros(2, 4), torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("op", [ops.ScaledSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU])
def test_megatron_finds_what_it_would_pass(op: type) -> None:
    """It leaves out what is not in the signature, without a word."""
    assert "activation_recompute_in_mlp" in inspect.signature(op).parameters
    with pytest.raises(NotImplementedError, match="has no activation_recompute_in_mlp"):
        op(activation_recompute_in_mlp=True)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ops.GroupedLinear(E, K, F, single_grouped_weight=True), "single_grouped_weight"),
        (lambda: ops.ScaledClampedQGeGLU(alpha=1.0), "alpha"),
    ],
)
def test_what_is_not_there_is_refused_by_name(make, named: str) -> None:
    with pytest.raises(NotImplementedError, match=f"has no {named}"):
        make()
