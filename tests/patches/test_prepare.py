"""What features change in Megatron's arguments before it validates them, and that they say so."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest

from accel.feature import Context
from accel.patches import command_line, moe_tp_extend_ep, schedule, te_layers
from accel.patches.gradient_accumulation_fusion import without_megatron_fsdp
from accel.patches.local_spec import without_te
from accel.patches.memory_history import without_history
from accel.patches.optimizer_cpu_offload import offload_nothing
from accel.patches.rope_fusion import without_the_flag

WITHOUT_TE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="transformer_engine is installed",
)


def context(device: str = "cpu", **args: Any) -> Context:
    return Context(device, "0.19.2", SimpleNamespace(**args))


@WITHOUT_TE
def test_te_spec_becomes_local_and_says_so_in_one_line() -> None:
    asked = context(
        transformer_impl="transformer_engine", apply_rope_fusion=True, accel_te_layers=False
    )
    (note,) = without_te(asked)
    assert (asked.args.transformer_impl, asked.args.apply_rope_fusion) == ("local", True)
    assert "--transformer-impl local is used instead" in note


@WITHOUT_TE
def test_te_spec_stays_where_our_layers_serve_it() -> None:
    for wish in ({}, {"accel_te_layers": None}, {"accel_te_layers": True}):
        asked = context(transformer_impl="transformer_engine", **wish)
        assert without_te(asked) == []
        assert asked.args.transformer_impl == "transformer_engine"


@WITHOUT_TE
@pytest.mark.parametrize("option", ["fp8", "fp4"])
def test_fp8_is_refused_in_one_line_before_anything_is_built(option: str) -> None:
    asked = context(transformer_impl="transformer_engine", **{option: "hybrid"})
    with pytest.raises(ValueError, match=f"--{option}-format hybrid: FP8 and FP4 need Transformer"):
        te_layers.prepare(asked)
    asked.args.transformer_impl = "local"
    assert te_layers.prepare(asked) == []


@WITHOUT_TE
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"cuda_graph_impl": "transformer_engine"},
            "--cuda-graph-impl transformer_engine: .* local",
        ),
        ({"external_cuda_graph": True}, "--external-cuda-graph: .* use --cuda-graph-impl local"),
        ({"optimizer_cuda_graph": True}, "--optimizer-cuda-graph: .* leave it out"),
    ],
)
def test_graphs_of_transformer_engine_are_refused_at_the_start(
    asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        without_te(context("cuda", **asked))
    assert without_te(context("cpu", **asked)) == []
    assert without_te(context("cuda", cuda_graph_impl="local", optimizer_cuda_graph=False)) == []


def test_a_history_of_a_cpus_memory_is_not_recorded_and_a_line_says_so() -> None:
    asked = context(record_memory_history=True)
    (line,) = without_history(asked)
    assert not asked.args.record_memory_history
    assert "--record-memory-history: PyTorch keeps no history" in line
    assert without_history(asked) == []
    on_npu = context("npu", record_memory_history=True)
    (line,) = without_history(on_npu)
    assert not on_npu.args.record_memory_history
    assert "torch.npu.memory._record_memory_history is Ascend's, no snapshot is written" in line
    on_cuda = context("cuda", record_memory_history=True)
    assert without_history(on_cuda) == []
    assert on_cuda.args.record_memory_history


@WITHOUT_TE
def test_a_mask_that_nobody_looks_at_gets_a_line() -> None:
    asked = context(transformer_impl="transformer_engine", reset_attention_mask=True)
    (line,) = te_layers.prepare(asked)
    assert "--reset-attention-mask does nothing" in line
    asked.args.transformer_impl = "local"
    assert te_layers.prepare(asked) == []


@WITHOUT_TE
def test_every_cp_comm_type_is_served() -> None:
    types = ["a2a", "p2p", "all_gather", "a2a+p2p"]
    asked = context(
        transformer_impl="transformer_engine", context_parallel_size=2, cp_comm_type=types
    )
    assert te_layers.prepare(asked) == []
    assert asked.args.cp_comm_type == types


@WITHOUT_TE
def test_what_asks_for_nothing_of_te_is_left_alone() -> None:
    for impl in ("local", "inference_optimized"):
        asked = context(transformer_impl=impl)
        assert without_te(asked) == []
        assert asked.args.transformer_impl == impl
    assert without_te(context()) == [], "a nested yaml namespace has no such attributes"


@WITHOUT_TE
@pytest.mark.parametrize(
    ("device", "args", "kept"),
    [
        ("cpu", {}, True),
        ("cpu", {"rotary_interleaved": True}, False),
        ("cuda", {"position_embedding_type": "yarn"}, False),
        ("cuda", {"position_embedding_type": "rope"}, True),
        ("cpu", {"multi_latent_attention": True}, False),
        ("npu", {"multi_latent_attention": True}, False),
        ("npu", {}, True),
        ("cuda", {"multi_latent_attention": True}, True),
    ],
)
def test_rope_fusion_is_left_on_where_megatron_can_go_with_it(
    device: str, args: dict[str, Any], kept: bool
) -> None:
    asked = context(device, apply_rope_fusion=True, **args)
    notes = without_the_flag(asked)
    assert asked.args.apply_rope_fusion is kept
    assert len(notes) == (not kept)
    assert all("the same rotation runs without it" in note for note in notes)


def test_offload_on_the_cpu_moves_nothing() -> None:
    asked = context(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    assert len(offload_nothing(asked)) == 1
    assert asked.args.optimizer_offload_fraction == 0.0
    elsewhere = context("cuda", optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    assert offload_nothing(elsewhere) == []
    assert elsewhere.args.optimizer_offload_fraction == 1.0


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (context("cpu"), "1"),
        (context("cuda"), None),
        (context("cpu", use_megatron_fsdp=True), None),
    ],
)
def test_work_queues_are_shown_for_the_check_only(
    asked: Context, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    with command_line._connections_allowed(asked):
        assert os.environ.get(name) == shown
    assert name not in os.environ
    monkeypatch.setenv(name, "8")
    with command_line._connections_allowed(asked):
        assert os.environ[name] == "8", "the user's own value wins"


def test_flags_reach_the_features_under_yaml_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --yaml-cfg Megatron drops the parsed flags and calls another validator."""
    import argparse

    import accel
    from accel.session import SESSION

    monkeypatch.setattr(command_line, "_PARSED", {})
    parser = argparse.ArgumentParser()
    command_line.add_options(parser)
    parser.parse_args(["--accel-preset", "exact", "--no-accel-norm", "--accel-fused-topk-router"])
    final = argparse.Namespace(num_experts=None)
    validate_yaml = command_line.apply_when_final(lambda args, defaults: final)
    SESSION.attach()
    try:
        assert validate_yaml(argparse.Namespace(rank=0), {}) is final
        assert final.accel_norm is False
        reason = accel.status()["features"]["fused_topk_router"]["reason"]
        assert reason == "there are no experts", "what is final says so"
        assert accel.status()["preset"] == "exact"
        assert accel.status()["features"]["norm"]["state"] == "off"
        assert "preset exact" in capsys.readouterr().out
    finally:
        accel.disable()


@pytest.mark.parametrize(
    ("prepare", "asked", "instead"),
    [
        (
            moe_tp_extend_ep.prepare,
            {"accel_moe_tp_extend_ep": True},
            "expert_tensor_parallel_size: 1",
        ),
        (
            schedule.FEATURE.prepare,
            {"accel_schedule": "zb-v"},
            "num_layers_per_virtual_pipeline_stage",
        ),
    ],
)
def test_what_changes_flags_says_what_belongs_into_a_yaml_file(
    prepare: Any, asked: dict[str, Any], instead: str
) -> None:
    nested = {"language_model": SimpleNamespace(), "model_parallel": SimpleNamespace()}
    assert prepare(context(**nested)) == []
    with pytest.raises(ValueError, match=rf"in whose place --yaml-cfg is: set {instead}"):
        prepare(context(**nested, **asked))


@WITHOUT_TE
def test_a_feature_turned_off_by_name_changes_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    import accel
    from accel.session import SESSION

    monkeypatch.setattr(command_line, "_PARSED", {})
    validate = command_line.apply_when_final(lambda args, defaults: args)
    SESSION.attach()
    try:
        for wish, impl in ((False, "transformer_engine"), (None, "local")):
            args = argparse.Namespace(
                rank=1,
                transformer_impl="transformer_engine",
                accel_te_layers=False,
                accel_local_spec=wish,
            )
            assert validate(args, {}).transformer_impl == impl
    finally:
        accel.disable()


def test_cpu_initialization_does_not_depend_on_draws_of_the_device() -> None:
    import torch
    from megatron.core.tensor_parallel import layers

    import accel

    accel.enable(preset="off")
    try:
        if accel.status()["device"] != "cpu":
            pytest.skip("concerns the CPU device runtime")
        drawn = []
        for draws_before in (0, 7):
            torch.manual_seed(11)
            torch.rand(draws_before, device="cuda")
            weight = torch.empty(8, 4)
            layers._initialize_affine_weight_cpu(
                weight, 8, 4, 8, 0, torch.nn.init.normal_, rank=0, world_size=1
            )
            drawn.append(weight)
        assert torch.equal(*drawn)
    finally:
        accel.disable()


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_quantized_layers_do_not_become_others_without_a_word(name: str) -> None:
    asked = context(
        transformer_impl="transformer_engine", accel_te_layers=False, **{name: "hybrid"}
    )
    with pytest.raises(ValueError, match=rf"--{name}-format hybrid: FP8 and FP4 need"):
        without_te(asked)
    assert asked.args.transformer_impl == "transformer_engine"


def test_megatron_fsdp_is_without_the_fusion_and_says_so() -> None:
    asked = context(use_megatron_fsdp=True, gradient_accumulation_fusion=True)
    (note,) = without_megatron_fsdp(asked)
    assert note.startswith("--use-megatron-fsdp: --no-gradient-accumulation-fusion is used")
    assert asked.args.gradient_accumulation_fusion is False
    assert without_megatron_fsdp(asked) == []
    plain = context(use_megatron_fsdp=False, gradient_accumulation_fusion=True)
    assert without_megatron_fsdp(plain) == []
    assert without_megatron_fsdp(context()) == [], "a nested yaml namespace has no such attributes"
