"""`--recompute-modules` and `--accel-recompute-norm`: gradients of stock, and what is freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from accel.memory.recompute import Recomputed
from accel.patches import recompute_activation
from accel.patches.recompute_modules import CheckpointWithoutOutput
from tests.ops.contract import needs_native

from .blocks import HIDDEN, TOKENS, block, gradients
from .test_fused_adamw import one_rank
from .test_mamba import hybrid

ACTIVATION = TOKENS * HIDDEN * 4
"""Bytes of what a norm gives."""
LAYERS = 4
BIASES = {"add_bias_linear": True, "gated_linear_unit": False, "activation_func": F.gelu}
MOE = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 128,
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
}

CASES: dict[str, tuple[list[str], dict[str, Any], int]] = {
    "norms": (["layernorm"], {}, 2 * LAYERS * ACTIVATION),
    "norms, LayerNorm": (["layernorm"], {"normalization": "LayerNorm"}, 2 * LAYERS * ACTIVATION),
    "core attention": (["core_attn"], {}, 3 * LAYERS * 4 * TOKENS * TOKENS),
    "dense MLP": (["mlp"], {}, LAYERS * 8 * ACTIVATION),
    "dense MLP with biases": (["mlp"], BIASES, LAYERS * 4 * ACTIVATION),
    "all of a dense layer": (["layernorm", "core_attn", "mlp"], {}, 0),
    "norms before experts": (["layernorm"], MOE, LAYERS * ACTIVATION),
    "norms of experts with an auxiliary loss": (
        ["layernorm"],
        {**MOE, "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3},
        LAYERS * ACTIVATION,
    ),
    "norms before experts and shared ones": (
        ["layernorm"],
        {**MOE, "moe_shared_expert_intermediate_size": 64},
        LAYERS * ACTIVATION,
    ),
    "up projections of latent attention": (["mla_up_proj"], MLA, LAYERS * ACTIVATION),
    "all of latent attention": (["layernorm", "mla_up_proj", "core_attn"], MLA, 0),
    "activations of experts": (["moe_act"], MOE, LAYERS * TOKENS * 128 * 4),
}
"""Modules, the model, and bytes that are freed at least."""


def model(kind: dict[str, Any], **config: Any) -> Any:
    moe = {"num_experts": 4, "moe_grouped_gemm": True} if "num_moe_experts" in kind else {}
    mla = {"multi_latent_attention": True} if "multi_latent_attention" in kind else {}
    return block(LAYERS, moe | mla, **kind, **config)


@needs_native
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_stocks_and_bytes_are_freed(case: str) -> None:
    modules, kind, freed = CASES[case]
    with one_rank():
        stock, whole = gradients(model(kind))
        asked = {"recompute_granularity": "selective", "recompute_modules": modules}
        ours, held = gradients(model(kind, **asked))
    assert len(ours) == len(stock)
    assert all(map(torch.equal, ours, stock))
    assert whole - held >= 0.9 * freed
    assert whole > held


@needs_native
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_flag_of_ours_is_upstreams_module(kind: str) -> None:
    config = MOE if kind == "moe" else {}
    with one_rank():
        asked = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
        expected, held = gradients(model(config, **asked))
    with one_rank(recompute_norm=True):
        found = gradients(model(config))
    assert abs(found[1] - held) < ACTIVATION
    assert all(map(torch.equal, found[0], expected))


@needs_native
def test_with_activations_and_whole_layers() -> None:
    with one_rank():
        stock, whole = gradients(model({}))
    with one_rank(recompute_norm=True, recompute_activation=True):
        found, held = gradients(model({}))
        again = {"recompute_granularity": "full", "recompute_method": "uniform"}
        full, least = gradients(model({}, **again, recompute_num_layers=1))
        fused = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        chosen, _ = gradients(model({}, **fused))
    for other in (found, full, chosen):
        assert all(map(torch.equal, other, stock))
    assert least < held < whole


@needs_native
@pytest.mark.parametrize(("limit", "count"), [(None, 3), (2, 2), (0, 0)])
def test_the_first_layers_are_chosen(limit: int | None, count: int) -> None:
    with one_rank(recompute_norm=True, recompute_norm_num_layers=limit):
        layers = block(3).layers
        found = [x.recompute_input_layernorm and x.recompute_pre_mlp_layernorm for x in layers]
    assert found == [True] * count + [False] * (3 - count)


@needs_native
def test_norms_of_mamba_layers_too() -> None:
    def stack() -> Any:
        return hybrid("MM", hidden_size=HIDDEN).decoder

    with one_rank():
        stock, whole = gradients(stack())
    held = []
    for limit in (None, 1):
        with one_rank(recompute_norm=True, recompute_norm_num_layers=limit):
            found, num_bytes = gradients(stack())
        assert all(map(torch.equal, found, stock))
        held.append(whole - num_bytes)
    assert held[0] == pytest.approx(2 * held[1], rel=0.05)
    assert held[1] >= TOKENS * HIDDEN * 4


@needs_native
def test_layers_of_a_later_stage_of_a_hybrid_model_count_from_its_first() -> None:
    with one_rank(
        recompute_norm=True,
        recompute_norm_num_layers=2,
        recompute_activation=True,
        recompute_activation_num_layers=2,
    ):
        from megatron.core.models.hybrid.hybrid_block import HybridStack
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        first = hybrid("M-*-", hidden_size=HIDDEN).decoder
        second = HybridStack(
            first.config,
            hybrid_stack_spec.submodules,
            layer_type_list=list("M-*-"),
            pp_layer_offset=4,
            pg_collection=first.pg_collection,
        )
    for stack in (first, second):
        linear = (stack.layers[0].mixer.in_proj, stack.layers[1].mlp.linear_fc1)
        later = (stack.layers[2].self_attention.linear_qkv, stack.layers[3].mlp.linear_fc1)
        assert all(module.recompute_norm for module in linear)
        assert not any(module.recompute_norm for module in later)
        marked = [getattr(stack.layers[i].mlp, recompute_activation.MARK, False) for i in (1, 3)]
        assert marked == [True, False]
    assert second.layers[0].layer_number == 5


def test_a_layer_without_norms_is_left_alone() -> None:
    with one_rank(recompute_norm=True):
        from megatron.core.transformer.identity_op import IdentityOp

        from accel.patches.recompute_modules import recompute_norms

        layer = block(1).layers[0]
        layer.input_layernorm = IdentityOp()
        recompute_norms(layer)
        assert (layer.recompute_input_layernorm, layer.recompute_pre_mlp_layernorm) == (False, True)


def test_evaluation_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    free = Recomputed.free
    monkeypatch.setattr(Recomputed, "free", lambda *args: freed.append(free(*args)))
    with one_rank(recompute_norm=True):
        module = block(2).eval()
        x = torch.randn(TOKENS, 1, HIDDEN)
        with torch.no_grad():
            module(x, None)
        assert freed == [0] * 4
        module.requires_grad_(False)  # frozen, and nothing upstream needs a gradient
        module(x, None)
        assert sum(freed) == 0


def test_frozen_parameters_and_a_frozen_input() -> None:
    """Adapters: only some weights of the middle learn."""

    def run() -> list[Any]:
        module = block(2)
        module.requires_grad_(False)
        module.layers[0].mlp.linear_fc1.weight.requires_grad_()
        x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
        module(x, None).square().sum().backward()
        return [module.layers[0].mlp.linear_fc1.weight.grad]

    with one_rank():
        expected = run()
    with one_rank(recompute_norm=True, recompute_activation=True):
        assert all(map(torch.equal, run(), expected))


def test_low_precision_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="fp8"):
        CheckpointWithoutOutput(fp8="e4m3")


def test_megatrons_generators_are_as_they_were() -> None:
    with one_rank():
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel.random import (
            get_cuda_rng_tracker,
            model_parallel_cuda_manual_seed,
        )

        model_parallel_cuda_manual_seed(3, force_reset_rng=True)

        def dropped(x: Any) -> Any:
            with get_cuda_rng_tracker().fork():
                return F.dropout(x, 0.5) + F.dropout(x, 0.5)

        x = torch.randn(TOKENS, HIDDEN).requires_grad_()
        call = tensor_parallel.CheckpointWithoutOutput()
        y = call.checkpoint(dropped, x)
        kept = y.detach().clone()
        z = y * 3
        call.discard_output_and_register_recompute(z)
        state = get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
        z.backward(torch.ones_like(z))
        assert torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], state)
        assert torch.equal(y, kept)


@pytest.mark.parametrize("warming", [True, False])
def test_nothing_is_freed_while_a_graph_warms_up(
    warming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_rank():
        monkeypatch.setattr(
            "megatron.core.transformer.cuda_graphs.is_graph_warmup", lambda: warming
        )
        x = torch.randn(64, 64).requires_grad_()
        call = CheckpointWithoutOutput()
        y = call.checkpoint(torch.exp, x)
        z = y * y
        call.discard_output_and_register_recompute(z)
        assert (y.untyped_storage().nbytes() > 0) == warming
        z.sum().backward()


@needs_native
def test_norms_in_linear_layers_beside_one_that_is_a_module() -> None:
    """Experts in Transformer Engine's spec: the norm before them is a module, that of attention is not."""
    from accel.layers.linear import LayerNormLinear

    with one_rank():
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.transformer_block import TransformerBlock

        block(1)  # seeds
        given = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, **MOE}
        given |= {"add_bias_linear": False, "gradient_accumulation_fusion": False}
        asked = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=True)
        (layer,) = TransformerBlock(TransformerConfig(**given, **asked), spec).layers
    assert layer.recompute_pre_mlp_layernorm
    found = [m.recompute_norm for m in layer.modules() if isinstance(m, LayerNormLinear)]
    assert found == [True]
