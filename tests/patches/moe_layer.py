"""An MoE layer of Megatron's local spec, and what one step of it computes: shared by the tests of the
MoE features."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel

TOKENS, HIDDEN, FFN, EXPERTS = 24, 32, 48, 8

CONFIGS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"moe_expert_capacity_factor": 0.75},
    "capacity_padded": {
        "moe_expert_capacity_factor": 1.25,
        "moe_pad_expert_input_to_capacity": True,
    },
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "sigmoid_groups_and_bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
    },
    "pre_softmax_top_1": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "probs_on_input": {
        "moe_router_pre_softmax": True,
        "moe_router_topk": 1,
        "moe_apply_probs_on_input": True,
    },
    "sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 3},
}

FLAGS = {"moe_permute_fusion": True, "moe_router_fusion": True, "moe_grouped_gemm": True}


@contextlib.contextmanager
def one_rank(preset: str, **features: bool) -> Iterator[None]:
    """accel with this preset, and Megatron's groups over this process alone."""
    accel.enable(preset=preset, **features)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    try:
        if not dist.is_initialized():
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(3)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        accel.disable()


def build(dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    """The layer with weights that depend on nothing but their names and shapes."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    if (
        options.get("moe_router_score_function") == "sqrtsoftplus"
        and "sqrtsoftplus" not in _score_functions()
    ):
        pytest.skip("this Megatron has no sqrtsoftplus")
    defaults = {
        "moe_router_load_balancing_type": "none",
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        moe_router_dtype="fp32",
        **{**defaults, **options},
    )
    spec = get_moe_module_spec(
        use_te=False, num_experts=EXPERTS, moe_grouped_gemm=config.moe_grouped_gemm
    )
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    layer = MoELayer(config, submodules=submodules, pg_collection=get_default_pg_collection())
    layer.set_layer_number(1)
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data.copy_(drawn)
    if config.moe_router_enable_expert_bias:
        layer.router.expert_bias.copy_(0.2 * torch.randn(EXPERTS, generator=generator))
    return layer


def _score_functions() -> str:
    import inspect

    from megatron.core.transformer.moe import moe_utils

    return inspect.getsource(moe_utils.topk_routing_with_score_function)


def step(layer: torch.nn.Module, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Output, input gradient and every parameter's gradient of one forward and backward."""
    generator = torch.Generator().manual_seed(6)
    dtype = next(layer.experts.parameters()).dtype
    x = torch.randn(tokens, 1, HIDDEN, generator=generator).to(dtype).requires_grad_()
    y, _ = layer(x)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "input": x.grad, **grads}


def assert_same(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> None:
    """The same tensors within a few roundings of the dtype they were computed in."""
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        scale = float(expected.abs().max().float().clamp(min=1e-3))
        atol = 16 * torch.finfo(expected.dtype).eps * scale
        torch.testing.assert_close(
            ours[name], expected, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
