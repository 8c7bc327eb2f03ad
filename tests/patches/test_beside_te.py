"""Every feature where Transformer Engine is installed: what it has itself is idle, what its layers and its
optimizer do without says so, all else is as without it."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys

import pytest

from accel import upstream
from accel.feature import Choice, Context, active, choose, taken_by_others
from accel.patches import FEATURES, moe_overlap, swap_attention
from accel.patching import plan
from accel.start_up import table
from tests import any_library
from tests.versions import output_with

TES_OWN = {
    "te_layers",
    "local_spec",
    "moe_fusion",
    "rope_fusion",
    "recompute_modules",
    "activation_offloading",
    "cpu_offloading",
    "precision_aware_optimizer",
    "packs_over_ranks",
}
ASIDE = {
    *("norm", "fused_norm", "fused_attention", "fused_softmax", "fused_rope", "grouped_gemm"),
    "fused_adamw",
}
"""Active, for layers and optimizers that are not Transformer Engine's."""
ANYWHERE = {"fused_cross_entropy", "linear_cross_entropy"}
"""Some of those that are active on both devices."""


@pytest.fixture(scope="module")
def args() -> argparse.Namespace:
    """Of an empty command line, which asks for Transformer Engine's layers."""
    from megatron.training.arguments import add_megatron_arguments

    found = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    assert found.transformer_impl == "transformer_engine"
    return found


def choices(
    installed: bool, context: Context, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Choice]:
    with monkeypatch.context() as patch:
        patch.setattr(upstream, "_apex_installed", lambda: False)
        for name, module in list(sys.modules.items()):
            if name.startswith("accel.") and hasattr(module, "te_installed"):
                patch.setattr(module, "te_installed", lambda: installed)
        return {c.feature.name: c for c in choose(FEATURES, "max", {}, context)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_transformer_engine_has_is_idle_and_all_else_as_without(
    device: str, args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(device, "0.19.2", args)
    without = choices(False, context, monkeypatch)
    beside = choices(True, context, monkeypatch)
    idle = {n for n, c in beside.items() if "transformer_engine is installed" in c.reason}
    assert idle == {n for n in TES_OWN if device in beside[n].feature.devices}
    assert {beside[name].state for name in idle} == {"idle"}
    assert without["te_layers"].state == without["local_spec"].state == "active"
    for name in beside.keys() - idle - ASIDE:
        assert beside[name] == without[name], name
    for name in ASIDE:
        assert (without[name].state, without[name].reason) == ("active", ""), name
        assert beside[name].state == "active"
        told = "not (in Transformer Engine's layers|in the steps of|for --apply-rope-fusion)"
        assert re.match(told, beside[name].reason)
    assert {beside[name].state for name in ANYWHERE} == {"active"}
    status = {
        **{"device": device, "device_reason": "asked for", "megatron": "0.19.2"},
        **{"preset": "max", "patches": []},
        "features": {
            n: {"asked": c.asked, "state": c.state, "reason": c.reason} for n, c in beside.items()
        },
    }
    rows = table(status).splitlines()[1:]
    told = {row.split()[1] for row in rows if row.endswith(": transformer_engine is installed")}
    assert told == idle


def test_layers_of_the_local_spec_are_not_transformer_engines(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = argparse.Namespace(**{**vars(args), "transformer_impl": "local"})
    beside = choices(True, Context("cuda", "0.19.2", local), monkeypatch)
    assert {name for name in ASIDE if beside[name].reason} == {"fused_adamw", "fused_rope"}


def test_what_is_asked_for_by_name_and_cannot_be_is_no_rest(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that nobody keeps is an error under `--accel-strict`."""
    local = argparse.Namespace(**{**vars(args), "transformer_impl": "local"})
    monkeypatch.setattr(upstream, "te_installed", lambda: True)
    context = Context("cpu", "0.19.2", local)
    for wishes in ({"memory_budget": 1.0}, {"recompute_norm": True}):
        (name,) = wishes
        chosen = {c.feature.name: c for c in choose(FEATURES, "off", wishes, context)}
        assert chosen[name].state == "skipped"
        assert "Transformer Engine is installed" in chosen[name].reason
        with pytest.raises(ValueError, match=r"--accel-strict: --accel-.*it computes again"):
            choose(FEATURES, "off", wishes, context, strict=True)


def test_swapped_tensors_would_cost_transformer_engines_weights_their_gradients(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "te_installed", lambda: True)
    wish = {"swap_attention": ["all"]}
    theirs = argparse.Namespace(**{**vars(args), "overlap_grad_reduce": True})
    with pytest.raises(ValueError, match="not in Transformer Engine's layers with --overlap-grad"):
        choose(FEATURES, "off", wish, Context("cuda", "0.19.2", theirs))
    for change in ({"transformer_impl": "local"}, {"overlap_grad_reduce": False}):
        allowed = argparse.Namespace(**{**vars(theirs), **change})
        assert swap_attention.FEATURE.refuses(Context("cuda", "0.19.2", allowed)) is None


def test_its_grouped_experts_are_refused_at_the_start(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "te_installed", lambda: True)
    grouped = {"moe_grouped_gemm": True, "num_experts": 4, "expert_model_parallel_size": 2}
    grouped |= {"moe_token_dispatcher_type": "alltoall"}
    theirs = argparse.Namespace(**{**vars(args), **grouped})
    with pytest.raises(ValueError, match="Transformer Engine's grouped experts multiply"):
        choose(FEATURES, "off", {"moe_overlap": True}, Context("cuda", "0.19.2", theirs))
    theirs.transformer_impl = "local"
    assert moe_overlap.FEATURE.refuses(Context("cuda", "0.19.2", theirs)) is None


TE = ("transformer_engine", "transformer_engine_torch")
APEX = ("apex", "amp_C", "fused_weight_gradient_mlp_cuda")


def print_plans(libraries: tuple[str, ...]) -> None:
    """Whether the patches of all that is active fit together, on each device, in each spec and preset."""
    any_library.install(*libraries)
    from megatron.core.extensions import transformer_engine
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer import attention
    from megatron.training.arguments import add_megatron_arguments

    assert transformer_engine.HAVE_TE is ("transformer_engine" in libraries)
    assert attention.HAVE_FUSED_QKV_ROPE is ("transformer_engine" in libraries)
    assert distrib_optimizer.HAVE_APEX_OR_TE
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    features = [dataclasses.replace(f, unavailable=lambda context: None) for f in FEATURES]
    for device, impl, preset in itertools.product(
        ("cpu", "cuda"), ("transformer_engine", "local"), ("off", "fast", "max")
    ):
        args = parser.parse_args(["--transformer-impl", impl, "--bf16"])
        context = Context(device, upstream.megatron_version() or "", args)
        on = active(choose(features, preset, {}, context, taken=taken_by_others))
        plan([patch for feature in on for patch in feature.patches])
        print(device, impl, preset, "fused_qkv_rope" in {feature.name for feature in on})


@pytest.mark.parametrize(
    ("version", "libraries"),
    [("0.19.2", TE), ("0.19.2", APEX), ("0.18.2", TE + APEX), ("0.17.1", TE + APEX)],
    ids=["te", "apex", "both on 0.18", "both on 0.17"],
)
def test_all_that_is_active_can_be_patched(version: str, libraries: tuple[str, ...]) -> None:
    """Names are bound there that are not without these libraries."""
    code = f"import {__name__} as test; test.print_plans({libraries!r})"
    rows = [line.split() for line in output_with(version, code).splitlines()]
    assert len(rows) == 12
    for device, _, preset, fused in rows:
        assert fused == str(device == "cuda" and preset != "off")
