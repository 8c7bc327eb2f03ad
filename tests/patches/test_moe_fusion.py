"""--moe-permute-fusion and --moe-router-fusion are served without Transformer Engine, as by the unfused
path."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from .moe_layer import CONFIGS, EXPERTS, FLAGS, assert_same, build, one_rank, step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="transformer_engine is installed",
)


@pytest.mark.parametrize("preset", ["off", "fast"])
@pytest.mark.parametrize("name", CONFIGS)
def test_flags_compute_what_the_unfused_path_does(name: str, preset: str) -> None:
    with one_rank("off"):
        stock = step(build(**CONFIGS[name]))
    with one_rank(preset):
        assert_same(step(build(**CONFIGS[name], **FLAGS)), stock)


def test_stock_refuses_the_flags() -> None:
    with one_rank("off", moe_fusion=False):
        with pytest.raises(ValueError, match="fused permutation is not available"):
            build(moe_permute_fusion=True)
        with pytest.raises(ValueError, match="is not available"):
            step(build(moe_router_fusion=True))


@pytest.fixture
def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, probabilities and a routing map that leaves experts empty."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(13, 20, generator=generator)
    probs = torch.rand(13, EXPERTS, generator=generator)
    routing_map = probs > 0.6
    routing_map[:, 2:4] = False
    return tokens, probs * routing_map, routing_map


def test_padding_to_a_multiple_comes_off_again(routed) -> None:
    from accel.patches import moe_fusion

    tokens, probs, routing_map = routed
    counts = routing_map.sum(0)
    rows, permuted_probs, row_map, offsets, padded = moe_fusion.fused_permute_and_pad_with_probs(
        tokens, probs, routing_map, counts, 16
    )
    plain, plain_probs, plain_map = moe_fusion.fused_permute_with_probs(tokens, probs, routing_map)
    assert offsets is None
    assert padded.tolist() == [-(-int(c) // 16) * 16 for c in counts]
    real = row_map >= 0
    assert torch.equal(rows[real], plain)
    assert torch.equal(permuted_probs[real], plain_probs)
    assert not rows[~real].any()
    assert not permuted_probs[~real].any()
    back = moe_fusion.fused_unpermute(rows, row_map, probs, tokens.shape)
    assert torch.equal(back, moe_fusion.fused_unpermute(plain, plain_map, probs, tokens.shape))
    with pytest.raises(ValueError, match="restore_shape is needed"):
        moe_fusion.fused_unpermute(rows, row_map)
    with pytest.raises(ValueError, match="pad_offsets must be None"):
        moe_fusion.fused_unpermute(rows, row_map, None, tokens.shape, pad_offsets=counts)


def test_aux_loss_is_megatrons() -> None:
    with one_rank("off"):
        from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

        probs = torch.rand(9, EXPERTS)
        counts = torch.arange(EXPERTS)
        fused, unfused = (
            switch_load_balancing_loss_func(probs, counts, 9, 2, EXPERTS, 0.1, fused=fused)
            for fused in (True, False)
        )
    torch.testing.assert_close(fused, unfused)
