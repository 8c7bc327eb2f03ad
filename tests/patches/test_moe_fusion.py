"""--moe-permute-fusion and --moe-router-fusion are served without Transformer Engine, as by the unfused
path."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from .moe_layer import CONFIGS, EXPERTS, FLAGS, TOKENS, assert_same, build, one_rank, step

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


@pytest.mark.parametrize("preset", ["off", "fast"])
@pytest.mark.parametrize("name", ["dropless", "sigmoid_groups_and_bias", "sqrtsoftplus"])
def test_a_recorded_choice_is_replayed(name: str, preset: str) -> None:
    with one_rank(preset):
        ours, stock = (recorded_and_replayed(name, fused) for fused in (True, False))
    assert all(map(torch.equal, ours, stock))


def recorded_and_replayed(name: str, fused: bool) -> list[torch.Tensor]:
    """What a router recorded; probabilities and map of passes that replay another choice; and the map of one
    that chooses again."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    layer = build(**CONFIGS[name], moe_enable_routing_replay=True, moe_router_fusion=fused)
    RouterReplay.clear_global_router_replay_instances()
    route, replay = layer.router.routing, layer.router.router_replay
    logits = torch.randn(TOKENS, 1, EXPERTS, generator=seeded(7))
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    chosen = route(logits)[1]
    recorded = replay.get_recorded_indices()
    assert torch.equal(chosen, mapped(recorded))
    others = (recorded + 1) % EXPERTS
    replay.set_target_indices(others)
    found = [recorded]
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        replay.set_router_replay_action(action)
        probs, replayed = route(logits)
        assert torch.equal(replayed, mapped(others))
        found += [probs, replayed]
    assert not replay.replay_backward_list
    replay.clear_router_replay_action()
    return [*found, route(logits)[1]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mapped(indices: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(indices), EXPERTS, dtype=torch.bool).scatter(1, indices, True)


def test_indices_are_given_where_they_are_asked_for() -> None:
    logits = torch.randn(TOKENS, EXPERTS, generator=seeded(8))
    with one_rank("off"):
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        ours, stock = (
            topk_routing_with_score_function(logits, 2, fused=fused, dense_output=True)
            for fused in (True, False)
        )
    assert all(map(torch.equal, ours, stock))
    assert ours[1].shape == (TOKENS, 2)


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
