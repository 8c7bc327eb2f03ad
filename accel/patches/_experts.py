"""Megatron's experts as `accel.parallel.experts` takes them, whichever module holds them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from accel.layers.grouped_linear import GroupedLinear
from accel.parallel.experts.exchange import Experts, Product
from accel.patches.grouped_gemm import altered_reason, sequential_reason

__all__ = ["experts_of", "reason"]


def reason(module: Any) -> str | None:
    """Why the experts in `module`, an MoE layer's, cannot be computed piece by piece; None if they can."""
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    if altered := altered_reason(module, "experts"):
        return altered
    kind = type(module)
    if kind is SequentialMLP:
        found = sequential_reason(module)
    elif kind is TEGroupedMLP:
        found = _grouped_reason(module)
    else:
        found = f"experts of type {kind.__name__}"
    if found is None and not all(p.requires_grad for p in module.parameters()):
        found = "frozen experts"
    return found


def _grouped_reason(module: Any) -> str | None:
    config = module.config
    if config.fp8 or getattr(config, "fp4", None):
        return "fp8 and fp4"
    if getattr(module, "_with_fused_impl", False):
        return "--use-transformer-engine-op-fuser"
    if getattr(module, "offload_expert_fc1", False) or getattr(module, "offload_moe_act", False):
        return "activations that are offloaded in the experts"
    for layer in (module.linear_fc1, module.linear_fc2):
        if not isinstance(layer, GroupedLinear):
            return f"a linear layer of type {type(layer).__name__}"
        if layer.use_bias:
            return "experts with biases"
        if layer.layout.delayed is not None:
            return "--delay-wgrad-compute"
        if altered := altered_reason(layer, "linear layers"):
            return altered
    return None


class _Multiplies(torch.nn.Module):
    """Takes a linear layer's place in the MLP for the length of a call."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor, *counts: Any) -> tuple[Tensor, None]:
        return self.product(x), None


def experts_of(module: Any, x: Tensor) -> Experts:
    """The experts in a module for which there is no `reason`, their parameters gathered.

    Args:
        x: what goes in, for the hooks that gather parameters.
    """
    local = getattr(module, "local_experts", None)
    if local is not None:
        layers = [[e.linear_fc1 for e in local], [e.linear_fc2 for e in local]]
        first, second = ([layer.weight for layer in of] for of in layers)
        into_main_grad = layers[0][0].gradient_accumulation_fusion
    else:
        layers = [[module.linear_fc1], [module.linear_fc2]]
        first, second = (
            [getattr(layer, f"weight{e}") for e in range(layer.num_gemms)] for (layer,) in layers
        )
        into_main_grad = module.linear_fc1.layout.into_main_grad
    for layer in (*layers[0], *layers[1]):
        for hook in layer._forward_pre_hooks.values():
            hook(layer, (x,))

    def mlp(x: Tensor, probs: Tensor, counts: Tensor, first: Product, second: Product) -> Tensor:
        """Upstream's own, with products in place of its two linear layers."""
        upstream = copy.copy(module if local is None else local[0])
        upstream._modules = {
            **upstream._modules,
            "linear_fc1": _Multiplies(first),
            "linear_fc2": _Multiplies(second),
        }
        if local is None:
            return upstream(x, counts, probs)[0]
        if module.config.moe_apply_probs_on_input:
            x, probs = (probs.unsqueeze(-1) * x).to(x.dtype), torch.ones_like(probs)
        return upstream(x, probs)[0]

    return Experts(mlp, (first, second), into_main_grad)
