"""A layer with experts that is computed again: its router counts and logs what it does without, once."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from accel.memory.recompute import Recomputed, Restorer
from accel.patches._router_state import router_state

from .moe_layer import HIDDEN, TOKENS, build, one_rank

GLOBAL = {
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def trained(again: bool, state: Restorer | None = None) -> dict[str, Tensor]:
    """Gradients and buffers after two micro-batches whose backward passes come last, as in a pipeline."""
    layer = build(**GLOBAL)
    in_layer = SimpleNamespace(mlp=layer)
    generator = torch.Generator().manual_seed(6)
    outputs = []
    for _ in range(2):
        x = torch.randn(TOKENS, 1, HIDDEN, generator=generator).requires_grad_()
        if again:
            call = Recomputed(state or functools.partial(router_state, in_layer))
            y = call(lambda x: layer(x)[0], x)
            call.free(y * 1)
        else:
            y = layer(x)[0]
        outputs.append(y)
    for y in outputs:
        y.backward(torch.randn(y.shape, generator=generator))
    logged = {f"logged {name}": values for name, values in _logged().items()}
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {**gradients, **dict(layer.router.named_buffers()), **logged}


def _logged() -> dict[str, Tensor]:
    """What the losses add up to since the last call."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        tracker = moe_utils.get_moe_metrics_tracker()
        found = {name: entry.values.clone() for name, entry in tracker._metrics.items()}
        tracker.clear()
    else:
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"].clone() for name, entry in tracker.items()}
        moe_utils.clear_aux_losses_tracker()
    return found


def test_what_a_router_counts_is_counted_once() -> None:
    with one_rank("off"):
        _logged()
        kept, again = trained(False), trained(True)
        twice = trained(True, lambda: contextlib.nullcontext)
    assert kept.keys() == again.keys()
    assert {"global_tokens_per_expert", "ga_steps", "local_tokens_per_expert"} < kept.keys()
    assert {"logged z_loss", "logged global_load_balancing_loss"} < kept.keys()
    for name, value in kept.items():
        assert torch.equal(again[name], value), name
    assert not torch.equal(twice["router.weight"], kept["router.weight"]), "the test sees nothing"
    assert float(twice["ga_steps"]) == 2 * float(kept["ga_steps"])


def test_a_layer_without_a_router_has_no_state() -> None:
    mlp = SimpleNamespace()
    assert router_state(SimpleNamespace(mlp=mlp)) is contextlib.nullcontext
    assert not vars(mlp)
