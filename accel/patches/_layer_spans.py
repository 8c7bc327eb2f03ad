"""The parts of Megatron's layers that can be computed again: where each begins and ends, and its switch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.layers.linear import LayerNormLinear
from accel.memory.layer_costs import Hook, Span
from accel.patches import recompute_activation
from accel.patches.recompute_modules import norms_of, recompute_norms

__all__ = ["ATTENTION", "PARTS", "spans", "switch"]

NORMS, ACTIVATION, ATTENTION = "norms", "activation", "core attention"
PARTS = (NORMS, ACTIVATION, ATTENTION)


def spans(layer: Any) -> list[Span]:
    """The parts of a ``TransformerLayer`` or a ``MambaLayer`` that it can compute again."""
    from megatron.core.transformer.mlp import MLP

    found = [Span(NORMS, _before(norm), _behind(norm)) for norm in norms_of(layer).values()]
    for module in layer.modules():
        if isinstance(module, LayerNormLinear):
            # a method, called once in each forward pass
            found.append(Span(NORMS, *_around(module, "_norm", functools.partial(_timed, module))))
        if isinstance(module, MLP):
            found.append(Span(ACTIVATION, *_around(module, recompute_activation.WATCHERS, tuple)))
    attention = getattr(layer, "self_attention", None)
    core = getattr(attention, "core_attention", None)
    if core is not None and hasattr(attention, "checkpoint_core_attention"):
        # the output is kept: the projection behind needs it
        found.append(Span(ATTENTION, _before(core), _behind(core), keeps_output=True))
    return found


def _before(module: torch.nn.Module) -> Hook:
    return lambda call: module.register_forward_pre_hook(lambda _, args: call(args))


def _behind(module: torch.nn.Module) -> Hook:
    return lambda call: module.register_forward_hook(lambda _, args, output: call(output))


Calls = list[Callable[[Any], None]]


def _around(
    module: torch.nn.Module, attribute: str, watching: Callable[[Calls], Any]
) -> tuple[Hook, Hook]:
    """By an attribute of the module in place of hooks: what `watching` makes of both calls."""
    calls: Calls = []

    class Handle:
        def remove(self) -> None:
            vars(module).pop(attribute, None)

    def add(call: Callable[[Any], None]) -> Handle:
        calls.append(call)
        vars(module)[attribute] = watching(calls)
        return Handle()

    return add, add


def _timed(module: LayerNormLinear, calls: Calls) -> Callable[[Tensor], Tensor]:
    """The norm of a linear layer."""

    def timed(x: Tensor) -> Tensor:
        begins, ends = calls
        begins(x)
        y = LayerNormLinear._norm(module, x)
        ends(y)
        return y

    return timed


def switch(layer: Any, parts: frozenset[str]) -> None:
    """Have a layer compute these parts again, and no others."""
    from megatron.core.transformer.mlp import MLP

    recompute_norms(layer, NORMS in parts)
    for module in layer.modules():
        if isinstance(module, MLP):
            setattr(module, recompute_activation.MARK, ACTIVATION in parts)
    attention = getattr(layer, "self_attention", None)
    if attention is not None and hasattr(attention, "checkpoint_core_attention"):
        attention.checkpoint_core_attention = ATTENTION in parts
