"""`--cpu-offloading-num-layers`: gradients of stock, and what the first layers save is not on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.feature import Context, choose
from accel.patches import cpu_offloading, swap_attention
from accel.patches.cpu_offloading import FEATURE, OffloadedLayers, get_cpu_offload_context
from tests.ops.contract import needs_native

from .blocks import HIDDEN, TOKENS, at_once, block, gradients
from .test_fused_adamw import one_rank
from .test_recompute_modules import MOE
from .test_swap_attention import SCORES, check_same, several

LAYERS = 4


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_offloading, "MIN_BYTES", TOKENS * HIDDEN * 4)


def offloaded(num_layers: int, **config: Any) -> dict[str, Any]:
    return {"cpu_offloading": True, "cpu_offloading_num_layers": num_layers, **config}


@needs_native
@pytest.mark.parametrize("config", [{}, MOE], ids=["dense", "moe"])
def test_gradients_are_stocks_and_so_many_layers_are_gone(config: dict[str, Any]) -> None:
    spec = {"num_experts": 4, "moe_grouped_gemm": True} if config else {}
    with one_rank():
        stock = several(block(LAYERS, spec, **config))
        one = several(block(LAYERS, spec, **config, **offloaded(1)))
        three = several(block(LAYERS, spec, **config, **offloaded(3)))
    check_same(one, stock)
    check_same(three, stock)
    held = [bytes_ for (_, bytes_) in (stock[-1], one[-1], three[-1])]
    # softmax, its mask and what dropout made of it
    assert held[0] - held[1] >= 2 * SCORES
    assert held[1] - held[2] == pytest.approx(2 * (held[0] - held[1]), rel=0.1)


@needs_native
def test_layers_of_the_transformer_engine_spec() -> None:
    mla = {"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32}
    with one_rank():
        stock = several(block(LAYERS, **mla))
        ours = several(block(LAYERS, **mla, **offloaded(2)))
    check_same(ours, stock)
    assert ours[-1][1] < stock[-1][1]


def test_two_micro_batches_at_once_evaluation_and_a_lost_graph() -> None:
    with one_rank():
        expected, found = at_once(block(3)), at_once(block(3, **offloaded(2)))
    assert len(found) == 2
    assert all(map(torch.equal, found, expected))


def test_an_error_in_a_layer_leaves_nothing_open() -> None:
    with one_rank():
        module = block(3, **offloaded(2))
        attention = module.layers[1].self_attention.core_attention
        forward, attention.forward = attention.forward, lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            gradients(module)
        assert module.offload_context.chain is None
        attention.forward = forward
        found, _ = gradients(module)
        expected, _ = gradients(block(3))
    assert all(map(torch.equal, found, expected))


def test_without_the_flag_there_is_no_context() -> None:
    with one_rank():
        module = block(2)
        assert not isinstance(module.offload_context, OffloadedLayers)
        assert module.config._cpu_offloading_context is None


def test_what_is_to_be_offloaded(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="set cpu_offloading_activations"):
        get_cpu_offload_context(True, 2, 4, False, False)
    assert not caplog.text
    context, _ = get_cpu_offload_context(True, 2, 4, False, True)
    assert context.num_layers == 0
    context, _ = get_cpu_offload_context(True, 2, 4, True, True)
    assert context.num_layers == 2
    assert caplog.text.count("weights stay") == 2


def test_hybrid_models_are_told_that_nothing_moves() -> None:
    for given, lines in (
        ({"cpu_offloading_num_layers": 2, "hybrid_layer_pattern": "M*"}, 1),
        ({"cpu_offloading_num_layers": 2, "hybrid_layer_pattern": None}, 0),
        ({"cpu_offloading_num_layers": 0, "hybrid_override_pattern": "M*"}, 0),
    ):
        said = FEATURE.prepare(Context("cpu", "0.19.2", SimpleNamespace(**given)))
        assert len(said) == lines


def test_two_that_move_the_same_exclude_each_other() -> None:
    context = Context("cpu", "0.19.2", SimpleNamespace(cpu_offloading_num_layers=2))
    with pytest.raises(ValueError, match="--cpu-offloading-num-layers exclude each other: both"):
        choose([swap_attention.FEATURE], "off", {"swap_attention": True}, context)
