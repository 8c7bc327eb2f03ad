"""Experts that move to other ranks while a model trains.

Every ``--accel-expert-migration N`` iterations the rows of each layer's experts are added up over all ranks,
and averaged with those before. Where other owners would make the expert-parallel ranks more even, pairs of
experts change places, until ranks are as even as dealing out the largest experts first would make them, and
only where the standard deviation of the ranks' rows over their mean drops by at least
``--accel-expert-migration-threshold`` (0.08). Weights, masters and moments go along, with the distributed
optimizer too.

Experts that moved have each other's numbers: the router's rows, its bias and the bias of each expert are put
into the same order. So every token goes to the experts that it went to before, and a checkpoint is one that
stock writes and reads; sums over a token's experts differ in their order alone. What is counted by an
expert's number, as in ``moe_load_report``, is counted by the new one.

Where single micro-batches are uneven and many are not, ``hot_experts`` helps and this does not.

**Not with** ``--moe-router-num-groups``, where an expert's number says which group it is in, FP8 or FP4
parameters, FSDP, offloaded, layer-wise or other optimizers than Adam, or CUDA graphs that capture routers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature, Setting
from accel.parallel.experts import load
from accel.parallel.experts.load import LayerLoad, Recorder
from accel.parallel.experts.migration import bring, new_order
from accel.parallel.experts.plan import longest_over_mean, moving_average, plan_migration
from accel.patches._expert_counts import ROUTING, layer_of, of_all_ranks, uncounted_routers
from accel.patches._param_states import ParamStates
from accel.patches._settings import (
    first_given,
    no_experts,
    not_negative,
    one_expert_rank,
    whole_number,
)
from accel.patching import Patch, around
from accel.slot import Slot
from accel.start_up import say
from accel.upstream import SUPPORTED_RANGE, flag_of

__all__ = ["FEATURE", "ON", "Migration"]

_HERE = "accel.patches.expert_migration"
_KEEP = 0.5
"""Of the average before, each time."""


@dataclass
class Migration:
    """What was counted since experts last could move.

    Args:
        every: iterations.
        threshold: see above.
    """

    every: int
    threshold: float
    recorder: Recorder = field(default_factory=Recorder)
    averages: dict[int, list[float]] = field(default_factory=dict)
    """Layer -> rows of each expert."""
    states: ParamStates | None = None

    def orders(self, layers: Sequence[LayerLoad]) -> dict[int, list[int]]:
        """Layer -> which expert each slot gets, of the layers in which some move."""
        found = {}
        for each in layers:
            ranks = len(each.ranks)
            average = moving_average(self.averages.get(each.layer), each.rows, _KEEP)
            owners = [e * ranks // len(average) for e in range(len(average))]
            placed = plan_migration(average, owners, ranks, self.threshold)
            if placed is not None:
                found[each.layer] = order = new_order(placed, ranks)
                before, after = (_of_ranks(rows, ranks) for rows in (average, _at(average, order)))
                say(
                    f"expert_migration, layer {each.layer}: {sum(slot != e for slot, e in enumerate(order))} "
                    f"experts change ranks, longest over mean {longest_over_mean(before):.3f} -> "
                    f"{longest_over_mean(after):.3f}"
                )
                average = _at(average, order)
            self.averages[each.layer] = average
        return found


ON = Slot[Migration]()


@around
def migrating(
    train_step: Callable[..., Any],
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    *rest: Any,
    **more: Any,
) -> Any:
    """``train_step(forward_step_func, data_iterator, model, optimizer, ...)``."""
    from megatron.training import get_args

    migration, args = ON.value, get_args()
    if migration.states is None:
        migration.states = ParamStates(model, optimizer)
        for _, layer in _moe_layers(model):
            _params_of(layer.experts, 0)
    result = train_step(forward_step_func, data_iterator, model, optimizer, *rest, **more)
    if (args.curr_iteration + 1) % migration.every == 0:
        orders = migration.orders(of_all_ranks(migration.recorder, args))
        migration.recorder.clear()
        if orders:
            migrate(model, migration.states, orders)
    return result


@torch.no_grad()
def migrate(model: Sequence[Any], states: ParamStates, orders: dict[int, list[int]]) -> None:
    """Experts into their new slots.

    Args:
        orders: layer -> which expert each slot gets; the same on all ranks.
    """
    states.settle()
    for number, layer in _moe_layers(model):
        if number in orders:
            _move_experts(layer.experts, states, orders[number])
            _reorder_router(layer.router, states, orders[number])
            if (ahead := getattr(layer, "accel_ahead", None)) is not None:
                ahead.reorder(orders[number])
    states.publish()


def _move_experts(experts: Any, states: ParamStates, order: Sequence[int]) -> None:
    group = experts.ep_group
    first = group.rank() * len(order) // group.size()
    device = next(experts.parameters()).device

    def state(expert: int) -> Tensor:
        return torch.cat([states.whole(p) for p in _params_of(experts, expert - first)], dim=1)

    for slot, came in bring(order, state, group, device).items():
        params = _params_of(experts, slot - first)
        for param, of_param in zip(params, came.split([p.numel() for p in params], 1), strict=True):
            states.put(param, of_param)


def _reorder_router(router: Any, states: ParamStates, order: Sequence[int]) -> None:
    """Parameters and buffers that have something for each expert."""
    for param in router.parameters(recurse=False):
        if param.shape[:1] == (len(order),):
            whole = states.whole(param)
            states.put(param, whole.view(3, len(order), -1)[:, order].reshape(3, -1))
    for buffer in router.buffers(recurse=False):
        if buffer.shape[:1] == (len(order),):
            buffer.copy_(buffer[order])


def _moe_layers(model: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """With their numbers."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                yield layer_of(module.router), module


def _params_of(experts: Any, index: int) -> list[Tensor]:
    """Of one of this rank's experts, in the same order for each.

    Raises:
        ValueError: they cannot be told from those of the others.
    """
    local = getattr(experts, "local_experts", None)
    if local is not None:
        return list(local[index].parameters())
    named = list(experts.named_parameters())
    found = [param for name, param in named if re.fullmatch(rf"linear_fc[12]\.[a-z]+{index}", name)]
    if len(found) * experts.num_local_experts != len(named):
        raise ValueError(
            f"expert_migration: one expert's parameters among {[name for name, _ in named][:4]}, ... of "
            f"{type(experts).__name__} cannot be told from another's"
        )
    return found


def _at(values: Sequence[float], order: Sequence[int]) -> list[float]:
    return [values[e] for e in order]


def _of_ranks(rows: Sequence[float], ranks: int) -> list[float]:
    each = len(rows) // ranks
    return [sum(rows[at : at + each]) for at in range(0, len(rows), each)]


def parse_interval(given: Any) -> int:
    return whole_number(given, "iterations")


def parse_threshold(given: Any) -> float:
    return not_negative(given, "drop of a standard deviation over a mean")


_EXCLUDED = (
    "fp8",
    "fp4",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "optimizer_cpu_offload",
    "moe_enable_routing_replay",
    "moe_router_force_biased",
    "use_layer_wise_distributed_optimizer",
)


def refused(context: Context) -> str | None:
    args = context.args
    if getattr(args, "moe_router_num_groups", None) or getattr(
        args, "moe_router_topk_limited_devices", None
    ):
        return "with groups of experts an expert's number says which group it is in"
    optimizer = getattr(args, "optimizer", "adam")
    if optimizer != "adam":
        return f"--optimizer {optimizer}: only Adam's moments can go along"
    if option := first_given(_EXCLUDED, args):
        return f"not with {flag_of(option)}"
    return uncounted_routers(args)


def idle(context: Context) -> str | None:
    return no_experts(context) or one_expert_rank(context)


def switch_on(value: int, threshold: float) -> Callable[[], None]:
    migration = Migration(value, threshold)
    undo = ExitStack()
    undo.callback(ON.set(migration))
    undo.callback(load.switch_on(migration.recorder))
    return undo.close


FEATURE = Feature(
    name="expert_migration",
    summary="every N iterations, let experts change ranks where that evens out their loads",
    preset=None,
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    refuses=refused,
    idle=idle,
    conflicts={"host_optimizer": "masters and moments wait in host memory"},
    settings=(
        Setting(
            name="",
            metavar="N",
            summary="iterations from one time that experts may move to the next",
            parse=parse_interval,
        ),
        Setting(
            name="threshold",
            metavar="X",
            summary="by which the ranks' standard deviation over mean must drop (default: 0.08)",
            parse=parse_threshold,
            default=0.08,
        ),
    ),
    switch_on=switch_on,
    patches=(
        ROUTING,
        Patch(
            target="megatron.training.training:train_step",
            replacement=f"{_HERE}:migrating",
            how="wrap",
            why="Between two steps nothing of a parameter is on its way.",
        ),
    ),
)
