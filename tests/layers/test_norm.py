"""Norms whose weights are narrower than what they normalize, as with `--fp32-residual-connection`."""

from __future__ import annotations

import pytest
import torch

from accel.layers.linear import LayerNormLinear
from accel.layers.norm import LayerNorm, RMSNorm
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
