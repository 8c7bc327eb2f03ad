"""Attention keeps its values, not the product that they were cut out of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel.layers import attention
from accel.patches import fused_attention
from tests.ops.contract import needs_native

from .test_fused_adamw import one_rank

TOKENS, BATCH, HIDDEN = 24, 2, 64
FEATURES = {"te_layers": True, "norm": True, "fused_attention": True, "fused_rope": True}


def layer(spec: str, **options: Any) -> Any:
    """A layer's attention, its weights the same each time."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        attention_dropout=0.0,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **options,
    )
    make = {
        "local": gpt_layer_specs.get_gpt_layer_local_spec,
        "te": gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
    }[spec]
    block = make(qk_layernorm=config.qk_layernorm)
    return build_module(block.submodules.self_attention, config, layer_number=1)


def gradients(module: Any, rotated: bool) -> tuple[list[Tensor], bool]:
    """The output and all gradients, and whether the product of queries, keys and values was kept for them."""
    products = []
    module.linear_qkv.register_forward_hook(
        lambda _module, _inputs, out: products.append(StorageWeakRef(out[0].untyped_storage()))
    )
    x = torch.randn(
        TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()
    angles = None
    if rotated:
        width = HIDDEN // 4
        angles = torch.arange(TOKENS * width).view(TOKENS, 1, 1, width).float().sin()
    y, _ = module(x, None, rotary_pos_emb=angles)
    (product,) = products
    kept = not product.expired()
    y.sin().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)], kept


@needs_native
@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize(
    ("options", "rotated", "kept"),
    [
        ({"num_query_groups": 2}, True, False),
        ({}, True, False),
        ({"num_query_groups": 2, "qk_layernorm": True}, True, True),
        ({"num_query_groups": 2}, False, True),
    ],
    ids=["grouped", "a key for each query", "normed", "not rotated"],
)
def test_the_product_is_kept_only_where_it_is_needed(
    spec: str, options: dict[str, Any], rotated: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_rank(**FEATURES):
        ours, found = gradients(layer(spec, **options), rotated)
        assert found is kept
        for module in (attention, fused_attention):
            monkeypatch.setattr(module, "values_apart", lambda query, key, value, config: value)
        viewed, found = gradients(layer(spec, **options), rotated)
        assert found, "else this test shows nothing"
    assert len(ours) > 4
    assert all(map(torch.equal, ours, viewed))


def cut(*shares: int) -> list[Tensor]:
    """Tensors of so many heads, cut out of one product."""
    product = torch.randn(TOKENS, BATCH, sum(shares), 8, requires_grad=True)
    return list((product * 1).split(shares, dim=2))


def test_values_that_share_nothing_or_little_stay_where_they_are() -> None:
    query, key, value = cut(4, 2, 2)
    rotated = query.clone(), key.clone()
    apart = attention.values_apart(*rotated, value, None)
    assert torch.equal(apart, value)
    assert apart.untyped_storage().nbytes() == value.nbytes
    assert attention.values_apart(rotated[0], key, value, None) is value, "the key is in there too"
    assert attention.values_apart(*rotated, apart, None) is apart
    _, most = cut(1, 7)
    assert attention.values_apart(*rotated, most, None) is most
    with torch.no_grad():
        assert attention.values_apart(*rotated, value, None) is value
    assert attention.values_apart(*rotated, value.detach(), None).data_ptr() == value.data_ptr()


@pytest.mark.parametrize("norm", ["qk_layernorm", "qk_l2_norm"])
def test_what_norms_queries_and_keys_keeps_the_product_anyway(norm: str) -> None:
    query, key, value = cut(4, 2, 2)
    rotated = query.clone(), key.clone()
    config = SimpleNamespace(**{norm: True})
    assert attention.values_apart(*rotated, value, config) is value
    setattr(config, norm, False)
    assert attention.values_apart(*rotated, value, config) is not value
