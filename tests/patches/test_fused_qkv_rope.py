"""Self-attention goes past the views of queries, keys and values where that leads to the same numbers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from accel import session
from accel.ops import qkv_rope
from accel.patches import fused_qkv_rope
from tests.cuda.test_qkv_rope import by_rope
from tests.ops.contract import needs_native
from tests.ops.test_rope import angles, draw

from .test_fused_adamw import one_rank
from .test_values_apart import FEATURES, layer


def attention(**changes):
    """As much of a layer as is asked, with changes of it or of its configuration."""
    from megatron.core.transformer.attention import SelfAttention

    config = SimpleNamespace(num_query_groups=2, fused_single_qkv_rope=False)
    made = {"config": config, "attention_type": "self", "q_layernorm": None, "k_layernorm": None}
    made |= {
        "world_size": 1,
        "layer_number": 1,
        "method": SelfAttention.get_query_key_value_tensors,
    }
    vars(config).update({k: v for k, v in changes.items() if k not in made})
    made |= {k: v for k, v in changes.items() if k in made}
    one = type("Layer", (), {"get_query_key_value_tensors": made.pop("method")})()
    vars(one).update(made)
    return one


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"attention_type": "cross"}, {}),
        ({"method": lambda self: None}, {}),
        ({"q_layernorm": torch.nn.LayerNorm(4)}, {}),
        ({"rotary_interleaved": True}, {}),
        ({"attention_output_gate": True}, {}),
        ({"world_size": 4}, {}),
        ({"yarn_rotary_scaling_factor": 40.0}, {}),
        ({"no_rope_freq": [0, 1], "layer_number": 2}, {}),
        ({}, {"packed_seq_params": object()}),
        ({}, {"inference_context": object()}),
        ({}, {"rotary_pos_emb": None}),
        ({}, {"rotary_pos_emb": (torch.ones(1), torch.ones(1))}),
    ],
    ids=lambda change: next(iter(change), "") if isinstance(change, dict) else None,
)
def test_attention_that_goes_upstreams_way(changes, given):
    freqs = torch.ones(4, 1, 1, 16)
    seen = []
    forward = fused_qkv_rope.past_the_views(
        lambda self, *args, **kwargs: seen.append(self.config.fused_single_qkv_rope)
    )
    forward(attention(), torch.ones(4, 1, 8), None, rotary_pos_emb=freqs)
    one = attention(**changes)
    forward(one, torch.ones(4, 1, 8), None, **{"rotary_pos_emb": freqs, **given})
    assert seen == [True, False]
    assert one.config.fused_single_qkv_rope is False


@needs_native
@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("groups", [4, 2])
def test_self_attention_takes_it_with_the_same_bits(spec, groups, monkeypatch):
    def trained() -> list[Tensor]:
        module = layer(spec, num_query_groups=groups)
        x = draw(6, 2, 64).requires_grad_()
        y, _ = module(x, None, rotary_pos_emb=angles(6, 16))
        y.sin().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

    anywhere = dataclasses.replace(
        fused_qkv_rope.FEATURE, devices=("cpu",), unavailable=lambda context: None
    )
    features = [anywhere if f is fused_qkv_rope.FEATURE else f for f in session.FEATURES]
    monkeypatch.setattr(session, "FEATURES", tuple(features))
    with one_rank(**FEATURES):
        plain = trained()
    calls = []
    monkeypatch.setattr(
        fused_qkv_rope, "qkv_rope", lambda *args: calls.append(args) or qkv_rope(*args)
    )
    with one_rank(**FEATURES, fused_qkv_rope=True):
        ours = trained()
    assert len(calls) == 1
    assert len(ours) == len(plain) > 4
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_angles_of_their_own_for_keys():
    qkv, q_freqs, k_freqs = draw(4, 2, 3, 64), angles(4, 16), angles(5, 16)[1:]
    q, k, v = fused_qkv_rope.apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, [32, 16, 16])
    want = by_rope(qkv, q_freqs, 16)[0], by_rope(qkv, k_freqs, 16)[1], qkv[..., 48:]
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), want, strict=True))
