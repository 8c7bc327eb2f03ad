"""The session on the real Megatron: enable, disable, status, and identity after any sequence of
them."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.strategies import booleans, fixed_dictionaries, none, one_of, sampled_from

import accel
from accel import device, patching
from accel.device import cpu
from accel.feature import PRESETS, Context
from accel.patches import FEATURES, command_line, norm
from accel.patching import Patch, PatchError
from accel.session import SESSION
from accel.upstream import SUPPORTED_MEGATRON, megatron_version


@pytest.fixture(autouse=True)
def clean() -> Any:
    accel.disable()
    yield
    accel.disable()


def _targets() -> list[Patch]:
    importlib.import_module("megatron.training.arguments")
    feature_patches = [p for f in FEATURES for p in f.patches if p.how != "provide" and _is_here(p)]
    return [*cpu.patches(), *command_line.HOOKS, *feature_patches]


def _is_here(patch: Patch) -> bool:
    """Not what another version of Megatron has alone."""
    try:
        patching.resolve(patch.target)
    except (PatchError, ImportError):
        if not patch.optional:
            raise
        return False
    return True


def _bound(patches: list[Patch]) -> dict[str, object]:
    return {p.target: patching.resolve(p.target)[2] for p in patches}


@pytest.mark.skipif(
    device.select().name != "cpu", reason="torch-npu and CUDA are not redirected by us"
)
def test_any_sequence_of_enable_and_disable_restores_identity() -> None:
    targets = _targets()
    stock = _bound(targets)

    class Sequence(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            accel.disable()
            self.enabled = False

        @rule(
            preset=sampled_from(PRESETS),
            wishes=fixed_dictionaries(
                {}, optional={f.name: one_of(none(), booleans()) for f in FEATURES}
            ),
        )
        def enable(self, preset: str, wishes: dict[str, bool | None]) -> None:
            asked = [f for f in FEATURES if wishes.get(f.name)]
            refused = (
                any(wishes.get(needed) is False for f in asked for needed in f.requires)
                or any(wishes.get(other) for f in asked for other in f.conflicts)
                or any(not s.name and s.default is None for f in asked for s in f.settings)
            )
            if refused:
                with pytest.raises(
                    ValueError, match=r"turned off|exclude each other|needs a value"
                ):
                    accel.enable(preset=preset, **wishes)
            else:
                assert accel.enable(preset=preset, **wishes)["preset"] == preset
            self.enabled = SESSION.device is not None

        @rule()
        def disable(self) -> None:
            accel.disable()
            self.enabled = False

        @rule()
        def attach(self) -> None:
            SESSION.attach()

        @invariant()
        def disabled_means_stock(self) -> None:
            if not self.enabled and SESSION.device is None:
                changed = [t for t, raw in _bound(targets).items() if raw is not stock[t]]
                assert not changed

        def teardown(self) -> None:
            accel.disable()
            assert all(raw is stock[t] for t, raw in _bound(targets).items())

    Sequence.TestCase.settings = settings(max_examples=15, stateful_step_count=8, deadline=None)
    Sequence.TestCase().runTest()


def test_status_is_plain_and_complete() -> None:
    status = accel.enable(preset="exact")
    assert status["megatron"] == megatron_version()
    assert status["device"] in device.NAMES
    assert set(status["features"]) == {f.name for f in FEATURES}
    assert status["features"]["norm"] == {"asked": "preset", "state": "active", "reason": ""}
    assert status["features"]["fused_norm"]["state"] == "off"
    assert {p["target"] for p in status["patches"]} >= {
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"
    }
    accel.disable()
    assert accel.status()["features"] == {}


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="no option 'fused_nrom'; did you mean 'fused_norm'"):
        accel.enable(fused_nrom=True)
    assert accel.status()["device"] is None, "nothing was installed"


def test_unsupported_megatron_patches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.session.megatron_version", lambda: "0.16.1")
    targets = _targets()
    stock = _bound(targets)
    with pytest.raises(
        ValueError, match=r"supports megatron-core 0\.17\.1, .* found 0\.16\.1; nothing was"
    ):
        accel.enable()
    assert all(raw is stock[t] for t, raw in _bound(targets).items())
    assert accel.enable(allow_untested_megatron=True)["features"]["norm"]["state"] == "active"


def test_an_error_before_anything_changed_leaves_what_is_on() -> None:
    from megatron.core.transformer import torch_norm

    accel.enable(preset="exact")
    on, norm = accel.status(), vars(torch_norm)["WrappedTorchNorm"]
    with pytest.raises(ValueError, match="memory"):
        accel.enable(memory_budget="x")
    assert accel.status() == on
    assert vars(torch_norm)["WrappedTorchNorm"] is norm


def test_a_start_that_failed_may_be_tried_again() -> None:
    """As in a notebook, where the import before it is not repeated."""
    SESSION.attach()
    hooks = SESSION._hooks
    with pytest.raises(ValueError, match="memory"):
        SESSION.apply(preset="exact", wishes={"memory_budget": "x"})
    with pytest.raises(ValueError, match="memory"):
        accel.enable(memory_budget="x")
    assert SESSION._attached
    assert SESSION._hooks is hooks
    SESSION.apply(preset="exact", wishes={})
    assert accel.status()["features"]["norm"]["state"] == "active"


def test_features_that_cannot_be_unpatched_stay_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.training import training

    accel.enable(preset="exact", swap_attention=True)
    on, ours = accel.status(), training.train_step
    other = next(c for c in SESSION.choices if c.state == "active" and c.feature.patches)
    owner, name, _ = patching.resolve(other.feature.patches[0].target)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *a: None)
        with pytest.raises(patching.PatchError):
            accel.enable(preset="fast")
        assert SESSION._switched, "its switch is on"
        assert accel.status()["features"]["swap_attention"]["state"] == "active"
    assert (accel.status(), training.train_step) == (on, ours)


def test_a_device_that_cannot_be_undone_keeps_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    accel.enable(preset="exact")
    undo = SESSION._device.undo

    def refuse() -> None:
        raise patching.PatchError("cannot be undone")

    monkeypatch.setattr(SESSION._device, "undo", refuse)
    with pytest.raises(patching.PatchError, match="cannot be undone"):
        accel.disable()
    assert not SESSION.choices
    assert SESSION._hooks is None
    assert SESSION.device is not None, "it is still there"
    SESSION._hook(None)  # Megatron's arguments are imported later
    assert SESSION._hooks is None
    assert accel.enable(preset="exact")["features"]["norm"]["state"] == "active"
    monkeypatch.setattr(SESSION._device, "undo", undo)


def test_moved_target_names_feature_target_and_near_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from megatron.core.transformer import torch_norm

    monkeypatch.setattr(
        torch_norm, "WrappedTorchNormal", torch_norm.WrappedTorchNorm, raising=False
    )
    monkeypatch.delattr(torch_norm, "WrappedTorchNorm")
    empty = torch.empty
    with pytest.raises(patching.PatchError) as e:
        accel.enable()
    assert "norm: " in str(e.value)
    assert "has no 'WrappedTorchNorm'; near names: WrappedTorchNormal" in str(e.value)
    assert torch.empty is empty


def test_modified_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import torch_norm

    def __new__(
        cls: type,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> Any:
        return "a fork's own norm"

    forked = types.FunctionType(__new__.__code__, vars(torch_norm), "__new__", __new__.__defaults__)
    monkeypatch.setattr(torch_norm.WrappedTorchNorm, "__new__", staticmethod(forked))
    with pytest.raises(patching.PatchError, match=r"upstream's body .* none of those"):
        accel.enable()


def test_other_peoples_patches_are_reported_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger's ``apply_liger_kernel_to_megatron`` makes them."""
    from megatron.core.fusions import fused_cross_entropy as fused
    from megatron.core.models import backends

    others = types.ModuleType("somebody.patches")
    exec("def entropy(logits, target, group=None): return 'theirs'", vars(others))
    exec("def layer_norm(self, rms_norm=False, for_qk=False): return 'theirs'", vars(others))
    name = "fused_vocab_parallel_cross_entropy"
    others.entropy.__wrapped__ = getattr(fused, name)
    monkeypatch.setattr(fused, name, others.entropy)
    monkeypatch.setattr(backends.LocalSpecProvider, "layer_norm", others.layer_norm)

    found = accel.enable()["features"]
    assert found["fused_cross_entropy"]["state"] == "skipped"
    target = f"{fused.__name__}:{name}"
    assert found["fused_cross_entropy"]["reason"] == (
        f"somebody.patches has replaced {target}, and stays"
    )
    assert getattr(fused, name) is others.entropy
    assert found["norm"]["state"] == "active", "other norms are still Megatron's"
    with pytest.raises(ValueError, match=r"--accel-fused-cross-entropy: somebody\.patches has rep"):
        accel.enable(strict=True)

    args = SimpleNamespace(normalization="RMSNorm", transformer_impl="local")
    context = Context("cpu", SUPPORTED_MEGATRON[-1], args)
    assert "somebody.patches has replaced" in (norm.FEATURE.idle(context) or "")
    args.normalization = "LayerNorm"
    assert norm.FEATURE.idle(context) is None


def test_version_is_that_of_the_package_that_would_be_imported() -> None:
    from megatron.core.package_info import __version__

    assert megatron_version() == __version__.partition("+")[0]


def test_copies_that_somebody_made_before_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.fusions import fused_bias_swiglu

    theirs = types.ModuleType("somebodys_loop")
    monkeypatch.setitem(sys.modules, "somebodys_loop", theirs)
    theirs.swiglu = stock = fused_bias_swiglu.bias_swiglu_impl
    with caplog.at_level("WARNING", logger="accel"):
        accel.enable(preset="off", fused_activation=True)
    assert theirs.swiglu is stock is not fused_bias_swiglu.bias_swiglu_impl
    assert "still upstream's: somebodys_loop.swiglu; call accel.enable() before" in caplog.text


def test_copies_of_the_scripts_own_modules_are_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As ``gpt_builders`` is, beside the ``pretrain_gpt.py`` of Megatron-LM's releases; the script may be
    called by a link, beside which Python looks for no modules."""
    from megatron.core.fusions import fused_bias_swiglu

    stock = fused_bias_swiglu.bias_swiglu_impl
    script, link = tmp_path / "theirs" / "pretrain.py", tmp_path / "start.py"
    link.symlink_to(script)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(link), raising=False)
    files = {
        "builders": str(script.with_name("builders.py")),
        "library": str(tmp_path / "library.py"),
    }
    modules = {name: types.ModuleType(name) for name in files}
    for name, module in modules.items():
        module.__file__, module.swiglu = files[name], stock
        monkeypatch.setitem(sys.modules, name, module)
    with caplog.at_level("WARNING", logger="accel"):
        accel.enable(preset="off", fused_activation=True)
    assert modules["builders"].swiglu is fused_bias_swiglu.bias_swiglu_impl
    assert modules["library"].swiglu is stock
    assert "still upstream's: library.swiglu; call" in caplog.text
    accel.disable()
    assert modules["builders"].swiglu is stock


def test_copies_of_the_functions_that_are_hooked_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that took them before accel came goes by upstream's, and no feature is ever on."""
    from megatron.training import arguments

    SESSION.attach()
    SESSION.warn_if_late()
    assert not caplog.records
    accel.disable()
    theirs = types.ModuleType("somebodys_loop")
    monkeypatch.setitem(sys.modules, "somebodys_loop", theirs)
    theirs.validate = arguments.validate_args
    SESSION.attach()
    SESSION.warn_if_late()
    assert "still upstream's: somebodys_loop.validate; no feature is on" in caplog.text


def test_an_import_after_the_arguments_are_final_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.training import global_vars

    SESSION.attach()
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace())  # a program's own
    SESSION.warn_if_late()
    assert not caplog.records
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(data_parallel_size=1))
    SESSION.warn_if_late()
    assert "after Megatron's arguments were final, so no feature is on" in caplog.text


def test_enable_looks_at_final_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.training import global_vars

    accel.enable(preset="off", moe_overlap=True)
    assert accel.status()["features"]["moe_overlap"]["state"] == "active"
    final = SimpleNamespace(
        num_experts=None, accel_preset="max", moe_router_force_biased=None, data_parallel_size=1
    )
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", final)
    accel.enable(preset="off", moe_overlap=True)
    assert accel.status()["features"]["moe_overlap"]["state"] == "idle"
    assert "moe_overlap was asked for and is idle: there are no experts" in caplog.text
    final.num_experts, final.moe_router_topk = 4, 9
    with pytest.raises(ValueError, match="--moe-router-topk 9 of --num-experts 4"):
        accel.enable(preset="off")
    final.moe_router_force_biased, final.moe_router_topk = 1.0, 2
    with pytest.raises(ValueError, match="moe-router-force-biased"):
        accel.enable(preset="off", expert_migration=True)
    assert accel.status()["features"]["mamba"]["state"] == "active", "the model may have them"
    accel.enable(preset="off", moe_tp_extend_ep=True)
    assert accel.status()["features"]["moe_tp_extend_ep"]["state"] == "idle"
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(num_experts=None))
    accel.enable(preset="off", moe_overlap=True)
    assert accel.status()["features"]["moe_overlap"]["state"] == "active", "never validated"
    assert final.accel_preset == "max"
    assert not hasattr(final, "accel_expert_migration")


def test_what_enable_was_asked_for_and_is_not_on_is_said(caplog: pytest.LogCaptureFixture) -> None:
    accel.enable(preset="off", tp_comm_overlap=True, fused_rope=False)
    reason = accel.status()["features"]["tp_comm_overlap"]["reason"]
    assert f"tp_comm_overlap was asked for and is idle: {reason}" in caplog.text
    assert "fused_rope" not in caplog.text


def test_options_of_enable_hold_until_a_flag_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_line, "_PARSED", {})
    validate = command_line.apply_when_final(lambda args, defaults: None)

    def validated(*flags: str) -> dict[str, str]:
        parser = argparse.ArgumentParser()
        command_line.add_options(parser)
        args = parser.parse_args(flags)
        args.rank = 1
        validate(args, {})
        status = accel.status()
        return {"preset": status["preset"], "norm": status["features"]["norm"]["state"]}

    accel.enable(preset="exact", norm=False)
    assert validated() == {"preset": "exact", "norm": "off"}
    assert validated("--accel-norm") == {"preset": "exact", "norm": "active"}
    assert validated("--accel-preset", "off") == {"preset": "off", "norm": "off"}
    accel.disable()
    accel.enable()
    assert validated()["preset"] == "fast"
    accel.enable(tp_overlap=True, tp_overlap_chunks=4)
    assert validated("--no-accel-tp-overlap")["preset"] == "fast", "with nothing said of chunks"


def test_features_read_options_of_enable_where_they_read_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_line, "_PARSED", {})
    seen = []
    validate = command_line.apply_when_final(lambda args, defaults: seen.append(vars(args).copy()))
    accel.enable(norm=False, tp_overlap_chunks=3, tp_overlap=True)
    validate(argparse.Namespace(rank=1, accel_norm=True), {})
    assert (seen[0]["accel_norm"], seen[0]["accel_tp_overlap_chunks"]) == (True, 3)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kernels_asked_for_by_name_are_in_the_table(monkeypatch, device):
    from accel.feature import Context

    context = Context(device, "0.19.2", None)
    monkeypatch.setenv("ACCEL_CUDA_KERNELS", "triton,rope=triton")
    told = (
        ["kernels on CUDA where accel calls the op: triton, rope by triton"]
        if device == "cuda"
        else []
    )
    assert command_line._kernels(context) == told
    monkeypatch.setenv("ACCEL_CUDA_KERNELS", "rope=apex")
    if device == "cuda":
        with pytest.raises(ValueError, match="rope can be served by triton"):
            command_line._kernels(context)
    else:
        assert command_line._kernels(context) == []
