"""`--accel-recompute-activation`: gradients of stock, and the activation's bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel.device.cpu import memory
from accel.feature import Context, choose, read_settings
from accel.log import log_once
from accel.patches import recompute_activation
from tests.ops.contract import needs_native

from .blocks import block
from .test_fused_adamw import one_rank

TOKENS, HIDDEN, FFN = 256, 64, 512
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {"gated_linear_unit": True, "activation_func": F.silu},
    "gelu with biases": {"add_bias_linear": True, "activation_func": F.gelu},
    "squared relu": {"activation_func": lambda x: torch.relu(x).square()},
}
CASES = [
    *((kind, False, False) for kind in KINDS),
    *((kind, False, True) for kind in KINDS if "biases" not in kind),  # upstream's own add fails
    ("swiglu", True, False),
    ("swiglu", True, True),
    ("gelu with biases", True, False),
]
"""Kind, fused (Megatron fuses no others), with the scales of an expert's tokens."""


def mlp(kind: str, fused: bool) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=1,
        bias_activation_fusion=fused,
        gradient_accumulation_fusion=False,
        **{"add_bias_linear": False, **KINDS[kind]},
    )
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MLP(config, parts)


def gradients(module: Any, expert: bool) -> tuple[list[Tensor], int]:
    """Output, gradients, and the bytes that are held between forward and backward."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=draw).requires_grad_()
    scale = torch.rand(TOKENS, 1, generator=draw).requires_grad_()
    before = memory.memory_allocated()
    output, bias = module(x, per_token_scale=scale) if expert else module(x)
    held = memory.memory_allocated() - before
    output.square().sum().backward()
    assert (bias is None) == (expert or not module.config.add_bias_linear)
    of_parameters = [p.grad for p in module.parameters() if p.grad is not None]
    return [output.detach(), x.grad, *of_parameters, *([scale.grad] if expert else [])], held


@needs_native
@pytest.mark.parametrize(("kind", "fused", "expert"), CASES)
def test_gradients_are_stocks_and_the_activation_is_freed(
    kind: str, fused: bool, expert: bool
) -> None:
    results = []
    for marked in (False, True):
        with one_rank(recompute_activation=True, fused_activation=fused):
            module = mlp(kind, fused)
            setattr(module, recompute_activation.MARK, marked)
            results.append(gradients(module, expert))
    if fused:  # as with preset max
        features = ("recompute_activation", "fused_activation", "inplace_activation_grad")
        with one_rank(**dict.fromkeys(features, True)):
            module = mlp(kind, fused)
            setattr(module, recompute_activation.MARK, True)
            assert all(map(torch.equal, gradients(module, expert)[0], results[0][0]))
    (stock, whole), (ours, freed) = results
    assert len(ours) == len(stock)
    assert all(map(torch.equal, ours, stock))
    assert whole - freed >= TOKENS * FFN * 4 - 4096


@needs_native
@pytest.mark.parametrize(("limit", "marked"), [(None, 3), (2, 2), (0, 0)])
def test_the_first_layers_are_chosen(limit: int | None, marked: int) -> None:
    with one_rank(recompute_activation=True, recompute_activation_num_layers=limit):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.transformer_block import TransformerBlock

        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=1)
        block = TransformerBlock(config, get_gpt_layer_local_spec())
        found = [getattr(layer.mlp, recompute_activation.MARK, False) for layer in block.layers]
    assert found == [True] * marked + [False] * (3 - marked)


@needs_native
def test_experts_that_keep_their_activation_are_told(caplog: pytest.LogCaptureFixture) -> None:
    moe = {
        "num_moe_experts": 4,
        "moe_token_dispatcher_type": "alltoall",
        "moe_ffn_hidden_size": 128,
    }
    log_once.cache_clear()

    def said() -> str:
        return "; ".join(r.getMessage() for r in caplog.records if r.name == "accel")

    with one_rank(recompute_activation=True), caplog.at_level("WARNING", logger="accel"):
        block(2, {"num_experts": 4}, **moe)
        assert not said(), "one after the other, they are MLPs"
        shared = {"moe_shared_expert_intermediate_size": 64, "moe_grouped_gemm": True}
        spec = {"num_experts": 4, "moe_grouped_gemm": True}
        te_block(
            spec, **moe, **shared, recompute_granularity="selective", recompute_modules=["moe_act"]
        )
        assert not said(), "Megatron's flag has it recomputed"
        te_block(spec, **moe, **shared)
        assert "a TEGroupedMLP keeps its activation: --recompute-modules moe_act" in said()
        assert "SharedExpertMLP" not in said()
        te_block(spec, **moe, **shared, moe_shared_expert_overlap=True)
    assert "a SharedExpertMLP keeps its activation with --moe-shared-expert-overlap" in said()


def te_block(given: dict[str, Any], **config: Any) -> Any:
    """Layers of the Transformer Engine spec."""
    from megatron.core.models.gpt import gpt_layer_specs

    of_te = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_layer_specs, "get_gpt_layer_local_spec", lambda **_: of_te(**given))
        return block(2, **config)


def test_nothing_is_freed_without_gradients() -> None:
    with one_rank(recompute_activation=True):
        module = mlp("swiglu", False)
        x = torch.randn(4, 1, HIDDEN)
        with torch.no_grad():
            expected = module(x)[0]
            setattr(module, recompute_activation.MARK, True)
            assert torch.equal(module(x)[0], expected)
        assert torch.equal(module.eval()(x)[0], expected)


@pytest.mark.parametrize("value", ["-1", "many", 1.5])
def test_a_number_of_layers_that_is_none(value: Any) -> None:
    given = {"recompute_activation": True, "recompute_activation_num_layers": value}
    context = Context("cpu", "0.19.2", SimpleNamespace())
    choices = choose([recompute_activation.FEATURE], "off", given, context)
    with pytest.raises(ValueError, match=r"num-layers: .* is no number of layers"):
        read_settings(choices, given)
