"""Norms whose weights are narrower than what they normalize, as with `--fp32-residual-connection`."""

from __future__ import annotations

import pytest
import torch

from accel.layers.linear import LayerNormLinear
from accel.layers.norm import GatedRMSNorm, LayerNorm, RMSNorm
from accel.ops import layer_norm_ref, rms_norm_ref

N = 24


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_stream_in_fp32_is_normalized_there_and_rounded_once(
    kind: type, zero_centered: bool
) -> None:
    module = kind(N, 1e-3, zero_centered=zero_centered).bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, N, requires_grad=True)
    y = module(x)
    weight = module.weight.float()
    if kind is RMSNorm:
        exact = rms_norm_ref(x, weight, 1e-3, zero_centered=zero_centered)
    else:
        bias = module.bias.float()
        exact = layer_norm_ref(x, weight, bias, 1e-3, zero_centered=zero_centered)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
    y.float().sin().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert {p.grad.dtype for p in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_the_norm_of_a_linear_layer_too(normalization: str) -> None:
    module = LayerNormLinear(N, 7, bias=False, normalization=normalization).bfloat16()
    y = module(torch.randn(3, N))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("before_gate", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_gated_norm_of_groups(groups: int, before_gate: bool, dtype: torch.dtype) -> None:
    size = N // groups
    module = GatedRMSNorm(N, 1e-3, group_size=size, norm_before_gate=before_gate, dtype=dtype)
    torch.nn.init.normal_(module.weight)
    x, z = (torch.randn(2, 5, N).to(dtype).requires_grad_() for _ in range(2))

    def exact(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(z)
        rows = (x if before_gate else x * gate).unflatten(-1, (groups, size))
        normed = torch.nn.functional.rms_norm(rows, (size,), eps=1e-3).flatten(-2) * weight
        return normed * gate if before_gate else normed

    parameters = (x, z, module.weight)
    wide = [t.detach().double().requires_grad_() for t in parameters]
    dy = torch.randn(2, 5, N).to(dtype)
    y, want = module(x, z), exact(*wide)
    assert y.dtype == dtype
    found = torch.autograd.grad(y, parameters, dy)
    expected = torch.autograd.grad(want, wide, dy.double())
    tolerance = 4 * torch.finfo(dtype).eps  # of the norm, its weight, the gate and their product
    for a, b in zip((y, *found), (want, *expected), strict=True):
        terms = len(dy.flatten(0, 1)) if b.ndim == 1 else 1  # that of the weight sums over rows
        error = float((a.double() - b).abs().max())
        assert error <= tolerance * terms * float(b.abs().max())


def test_a_gated_norm_without_a_gate_is_a_norm() -> None:
    module, plain = GatedRMSNorm(N, 1e-3), RMSNorm(N, 1e-3)
    x = torch.randn(3, N)
    assert torch.equal(module(x), plain(x))
    assert list(module.state_dict()) == ["weight"]


def test_groups_of_a_gated_norm_must_divide_it() -> None:
    with pytest.raises(ValueError, match="group_size 7 does not divide hidden_size 24"):
        GatedRMSNorm(N, group_size=7)
