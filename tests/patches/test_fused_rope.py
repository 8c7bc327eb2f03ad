"""Rotary embedding at Megatron's seam: the flag is served, and every way leads to the kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import accel
from accel.ops import rope
from accel.ops.rope import rope_ref
from accel.testing.tolerance import assert_close_to_baseline

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="transformer_engine is installed",
)


@pytest.fixture(params=["off", "fast"])
def preset(request: pytest.FixtureRequest) -> Iterator[str]:
    accel.enable(preset=request.param)
    yield request.param
    accel.disable()


@pytest.fixture
def fast() -> Iterator[None]:
    accel.enable(preset="fast")
    yield
    accel.disable()


class Rank(SimpleNamespace):
    def size(self) -> int:
        return self.cp_size

    def rank(self) -> int:
        return self.cp_rank


def config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **options)


def angles(num_rows: int, width: int = 16) -> Tensor:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    return RotaryEmbedding(width, rotary_percent=1.0, cp_group=Rank(cp_size=1, cp_rank=0))(num_rows)


def apply(t: Tensor, freqs: Tensor, flag: bool, **options: Any) -> Tensor:
    from megatron.core.models.common.embeddings import rope_utils

    group = options.pop("cp_group", Rank(cp_size=1, cp_rank=0))
    settings = config(apply_rope_fusion=flag, rotary_interleaved=options.pop("interleaved", False))
    return rope_utils.apply_rotary_pos_emb(t, freqs, settings, cp_group=group, **options)


def test_the_flag_is_served(preset: str) -> None:
    """Stock Megatron refuses to build this configuration."""
    q, freqs = torch.randn(6, 2, 4, 16).bfloat16(), angles(6)
    with_flag, without = (apply(q, freqs, flag) for flag in (True, False))
    assert torch.equal(with_flag, without)
    if preset == "off":
        assert torch.equal(without, rope_ref(q, freqs)[0])
    else:
        assert torch.equal(without, rope(q, freqs)[0])


def test_without_accel_the_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):
        config(apply_rope_fusion=True)


@pytest.mark.parametrize("mscale", [1.0, 1.25])
def test_packed_sequences_with_the_flag(preset: str, mscale: float) -> None:
    """YaRN's factor too, which upstream does not pass to the fused function."""
    q, freqs = torch.randn(6, 4, 16), angles(8)
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    options = {"cu_seqlens": cu_seqlens, "cp_group": Rank(cp_size=2, cp_rank=1), "mscale": mscale}
    both = [apply(q, freqs, flag, **options) for flag in (True, False)]
    assert torch.equal(*both)
    want, _ = rope_ref(q, freqs, cu_seqlens=cu_seqlens, cp_size=2, cp_rank=1, mscale=mscale)
    torch.testing.assert_close(both[0], want)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"mscale": 1.25}, "half"),
        ({"interleaved": True}, "interleaved"),
    ],
)
def test_reaches_the_kernel(options: dict[str, Any], layout: Any, fast: None) -> None:
    q, freqs = torch.randn(6, 2, 4, 24).bfloat16(), angles(6)
    got = apply(q, freqs, False, **options)
    assert torch.equal(got, rope(q, freqs, layout=layout, mscale=options.get("mscale", 1.0))[0])


def test_multi_latent_attention_by_either_name(fast: None) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    q, freqs = torch.randn(6, 2, 4, 16), angles(6)
    want, _ = rope(q, freqs, layout="interleaved_to_half")
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    assert torch.equal(rotate(q, freqs, multi_latent_attention=True), want)
    assert torch.equal(rotate(q, freqs, mla_rotary_interleaved=True), want)


def test_what_broadcasts_otherwise_stays_with_megatron(fast: None) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    q = torch.randn(6, 2, 4, 16)
    one_angle = angles(1)
    assert torch.equal(
        rope_utils._apply_rotary_pos_emb_bshd(q, one_angle),
        rope_ref(q, one_angle.expand(6, 1, 1, 16))[0],
    )
    cos, sin = torch.randn(2, 6, 8)
    rotated = rope_utils.apply_rotary_pos_emb_with_cos_sin(q, cos, sin)
    accel.disable()
    assert torch.equal(rotated, rope_utils.apply_rotary_pos_emb_with_cos_sin(q, cos, sin))
    accel.enable(preset="fast")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_stock_forward_and_backward(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 2, 4, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = {}
    for name, preset, precision in (
        ("exact", "off", torch.float64),
        ("stock", "off", dtype),
        ("ours", "fast", dtype),
    ):
        accel.enable(preset=preset)
        leaf = qkv.to(precision).requires_grad_()
        freqs = angles(6).to(torch.float64 if name == "exact" else torch.float32)
        y = apply(leaf[..., 16:32], freqs, True)
        y.backward(qkv[..., :16].to(precision))
        results[name] = (y.detach(), leaf.grad)
        accel.disable()
    for ours, stock, exact in zip(*(results[n] for n in ("ours", "stock", "exact")), strict=True):
        assert_close_to_baseline(ours, stock, exact, roundings=4)
