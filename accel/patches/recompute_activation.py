"""The output of an MLP's activation is freed until the backward pass, and computed again there.

``--accel-recompute-activation`` (MindSpeed's ``--recompute-activation-function``): of what an MLP keeps for
its backward pass, the output of the activation (``ffn_hidden_size`` elements of a token), and what an
unfused one saves on its way, are computed again from the output of the first matrix product, just before
they are needed. ``--accel-recompute-activation-num-layers N`` does so in the first N layers of each rank,
its virtual stages in turn (MindSpeed's ``--recompute-activation-function-num-layers``).

Gradients are those of stock, bit for bit. It serves dense MLPs, shared experts that are not overlapped, and
the experts of the local spec; for those of the TE spec that run grouped there is Megatron's own
``--recompute-modules moe_act``. In a layer that is recomputed as a whole (``--recompute-granularity full``)
it holds while that layer runs again. What is freed and what is left alone: ``accel/memory/recompute.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.log import log_once
from accel.memory.recompute import Recomputed
from accel.patches._layers import NUM_LAYERS, Altered, FirstLayers, when_a_layer_is_built
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE

_HERE = "accel.patches.recompute_activation"

MARK = "accel_recompute_activation"
"""Attribute of an MLP in a layer that was chosen."""
WATCHERS = "accel_watchers"
"""Attribute of an MLP whose activation is measured: two functions, called where it begins and ends. Hooks
on its linear layers would do, but experts that find some there run one by one. Grouped experts run as a copy
of the first, which has the attribute too."""


def mark(layer: Any) -> None:
    """The MLPs of a layer."""
    from megatron.core.transformer.mlp import MLP

    for module in layer.mlp.modules():
        if isinstance(module, MLP):
            setattr(module, MARK, True)
    experts = getattr(layer.mlp, "experts", None)
    if experts is None:
        _tell(layer.mlp, "")
    elif "moe_act" not in (layer.config.recompute_modules or ()):
        _tell(experts, ": --recompute-modules moe_act has it recomputed")
    if shared := getattr(layer.mlp, "shared_experts", None):
        _tell(shared, " with --moe-shared-expert-overlap")


def _tell(mlps: Any, more: str) -> None:
    """Say of what computes its activation by itself that it is kept."""
    from megatron.core.transformer.mlp import MLP

    served = any(isinstance(module, MLP) and _is_called(module) for module in mlps.modules())
    if not served and any(True for _ in mlps.parameters()):
        log_once("recompute_activation", f"a {type(mlps).__name__} keeps its activation{more}")


def _is_called(mlp: Any) -> bool:
    """Whether ``MLP.forward`` runs where this one does."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    if isinstance(mlp, SharedExpertMLP):
        return not mlp.config.moe_shared_expert_overlap  # else it runs in steps
    return type(mlp).forward is MLP.forward


LAYERS = FirstLayers()
choosing = LAYERS.wrapping(mark)


class _Layer(torch.nn.Module):
    """A function where Megatron wants a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _watched(mlp: Any) -> Any:
    """The MLP, whose watchers see what fc1 returns and what fc2 is given."""
    begins, ends = getattr(mlp, WATCHERS)

    def fc1(x: Tensor) -> Any:
        output = mlp.linear_fc1(x)
        begins(output)
        return output

    def fc2(*args: Any) -> Any:
        ends(args)
        return mlp.linear_fc2(*args)

    return Altered(mlp, linear_fc1=_Layer(fc1), linear_fc2=_Layer(fc2))


@around
def recomputing(
    forward: Callable[..., Any],
    /,
    self: Any,
    hidden_states: Tensor,
    per_token_scale: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``MLP.forward``, of which the part between its matrix products runs again in the backward pass."""
    if hasattr(self, WATCHERS):
        return forward(_watched(self), hidden_states, per_token_scale, **kwargs)
    if not getattr(self, MARK, False):
        return forward(self, hidden_states, per_token_scale, **kwargs)

    def activation(intermediate: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        fc1, fc2 = _Layer(lambda x: (intermediate, bias)), _Layer(lambda x: (x, None))
        between = Altered(self, linear_fc1=fc1, linear_fc2=fc2)
        return forward(between, intermediate, scale, **kwargs)[0]

    # no activation draws random numbers
    call = Recomputed(generators=lambda: contextlib.nullcontext)
    activated = call(activation, *self.linear_fc1(hidden_states), per_token_scale)
    output, bias = self.linear_fc2(activated)
    call.free(output)
    if per_token_scale is not None and bias is not None:
        output += bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)
        bias = None
    return output, bias


MLP_FORWARD = Patch(
    target="megatron.core.transformer.mlp:MLP.forward",
    replacement=f"{_HERE}:recomputing",
    how="wrap",
    expects=("self", "hidden_states", "per_token_scale", "kwargs"),
    sources=dict.fromkeys(SUPPORTED_MEGATRON, "801325ddbf01"),
    why="Upstream keeps the output of the activation; what follows fc2 there is repeated here.",
)
"""For features that mark MLPs."""

FEATURE = Feature(
    name="recompute_activation",
    summary="free the output of an MLP's activation until the backward pass, and compute it again there",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    benchmarks=("activation_memory",),
    conflicts=dict.fromkeys(
        ("fp8", "fp4"), "the second linear layer keeps what it has quantized, not what is freed"
    ),
    settings=(NUM_LAYERS,),
    switch_on=LAYERS.switch_on,
    patches=(
        *when_a_layer_is_built(f"{_HERE}:choosing", "activation"),
        MLP_FORWARD,
    ),
)
