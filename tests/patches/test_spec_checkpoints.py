"""Names and orders of the two layer specs: weights and states are read under either, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.patches import spec_checkpoints
from accel.patches.spec_checkpoints import (
    SHARDED_NORMS,
    as_named,
    as_saved,
    noting_releases,
    other_order,
    refuse_other_order,
)

from .blocks import HIDDEN
from .test_fused_adamw import one_rank

MODELS = {
    "dense": {"normalization": "LayerNorm", "add_bias_linear": True},
    "experts one by one": {"num_moe_experts": 2},
    "grouped experts": {"num_moe_experts": 2, "moe_grouped_gemm": True},
    "multi-latent attention": {"multi_latent_attention": True, "q_lora_rank": 16},
}


def build(te: bool, seed: int, **config: Any) -> Any:
    """A block whose every weight is drawn, the norms' too."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock

    model_parallel_cuda_manual_seed(seed)
    mla = config.get("multi_latent_attention", False)
    spec = {
        "num_experts": config.get("num_moe_experts"),
        "moe_grouped_gemm": config.get("moe_grouped_gemm", False),
        "qk_layernorm": True,
        "multi_latent_attention": mla,
    }
    if te:
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**spec)
    else:
        normalization = config.get("normalization", "RMSNorm")
        layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=normalization, **spec)
        if mla:  # of which upstream's local attention knows nothing
            attention = gpt_layer_specs.TESpecProvider().core_attention()
            layer.submodules.self_attention.submodules.core_attention = attention
    plain = {"normalization": "RMSNorm", "add_bias_linear": False, "qk_layernorm": True}
    sizes = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4}
    cls = MLATransformerConfig if mla else TransformerConfig
    block = TransformerBlock(
        cls(**{**sizes, **plain, "gradient_accumulation_fusion": False, **config}), layer
    )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(generator=draw)
    return block


@pytest.mark.parametrize("model", MODELS)
def test_weights_go_to_the_other_spec_and_back(model: str) -> None:
    """As under `--ckpt-format torch`, whose reader would take a strict failure for a mere warning."""
    with one_rank():
        local, te, again = (
            build(te, i, **MODELS[model]) for i, te in enumerate((False, True, False))
        )
        state = local.state_dict()
        names = list(state)
        te.load_state_dict(state)
        assert list(state) == names, "the caller's own is left alone"
        again.load_state_dict(te.state_dict())
        found, expected = dict(again.named_parameters()), dict(local.named_parameters())
    assert set(local.state_dict()) != set(te.state_dict())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_a_weight_without_a_counterpart_keeps_its_name() -> None:
    given = {"input_layernorm.weight": 1, "a._extra_state": 2, "b": 3}
    assert as_named(given, {"b"}) == {"input_layernorm.weight": 1, "b": 3}
    assert as_named(given, given) is given


@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize("pair", SHARDED_NORMS, ids=lambda pair: pair[0])
def test_a_sharded_norm_is_found_under_either_name(pair: tuple[str, str], turned: int) -> None:
    asked, saved = (f"layers.{name}weight" for name in pair[::turned])
    tree = {"model": SimpleNamespace(key=asked), "adam": [SimpleNamespace(key=f"exp_avg.{asked}")]}
    found = as_saved(tree, {saved, f"exp_avg.{saved}"})
    assert found["model"].key == saved
    assert found["adam"][0].key == f"exp_avg.{saved}"


TE, EXPERTS = {"transformer_impl": "transformer_engine"}, {"num_experts": 2}
GROUPED = {**TE, **EXPERTS, "moe_grouped_gemm": True}


def run(**changes: Any) -> SimpleNamespace:
    plain = {"use_distributed_optimizer": True, "no_load_optim": None, "finetune": False}
    return SimpleNamespace(**{**plain, "transformer_impl": "local", **changes})


def test_grouped_experts_are_in_another_order() -> None:
    problem = other_order(run(**TE, **EXPERTS), run(**GROUPED))
    assert problem is not None
    assert "this run has --transformer-impl transformer_engine --moe-grouped-gemm" in problem
    assert "save it with --dist-ckpt-optim-fully-reshardable" in problem
    assert other_order(run(**GROUPED), run(**GROUPED)) is None
    dense = {**TE, "moe_grouped_gemm": True}
    assert other_order(run(**TE), run(**dense)) is None, "there are no experts"
    local = {**EXPERTS, "moe_grouped_gemm": True}
    assert other_order(run(**EXPERTS), run(**local)) is None, "the local spec never groups them"


def test_states_with_names_load_in_any_order() -> None:
    old = run(ckpt_fully_parallel_save=True)
    assert other_order(old, run(**TE)) is None
    old.dist_ckpt_optim_fully_reshardable = False  # of a Megatron that writes them by order
    assert other_order(old, run(**TE)) is not None


@pytest.mark.parametrize("distributed", [True, False])
def test_files_of_ranks_have_no_names(distributed: bool) -> None:
    legacy = {
        "ckpt_format": "torch",
        "dist_ckpt_optim_fully_reshardable": True,
        "add_bias_linear": True,
        "use_distributed_optimizer": distributed,
    }
    problem = other_order(run(**legacy), run(**{**legacy, **TE}))
    assert problem is not None
    assert "save it with --ckpt-format torch_dist" in problem
    assert ("--dist-ckpt-optim-fully-reshardable" in problem) is distributed
    legacy["ckpt_format"] = "torch_dist"
    assert other_order(run(**legacy), run(**{**legacy, **TE})) is None
    legacy.update(ckpt_format="torch", add_bias_linear=False)
    assert (other_order(run(**legacy), run(**{**legacy, **TE})) is not None) is distributed
    legacy["softmax_type"] = "learnable"  # before the norm that is the linear layer's, or behind it
    assert other_order(run(**legacy), run(**{**legacy, **TE})) is not None


def test_muon_has_a_distributed_optimizer_of_norms_and_biases() -> None:
    muon = {
        "use_distributed_optimizer": False,
        "use_layer_wise_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": False,
    }
    biased = {**muon, "add_bias_linear": True}
    problem = other_order(run(**biased), run(**biased, **TE))
    assert problem is not None
    assert "save it with --dist-ckpt-optim-fully-reshardable, load" in problem
    assert other_order(run(**biased), run(**biased)) is None
    assert other_order(run(**muon), run(**muon, **TE)) is None, "norms are in one order"
    for named in ("dist_ckpt_optim_fully_reshardable", "use_layer_wise_param_layout"):
        names = {**biased, named: named.startswith("dist")}
        assert other_order(run(**names), run(**names, **TE)) is None


def test_experts_that_are_split_no_more_are_others() -> None:
    split = {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, **EXPERTS}
    whole = {**split, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    problem = other_order(run(**split), run(**whole))
    assert problem is not None
    assert "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2, this run has" in problem
    assert "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1: save" in problem
    named = {"dist_ckpt_optim_fully_reshardable": True}
    assert other_order(run(**split, **named), run(**whole, **named)) is None


@pytest.mark.parametrize(
    "optimizer",
    [{}, {"use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": True}],
    ids=["adam", "muon"],
)
def test_chunks_in_a_v_are_of_other_layers(optimizer: dict[str, bool]) -> None:
    v, loop = run(**optimizer, accel_in_a_v=True), run(**optimizer)
    problem = other_order(v, loop)
    assert problem is not None
    assert "--transformer-impl local and an --accel-schedule whose chunks lie in a V" in problem
    assert "this run has --transformer-impl local: save it with --dist-ckpt-optim-fully" in problem
    assert other_order(loop, v) is not None
    assert other_order(v, v) is None
    named = {**optimizer, "dist_ckpt_optim_fully_reshardable": True}
    assert other_order(run(**named, accel_in_a_v=True), run(**named)) is None
    alone = {"use_distributed_optimizer": False}
    assert other_order(run(**alone, accel_in_a_v=True), run(**alone)) is None, "states have names"


def test_an_evaluation_has_no_optimizer_to_refuse() -> None:
    assert other_order(run(), run(**TE)) is not None
    assert other_order(run(), run(**TE, skip_train=True)) is None
    assert other_order(run(), run(**TE, skip_train=True, perform_rl_step=True)) is not None


def test_files_say_that_they_are_of_ranks_where_arguments_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.training import checkpointing

    old = run(use_distributed_optimizer=False, add_bias_linear=True)
    monkeypatch.setattr(spec_checkpoints._LastRead, "legacy", False)
    monkeypatch.setattr(
        checkpointing, "get_args", lambda: run(**TE, use_distributed_optimizer=False)
    )
    check = refuse_other_order(lambda saved: "checked")
    for kind, refused in (("GLOBAL", False), ("LEGACY", True)):
        kind = checkpointing.CheckpointType[kind]
        noting_releases(lambda kind=kind: ({}, "", False, kind))()
        if refused:
            with pytest.raises(ValueError, match="save it with --ckpt-format torch_dist"):
                check(old)
        else:
            assert check(old) == "checked"


def test_a_release_has_no_optimizer_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import checkpointing

    monkeypatch.setattr(spec_checkpoints._LastRead, "release", False)
    monkeypatch.setattr(checkpointing, "get_args", lambda: run(**TE))
    check = refuse_other_order(lambda saved: "checked")
    noting_releases(lambda: ({}, "", True, None))()
    assert check(run()) == "checked"
    noting_releases(lambda: ({}, "", False, None))()
    with pytest.raises(ValueError, match="in the order of --transformer-impl local"):
        check(run())
