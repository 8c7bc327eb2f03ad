"""The experts of the local spec as one grouped product for each of their two layers.

Without Transformer Engine, Megatron runs its experts one after the other (``SequentialMLP``), also under
``--moe-grouped-gemm``: each on its own slice of the tokens, through the whole MLP, and the results are
concatenated. Here all tokens pass the MLP once: a grouped product with each expert's first matrix, the
activation of all tokens together, a grouped product with each second matrix, straight into place.
Upstream's own ``MLP.forward`` does that, with grouped layers in place of its two linear ones, so every
activation and fusion is upstream's.

The module is still ``SequentialMLP``: parameters, initialisation, state-dict keys and sharded checkpoints
are the same, and each expert's parameters keep their own gradients. With
``--gradient-accumulation-fusion`` weight gradients are added straight to ``main_grad`` in fp32.

Experts with biases, one expert on a rank, fp8 and fp4, parameters that FSDP or GTP shards, and linear
layers that somebody replaced or hooked into run one after the other as before; said once on the logger
``accel``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.layers.grouped_linear import grouped_linear
from accel.ops import grouped_gemm
from accel.ops._autocast import autocasts
from accel.ops._dispatch import log_fallback
from accel.parallel.linear import Layout
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_has_its_own


class GroupedLinear(torch.nn.Module):
    """One linear layer of every expert, for the length of a call; takes the layers' place in their MLP."""

    def __init__(self, layers: Sequence[Any], tokens_per_expert: Tensor) -> None:
        super().__init__()
        self.layers = list(layers)  # a plain list: the parameters stay where they are
        self.tokens_per_expert = tokens_per_expert

    def forward(self, x_TK: Tensor) -> tuple[Tensor, None]:
        for layer in self.layers:
            # those of overlapped parameter gathering: the weight must be here
            for hook in layer._forward_pre_hooks.values():
                hook(layer, (x_TK,))
        weights = [layer.weight for layer in self.layers]
        # One after the other, empty experts would have a gradient of 0 as well.
        if all(w.requires_grad for w in weights):
            layout = Layout(into_main_grad=self.layers[0].gradient_accumulation_fusion)
            return grouped_linear(x_TK, weights, self.tokens_per_expert, layout), None
        if autocasts(x_TK):
            dtype = torch.get_autocast_dtype(x_TK.device.type)
            x_TK, weights = x_TK.to(dtype), [w.to(dtype) for w in weights]
        y_TN = grouped_gemm(x_TK, weights, self.tokens_per_expert, transpose_b=True)
        return y_TN, None


def sequential_reason(experts: Any) -> str | None:
    """Why these experts run one after the other; None if they can be grouped."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = experts.config
    if config.fp8 or getattr(config, "fp4", None):
        return "fp8 and fp4"
    if config.add_bias_linear:
        return "experts with biases"
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        return "probabilities on the inputs of several experts"  # upstream refuses them
    if getattr(config, "gtp_weight_remat_size", 1) > 1:
        return "parameters sharded by GTP"
    for expert in experts.local_experts:
        if reason := altered_reason(expert, "experts"):
            return reason
        for layer, kind in (
            (expert.linear_fc1, ColumnParallelLinear),
            (expert.linear_fc2, RowParallelLinear),
        ):
            if type(layer) is not kind:
                return f"a linear layer of type {type(layer).__name__} without --moe-grouped-gemm"
            if reason := altered_reason(layer, "linear layers"):
                return reason
            if type(layer.weight) is not torch.nn.Parameter or hasattr(
                layer.weight, "__fsdp_param__"
            ):
                return "parameters sharded by FSDP"
    return None


def altered_reason(module: torch.nn.Module, name: str) -> str | None:
    """What somebody has put on a module that only a call of its own would heed; None if nothing."""
    if "forward" in vars(module):
        return f"{name} with a forward of their own"
    hooks = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or not all(map(_gathers, module._forward_pre_hooks.values())):
        return f"{name} with hooks"
    return None


def _gathers(hook: Callable[..., Any]) -> bool:
    """Whether it is Megatron's own, of overlapped parameter gathering: it changes no input."""
    return "._make_forward_pre_hook." in getattr(hook, "__qualname__", "")


@around
def grouped_forward(
    original: Callable[..., Any],
    self: Any,
    permuted_local_hidden_states: Tensor,
    tokens_per_expert: Tensor,
    permuted_probs: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Wraps ``SequentialMLP.forward``."""
    if self.num_local_experts == 1:
        return original(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)
    two_dimensions = permuted_local_hidden_states.dim() == 2
    reason = sequential_reason(self) if two_dimensions else "tokens in other than 2 dimensions"
    if reason:
        log_fallback("grouped_gemm of SequentialMLP", reason)
        return original(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)
    x, probs = permuted_local_hidden_states, permuted_probs
    if self.config.moe_apply_probs_on_input:
        x = (probs.unsqueeze(-1) * x).to(x.dtype)
        probs = torch.ones_like(probs)
    counts = tokens_per_expert.to(device="cpu", dtype=torch.int64)
    # Upstream's MLP itself, with grouped layers: a copy that shares all else with expert 0.
    mlp = copy.copy(self.local_experts[0])
    mlp._modules = {
        **mlp._modules,
        "linear_fc1": GroupedLinear([e.linear_fc1 for e in self.local_experts], counts),
        "linear_fc2": GroupedLinear([e.linear_fc2 for e in self.local_experts], counts),
    }
    return mlp(x, probs)


FEATURE = Feature(
    name="grouped_gemm",
    summary="run the experts of the local spec as one grouped product for each layer",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    aside=te_has_its_own,
    benchmarks=("grouped_gemm", "grouped_experts"),
    patches=(
        Patch(
            target="megatron.core.transformer.moe.experts:SequentialMLP.forward",
            replacement="accel.patches.grouped_gemm:grouped_forward",
            how="wrap",
            why="Upstream's local experts run one after the other, even under --moe-grouped-gemm.",
        ),
    ),
)
