"""The fused rotation of multi-latent attention against Megatron's unfused one, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import accel
from tests.ops.contract import needs_native

S, B, H, KEPT, TURNED, WIDTH_V = 12, 2, 3, 8, 16, 4
ROWS = 2 * S
"""Of the tables; as many as tokens would mean positions in the pack to upstream."""
STARTS = torch.tensor([0, 4, 12], dtype=torch.int32)


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    accel.enable(preset="off", device="cpu")
    yield
    accel.disable()


def tables() -> tuple[Tensor, Tensor, Tensor]:
    """Angles, and their cosines and sines, as upstream's own cache holds them."""
    half = torch.arange(ROWS)[:, None] * 10000.0 ** -torch.linspace(0, 1, TURNED // 2)
    angles = torch.cat([half, half], dim=-1).view(ROWS, 1, 1, TURNED)
    return angles, angles.cos(), angles.sin()


def unfused(x: Tensor, starts: Tensor | None, rank: int, size: int) -> Tensor:
    from megatron.core.models.common.embeddings import rope_utils

    angles, _, _ = tables()
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    options = {"rotary_interleaved": False, "multi_latent_attention": True}
    if starts is None:
        return rope_utils._apply_rotary_pos_emb_bshd(x, angles[: len(x)], **options)
    return rope_utils._apply_rotary_pos_emb_thd(x, starts, angles, cp_group=group, **options)


@pytest.mark.parametrize(
    ("starts", "rank", "size"),
    [(None, 0, 1), (STARTS, 0, 1), (STARTS, 0, 2), (STARTS, 1, 2)],
    ids=["sbhd", "packed", "packed_rank_0_of_2", "packed_rank_1_of_2"],
)
def test_like_unfused(starts: Tensor | None, rank: int, size: int) -> None:
    from megatron.core.transformer import multi_latent_attention as mla

    leading = (S, B) if starts is None else (S // size,)
    torch.manual_seed(0)
    q = torch.randn(*leading, H, KEPT + TURNED, requires_grad=True)
    kv = torch.randn(*leading, H, KEPT + WIDTH_V, requires_grad=True)
    shared = torch.randn(*leading, 1, TURNED, requires_grad=True)
    _, cos, sin = tables()
    got_q = mla.fused_apply_mla_rope_for_q(q, cos, sin, KEPT, TURNED, starts, rank, size)
    got_k, got_v = mla.fused_apply_mla_rope_for_kv(
        kv, shared, cos, sin, TURNED, KEPT, WIDTH_V, starts, rank, size
    )
    turned = unfused(shared, starts, rank, size).expand(*leading, H, TURNED)
    expected = (
        torch.cat([q[..., :KEPT], unfused(q[..., KEPT:], starts, rank, size)], -1),
        torch.cat([kv[..., :KEPT], turned], -1),
        kv[..., KEPT:],
    )
    got = (got_q, got_k, got_v)
    torch.testing.assert_close(got, expected)
    weights = [torch.randn_like(t) for t in got]
    gradients = [torch.autograd.grad(side, (q, kv, shared), weights) for side in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_half_precision_is_rounded_once() -> None:
    """Forward and backward, of tables that were rounded before."""
    from megatron.core.transformer import multi_latent_attention as mla

    torch.manual_seed(0)
    cos, sin = (table.bfloat16() for table in tables()[1:])
    q = torch.randn(S, B, H, KEPT + TURNED, dtype=torch.bfloat16, requires_grad=True)
    exact = q.detach().double().requires_grad_()
    first, second = exact[..., KEPT::2], exact[..., KEPT + 1 :: 2]
    c, s = (table[:S, ..., : TURNED // 2].double() for table in (cos, sin))
    halves = (first * c - second * s, second * c + first * s)
    expected = torch.cat((exact[..., :KEPT], *halves), -1)
    got = mla.fused_apply_mla_rope_for_q(q, cos, sin, KEPT, TURNED)
    weight = torch.randn_like(got)
    pairs = (
        (got, expected),
        *zip(
            torch.autograd.grad(got, q, weight),
            torch.autograd.grad(expected, exact, weight.double()),
            strict=True,
        ),
    )
    for ours, definition in pairs:
        torch.testing.assert_close(ours.double(), definition, rtol=1.01 * 2**-8, atol=1e-6)


@needs_native
def test_one_kernel_rotates_and_torch_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import multi_latent_attention as mla

    from accel.patches import mla_rope_fusion

    _, cos, sin = tables()
    by_torch, found, made = mla_rope_fusion._rotated_by_torch, [], []

    def rotated(*args: Tensor) -> Tensor:
        made.append(args[0].dtype)
        return by_torch(*args)

    monkeypatch.setattr(mla_rope_fusion, "_rotated_by_torch", rotated)
    for dtype in (torch.float32, torch.float64):
        draw = torch.Generator().manual_seed(0)
        q = torch.randn(S, H, KEPT + TURNED, generator=draw).to(dtype)
        found.append(mla.fused_apply_mla_rope_for_q(q, cos, sin, KEPT, TURNED, STARTS))
    assert made == [torch.float64]
    torch.testing.assert_close(found[0].double(), found[1])


def test_interleaved_output_is_refused() -> None:
    from megatron.core.transformer import multi_latent_attention as mla

    _, cos, sin = tables()
    q = torch.randn(S, B, H, KEPT + TURNED)
    with pytest.raises(ValueError, match="apply_rope_fusion=False"):
        mla.fused_apply_mla_rope_for_q(q, cos, sin, KEPT, TURNED, rotary_interleaved=True)
