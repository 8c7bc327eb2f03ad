"""Transformer Engine's `TransformerLayer` against the same computed by torch, under its parameters' names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel.layers.stand_in import modules
from accel.layers.transformer_layer import TransformerLayer

SEQUENCE, BATCH, HIDDEN, FFN, HEADS, GROUPS = 6, 2, 16, 24, 4, 2


def layer(**options) -> TransformerLayer:
    torch.manual_seed(1)
    undropped = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    return TransformerLayer(HIDDEN, FFN, HEADS, GROUPS, **{**undropped, **options})


def by_torch(x: Tensor, p: dict[str, Tensor], fused: bool, interleaved: bool) -> Tensor:
    """LayerNorm, GELU, a causal mask and biases, in `[S, B, H]`."""

    def norm(x: Tensor, of: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), p[f"{of}.layer_norm_weight"], p[f"{of}.layer_norm_bias"])

    qkv, mlp = "self_attention.layernorm_qkv", "layernorm_mlp"
    names = [""] if fused else ["query_", "key_", "value_"]
    weight, bias = (
        torch.cat([p[f"{qkv}.{n}{what}"] for n in names]) for what in ("weight", "bias")
    )
    shared = HIDDEN * GROUPS // HEADS
    if fused and interleaved:  # each group's rows: those of its two queries, its key, its value
        rows = torch.arange(len(weight)).view(GROUPS, HEADS // GROUPS + 2, HIDDEN // HEADS)
        order = torch.cat([rows[:, i].flatten() for i in (slice(2), slice(2, 3), slice(3, 4))])
        weight, bias = weight[order], bias[order]
    parts = F.linear(norm(x, qkv), weight, bias).split([HIDDEN, shared, shared], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, HIDDEN // HEADS)).permute(1, 2, 0, 3) for t in parts)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    attended = attended.permute(2, 0, 1, 3).flatten(2)
    x = x + F.linear(attended, p["self_attention.proj.weight"], p["self_attention.proj.bias"])
    inner = F.linear(norm(x, mlp), p[f"{mlp}.fc1_weight"], p[f"{mlp}.fc1_bias"])
    inner = F.gelu(inner, approximate="tanh")
    return x + F.linear(inner, p[f"{mlp}.fc2_weight"], p[f"{mlp}.fc2_bias"])


@pytest.mark.parametrize(("fused", "interleaved"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_output_and_gradients(layout: str, fused: bool, interleaved: bool) -> None:
    options = {"fuse_qkv_params": fused, "qkv_weight_interleaved": interleaved}
    module = layer(attn_input_format=layout, **options)
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    given = x if layout == "sbhd" else x.transpose(0, 1)
    y = module(given)
    y = y if layout == "sbhd" else y.transpose(0, 1)
    want = by_torch(x, parameters, fused, interleaved)
    torch.testing.assert_close(y, want)
    leaves = [x, *parameters.values()]
    found = torch.autograd.grad(y.sin().sum(), leaves)
    for ours, theirs in zip(found, torch.autograd.grad(want.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_weights_made_on_no_device_get_values_later() -> None:
    module, made = layer(device="meta"), layer()
    module.to_empty(device="cpu")
    torch.manual_seed(1)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for (name, ours), theirs in zip(module.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_other_layers(activation: str) -> None:
    module = layer(activation=activation, normalization="RMSNorm", bias=False)
    names = [name for name, _ in module.named_parameters()]
    assert not [name for name in names if "bias" in name]
    y = module(torch.randn(SEQUENCE, BATCH, HIDDEN))
    assert y.shape == (SEQUENCE, BATCH, HIDDEN)
    assert torch.isfinite(y).all()


def test_dropout_is_that_of_training() -> None:
    module = layer(hidden_dropout=0.5)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_what_it_has_not() -> None:
    with pytest.raises(NotImplementedError, match="no set_parallel_mode"):
        layer(set_parallel_mode=True)
    with pytest.raises(ValueError, match="set fuse_qkv_params"):
        layer(fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match="layer_type='decoder'"):
        layer(layer_type="decoder")
    with pytest.raises(ValueError, match="activation='mish'"):
        layer(activation="mish")
    with pytest.raises(ValueError, match="normalization='BatchNorm'"):
        layer(normalization="BatchNorm")


def test_it_is_found_under_the_packages_name() -> None:
    assert modules({}, {})["transformer_engine.pytorch"].TransformerLayer is TransformerLayer
