"""What Megatron's routers decide, for whoever counts it: the recorders in ``load.ON``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.log import log_once
from accel.parallel.experts import load
from accel.parallel.experts.load import LayerLoad, Recorder
from accel.patching import Patch, around
from accel.slot import Slot

__all__ = ["DROPPING", "ROUTING", "layer_of", "number_of", "of_all_ranks", "uncounted_routers"]

_HERE = "accel.patches._expert_counts"
_MOE = "megatron.core.transformer.moe"
_CAPTURED = {"attn", "mlp", "mamba"}
"""What CUDA graphs may capture: no router is in it."""
_WANTED = Slot[Tensor]()
"""Of the router that runs, the map before capacity dropped some; or nothing."""


def layer_of(router: Any) -> int:
    """From 1 through all pipeline stages; those of multi-token prediction behind all others."""
    return int(router.layer_number) + (router.config.num_layers if router.is_mtp_layer else 0)


def number_of(layer: Any) -> int | None:
    """`layer_of` an MoE layer's router, for errors; of a layer by itself, what it was given."""
    numbered = layer.router.layer_number is not None
    return layer_of(layer.router) if numbered else layer.layer_number


@around
def counted(
    routing: Callable[..., Any], self: Any, logits: Tensor, padding_mask: Tensor | None = None
) -> Any:
    """``TopKRouter.routing``, which returns probabilities and the map ``[tokens, experts]``."""
    _WANTED.clear()
    probs, routing_map = routing(self, logits, padding_mask)
    wanted = _WANTED.get()
    _WANTED.clear()
    if self.training and self.layer_number is not None:
        if load.ON:
            _say_if_nobody_asks()
        for recorder in load.ON:
            recorder.note_routing(layer_of(self), routing_map, wanted)
    return probs, routing_map


def _say_if_nobody_asks() -> None:
    """Both features act in Megatron's training loop, whose arguments are there before its model is."""
    variables = sys.modules.get("megatron.training.global_vars")
    if getattr(variables, "_GLOBAL_ARGS", None) is None:
        log_once(
            "moe_load_report, expert_migration",
            "experts' rows are counted, and nothing comes of it outside Megatron's own training loop",
        )


@around
def before_dropping(
    dropping: Callable[..., Any],
    routing_probs: Tensor,
    routing_map: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    """``apply_router_token_dropping(routing_probs, routing_map, ...)``."""
    _WANTED.set(routing_map)
    return dropping(routing_probs, routing_map, *rest, **options)


def of_all_ranks(recorder: Recorder, args: Any) -> list[LayerLoad]:
    """The same on every rank; all of them ask."""
    from megatron.core import parallel_state

    first = parallel_state.get_tensor_model_parallel_rank() == 0
    expert_first = parallel_state.get_expert_tensor_parallel_rank() == 0
    packed = recorder.packed(
        args.num_layers + (args.mtp_num_layers or 0),
        args.num_experts,
        parallel_state.get_expert_model_parallel_world_size(),
        torch.cuda.current_device(),
        counts=first or args.sequence_parallel,
        speaks=expert_first and parallel_state.get_expert_model_parallel_rank() == 0,
    )
    torch.distributed.all_reduce(packed)
    return load.loads(packed, args.num_experts)


def uncounted_routers(args: Any) -> str | None:
    """Why routers cannot be counted: CUDA graphs replay them, or layers of two kinds have one number."""
    patterns = (getattr(args, f"hybrid_{name}_pattern", None) for name in ("layer", "override"))
    for pattern in filter(None, patterns):
        if "E" in pattern.partition("/")[2]:
            return (
                f"a hybrid model of the pattern {pattern!r}: its experts of multi-token prediction have the "
                "numbers of the decoder's"
            )
    impl = getattr(args, "cuda_graph_impl", "none")
    if impl in (None, "none"):
        return None
    captured = (
        getattr(args, "cuda_graph_modules", None)
        or getattr(args, "cuda_graph_scope", None)
        or ["all"]
    )
    if {getattr(each, "name", each) for each in captured} <= _CAPTURED:
        return None
    return f"not with --cuda-graph-impl {impl} where it captures routers: their replays cannot be counted"


ROUTING = Patch(
    target=f"{_MOE}.router:TopKRouter.routing",
    replacement=f"{_HERE}:counted",
    how="wrap",
    why="The map that it returns says which experts get which tokens, whatever the dispatcher.",
)
DROPPING = Patch(
    target=f"{_MOE}.moe_utils:apply_router_token_dropping",
    replacement=f"{_HERE}:before_dropping",
    how="wrap",
    expects=(
        "routing_probs",
        "routing_map",
        "router_topk",
        "capacity_factor",
        "drop_policy",
        "pad_to_capacity",
    ),
    why="What is dropped is known where the map before it is.",
)
