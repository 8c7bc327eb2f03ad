"""`--accel-swap-attention` and `--fine-grained-activation-offloading`: gradients of stock, fewer bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.feature import Context, choose, read_settings
from accel.memory.swap_plan import FIRST_TIMED
from accel.patches import activation_offloading, swap_attention
from accel.patches.activation_offloading import FineGrainedActivationOffloadingInterface, unseen
from tests.ops.contract import needs_native

from .blocks import HIDDEN, TOKENS, at_once, block, gradients
from .test_fused_adamw import one_rank
from .test_recompute_modules import MOE

ACTIVATION = TOKENS * HIDDEN * 4
SCORES = 4 * TOKENS * TOKENS * 4
"""Bytes of the scores of all heads."""
LAYERS = 4
OFFLOADED = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_attention, "MIN_BYTES", ACTIVATION)


def several(module: Any, count: int = 3) -> list[tuple[list[torch.Tensor], int]]:
    """Micro-batches, the later ones as what the first ones showed has it."""
    return [gradients(module, seed) for seed in range(count)]


def check_same(ours: Any, stock: Any) -> None:
    for (found, _), (expected, _) in zip(ours, stock, strict=True):
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_graphs_of_a_configuration_are_refused() -> None:
    made = swap_attention.choosing(lambda self: None)
    layer = SimpleNamespace(config=SimpleNamespace(cuda_graph_impl="local"))
    with pytest.raises(
        ValueError, match="swap_attention: not with cuda_graph_impl=local: use none"
    ):
        made(layer)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            "computed again as a whole",
        ),
        ({"recompute_granularity": "full", "recompute_method": "block"}, ""),
        ({"recompute_granularity": "selective"}, ""),
        ({"cpu_offloading": True}, ""),
    ],
)
def test_a_configuration_that_leaves_nothing_to_swap_is_told(
    given: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a command line, where it is idle."""
    said: list[str] = []
    monkeypatch.setattr(swap_attention, "log_once", lambda feature, line: said.append(line))
    monkeypatch.setattr(swap_attention.ON, "_value", SimpleNamespace(modules=()))
    layer = SimpleNamespace(config=SimpleNamespace(**given))
    swap_attention.choosing(lambda self: None)(layer)
    assert len(said) == bool(told)
    assert not told or told in said[0]


@needs_native
@pytest.mark.parametrize("modules", ["self_attention", None])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_stocks_and_all_layers_but_the_last_are_swapped(
    modules: str | None, recompute: bool
) -> None:
    with one_rank():
        stock = several(block(LAYERS))
    more = {"recompute_norm": True, "recompute_activation": True} if recompute else {}
    with one_rank(swap_attention="all", swap_attention_modules=modules, **more):
        ours = several(block(LAYERS))
    check_same(ours, stock)
    (_, whole), (_, held) = stock[-1], ours[-1]
    # softmax, its mask and what dropout made of it
    assert whole - held >= (LAYERS - 1) * 2 * SCORES


@needs_native
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_with_megatrons_recomputation(granularity: str) -> None:
    how = {"recompute_granularity": granularity}
    if granularity == "full":
        how |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    with one_rank():
        stock = several(block(LAYERS, **how))
    with one_rank(swap_attention="all"):
        check_same(several(block(LAYERS, **how)), stock)


@needs_native
def test_two_micro_batches_at_once_evaluation_and_a_lost_graph() -> None:
    with one_rank():
        expected = at_once(block(3))
    with one_rank(swap_attention="all"):
        found = at_once(block(3))
    assert len(found) == 2
    assert all(map(torch.equal, found, expected))


def test_nothing_hides_where_the_host_is_the_device(caplog: pytest.LogCaptureFixture) -> None:
    with one_rank():
        stock = several(block(2), 5)
    with one_rank(swap_attention=True):
        ours = several(block(2), 5)
    check_same(ours, stock)
    assert caplog.text.count("nothing is swapped") == 1
    assert abs(ours[-1][1] - stock[-1][1]) < 4096


def test_what_hides_is_swapped_and_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_attention, "rate_of", lambda swap: 1e30)
    with one_rank():
        stock = several(block(LAYERS), 5)
    with one_rank(swap_attention=True, swap_attention_modules="self_attention"):
        ours = several(block(LAYERS), 5)
    check_same(ours, stock)
    assert capsys.readouterr().out.count("swap_attention: 3 of 4 modules are swapped") == 1
    assert stock[-1][1] - ours[-1][1] >= (LAYERS - 1) * 2 * SCORES


def test_a_pass_that_stops_half_way_is_nothing_to_plan_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_attention, "rate_of", lambda swap: 1e30)
    with one_rank(swap_attention=True, swap_attention_modules="self_attention"):
        module = block(LAYERS)
        several(module, FIRST_TIMED)
        last = module.layers[-1]
        forward, last.forward = last.forward, lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            gradients(module)
        last.forward = forward
        assert "swapped" not in capsys.readouterr().out
        several(module, 2)
    assert "swap_attention: 3 of 4 modules are swapped" in capsys.readouterr().out


def test_an_error_in_a_layer_leaves_nothing_open() -> None:
    with one_rank(swap_attention="all"):
        module = block(2)
        attention = module.layers[1].self_attention.core_attention
        forward, attention.forward = attention.forward, lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            gradients(module)
        on = swap_attention.ON.value
        assert (on.chains, on.groups) == ([], [])
        attention.forward = forward
        found, _ = gradients(module)
    with one_rank():
        expected, _ = gradients(block(2))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"swap_attention": "some"}, "'some': give `all`"),
        ({"swap_attention": ["all", "all"]}, "give `all`"),
        ({"swap_attention_modules": "mlp"}, "'mlp' is none of input_norm"),
        ({"swap_attention_modules": ","}, "no module"),
    ],
)
def test_values_that_are_none(given: dict[str, Any], message: str) -> None:
    asked = {"swap_attention": True, **given}
    choices = choose([swap_attention.FEATURE], "off", asked, Context("cpu", "0.19.2"))
    with pytest.raises(ValueError, match=message):
        read_settings(choices, asked)


@pytest.mark.parametrize(
    ("granularity", "method", "idle"),
    [("full", "uniform", True), ("full", "block", False), ("selective", None, False)],
)
def test_layers_that_are_computed_again_have_nothing_to_swap(
    granularity: str, method: str | None, idle: bool
) -> None:
    args = SimpleNamespace(recompute_granularity=granularity, recompute_method=method)
    reason = swap_attention.FEATURE.idle(Context("cpu", "0.19.2", args))
    assert ("--recompute-granularity full" in str(reason)) is idle


def test_two_that_move_the_same_exclude_each_other() -> None:
    args = SimpleNamespace(fine_grained_activation_offloading=True)
    with pytest.raises(ValueError, match="both move"):
        choose(
            [swap_attention.FEATURE],
            "off",
            {"swap_attention": True},
            Context("cpu", "0.19.2", args),
        )


def offloading(module: Any, seed: int, **how: Any) -> tuple[list[torch.Tensor], int]:
    """A micro-batch as Megatron's GPT model runs one."""
    how = {"vp_size": None, "vp_stage": None, "min_offloaded_tensor_size": 1024, **how}
    FineGrainedActivationOffloadingInterface.init_chunk_handler(**how)
    return gradients(module, seed)


@needs_native
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("recompute", [[], ["layernorm"]])
def test_megatrons_own_flag(kind: str, recompute: list[str]) -> None:
    config = {} if kind == "dense" else MOE
    spec = {} if kind == "dense" else {"num_experts": 4, "moe_grouped_gemm": True}
    if recompute:
        config = {**config, "recompute_granularity": "selective", "recompute_modules": recompute}
    asked = {
        "fine_grained_activation_offloading": True,
        "offload_modules": [name for name in OFFLOADED if not recompute or "norm" not in name],
    }
    with one_rank():
        stock = several(block(LAYERS, spec, **config))
        ours = [offloading(block(LAYERS, spec, **config, **asked), seed) for seed in range(3)]
        FineGrainedActivationOffloadingInterface.reset()
    check_same(ours, stock)
    assert stock[0][1] - ours[0][1] >= LAYERS * 2 * SCORES  # the first micro-batch: all go


def test_fractions_and_pipeline_ranks() -> None:
    """`activation_offload_fraction` of what is not last, and what a rank keeps."""
    asked = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    held = {}
    with one_rank():
        for name, how in {
            "all": {},
            "two of three": {"activation_offload_fraction": 0.6},
            "none": {"activation_offload_fraction": 0.0},
            "one kept": {"pp_rank": 1, "delta_offload_bytes_across_pp_ranks": 1},
        }.items():
            FineGrainedActivationOffloadingInterface.reset_instance()
            module = block(LAYERS, **asked)
            offloading(module, 1, **how)
            held[name] = offloading(module, 1, **how)[1]
        plain = gradients(block(LAYERS), 1)[1]
    layer = (held["none"] - held["all"]) / (LAYERS - 1)
    assert abs(held["none"] - plain) < ACTIVATION
    assert layer >= 2 * SCORES
    assert held["one kept"] - held["all"] == pytest.approx(layer, rel=0.05)
    assert held["two of three"] - held["all"] == pytest.approx(layer, rel=0.05)


def test_offloading_can_be_switched_off_for_a_while() -> None:
    asked = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    with one_rank():
        module = block(2, **asked)
        FineGrainedActivationOffloadingInterface.disable_offload()
        off = offloading(module, 1)[1]
        FineGrainedActivationOffloadingInterface.enable_offload()
        assert off - offloading(module, 1)[1] >= 2 * 2 * SCORES


@pytest.mark.parametrize("asked", [True, False])
def test_the_validator_does_not_see_the_flag(asked: bool) -> None:
    args = SimpleNamespace(fine_grained_activation_offloading=asked)
    with unseen(Context("cpu", "0.19.2", args)):
        assert args.fine_grained_activation_offloading is False
    assert args.fine_grained_activation_offloading is asked


def test_the_host_is_bound_where_it_can_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("Please install cuda-python")

    with one_rank():
        activation_offloading.near_the_gpu(missing)()  # nothing to bind to on a CPU
        assert "cuda-python" not in caplog.text
        there = SimpleNamespace(device=torch.device("cuda"))
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", lambda *args, **kwargs: there)
            activation_offloading.near_the_gpu(missing)()
    assert "cuda-python" in caplog.text
