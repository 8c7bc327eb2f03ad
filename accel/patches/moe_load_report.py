"""How evenly the experts of each mixture-of-experts layer are loaded: a table, curves and a picture.

``--accel-moe-load-report N`` tells of every Nth iteration, over all its micro-batches and all ranks:

    rows       token copies that the layer's experts got
    ranks      of each expert-parallel rank, max over mean: how much longer the busiest computes
    copied     the same with copies of hot experts, where there are any
    experts    of each expert, max over mean; then the busiest expert, from 0
    entropy    of the experts' shares: 1 is even, 0 is one expert for all
    dropped    rows beyond ``--moe-expert-capacity-factor``
    moved      MiB that the copies took, and the milliseconds that they are thought to save

The last rank prints the table behind Megatron's line of that iteration, gives the same to TensorBoard and
Weights & Biases where Megatron has a writer, as ``accel/moe/layer N/...``, and draws a heat map of layers
and experts into ``moe_load/`` of ``--tensorboard-dir``, else of ``--save``; with neither there is no picture,
which the start-up lines say. Layers of multi-token prediction come behind all others. Ranks with the same
number in their expert-parallel groups are added up, as micro-batches are: within one of them the load is
less even.

What training computes stays as it is, bit for bit. In each forward pass of a layer its routing map is added
up over the tokens, on the device; every N iterations one all-reduce of layers by experts adds up all ranks,
and the last one waits for it. Evaluation and activation recomputation do not count. Rows that pad experts to
their capacity are in, those that padding for quantization adds are not. Routers other than Megatron's
``TopKRouter`` are not seen, nor are those that a CUDA graph replays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature, Setting
from accel.parallel.experts import load
from accel.parallel.experts.load import LayerLoad, Recorder
from accel.patches._settings import whole_number
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

__all__ = ["FEATURE", "ON", "Report", "layer_of"]

_HERE = "accel.patches.moe_load_report"
_ROUTER = "megatron.core.transformer.moe"
_CAPTURED = {"attn", "mlp", "mamba"}
"""What CUDA graphs may capture: no router is in it."""


@dataclass
class Report:
    """Counts of the iteration that runs, and when they are told."""

    every: int
    recorder: Recorder = field(default_factory=Recorder)
    wanted: Tensor | None = None
    """Of the router that runs, the map before capacity dropped some."""


ON: list[Report] = []
"""One, or none."""


def layer_of(router: Any) -> int:
    """From 1 through all pipeline stages; those of multi-token prediction behind all others."""
    return int(router.layer_number) + (router.config.num_layers if router.is_mtp_layer else 0)


def counted(routing: Callable[..., Any]) -> Callable[..., Any]:
    """``TopKRouter.routing``, which returns probabilities and the map ``[tokens, experts]``."""

    @functools.wraps(routing)
    def routing_(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        report, report.wanted = ON[0], None
        probs, routing_map = routing(self, logits, padding_mask)
        wanted, report.wanted = report.wanted, None
        if self.training and self.layer_number is not None:
            report.recorder.note_routing(layer_of(self), routing_map, wanted)
        return probs, routing_map

    return routing_


def before_dropping(dropping: Callable[..., Any]) -> Callable[..., Any]:
    """``apply_router_token_dropping(routing_probs, routing_map, ...)``."""

    @functools.wraps(dropping)
    def dropping_(routing_probs: Tensor, routing_map: Tensor, *rest: Any, **options: Any) -> Any:
        ON[0].wanted = routing_map
        return dropping(routing_probs, routing_map, *rest, **options)

    return dropping_


def from_zero(should_run: Callable[..., bool]) -> Callable[..., bool]:
    """``RerunStateMachine.should_run_forward_backward``: asked before each run of an iteration's passes."""

    @functools.wraps(should_run)
    def should_run_(self: Any, data_iterator: Any) -> bool:
        runs = should_run(self, data_iterator)
        if runs:
            ON[0].recorder.clear()
        return runs

    return should_run_


def told(training_log: Callable[..., Any]) -> Callable[..., Any]:
    """``training_log(loss_dict, total_loss_dict, learning_rate, iteration, ...)``, on every rank."""

    @functools.wraps(training_log)
    def training_log_(
        loss_dict: Any,
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        result = training_log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **more)
        if iteration % ON[0].every == 0:
            from megatron.training import get_args

            args = get_args()
            _tell(iteration, _of_all_ranks(ON[0].recorder, args), args)
        return result

    return training_log_


def _of_all_ranks(recorder: Recorder, args: Any) -> list[LayerLoad]:
    """The same on every rank; on all but the last, empty."""
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
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    return load.loads(packed, args.num_experts) if last else []


def _tell(iteration: int, layers: Sequence[LayerLoad], args: Any) -> None:
    """To the log, to curves and as a picture; nothing where there are no layers."""
    if not layers:
        return
    from megatron.training import global_vars

    lines = load.table(layers).splitlines()
    print(f"accel: loads of experts, iteration {iteration}:", *lines, sep="\n  ", flush=True)
    values = {
        f"accel/moe/layer {layer.layer}/{name}": value
        for layer in layers
        for name, value in load.scalars(layer).items()
    }
    if (writer := global_vars.get_tensorboard_writer()) is not None:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if (wandb_writer := global_vars.get_wandb_writer()) is not None:
        wandb_writer.log(values, iteration)
    folder = _folder(args)
    if folder is not None and find_spec("matplotlib") is not None:
        path = folder / f"iter_{iteration:07d}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            load.to_png(layers, path, f"rows of experts, iteration {iteration}")
        except OSError as error:
            print(
                f"accel: no picture of the loads of experts: {path}: {error.strerror}", flush=True
            )


def _folder(args: Any) -> Path | None:
    """Of the pictures."""
    run = getattr(args, "tensorboard_dir", None) or getattr(args, "save", None)
    return Path(run) / "moe_load" if run else None


def parse_interval(given: Any) -> int:
    return whole_number(given, "iterations")


def _prepare(context: Context) -> Sequence[str]:
    """Where the pictures go, or why there are none."""
    args = context.args
    given = getattr(args, "accel_moe_load_report", None)
    if given in (None, False) or not getattr(args, "num_experts", None):
        return []
    folder = _folder(args)
    says = f"pictures in {folder}"
    if folder is None:
        says = "no pictures, as neither --tensorboard-dir nor --save is given"
    elif find_spec("matplotlib") is None:
        says = "no pictures, as matplotlib is not installed"
    return [f"{FEATURE.flag} {given}: {says}"]


def _refuses(context: Context) -> str | None:
    impl = getattr(context.args, "cuda_graph_impl", "none")
    if impl in (None, "none"):
        return None
    captured = (
        getattr(context.args, "cuda_graph_modules", None)
        or getattr(context.args, "cuda_graph_scope", None)
        or ["all"]
    )
    if {getattr(each, "name", each) for each in captured} <= _CAPTURED:
        return None
    return f"not with --cuda-graph-impl {impl} where it captures routers: their replays cannot be counted"


def _idle(context: Context) -> str | None:
    args = context.args
    return "the model has no experts" if args and not getattr(args, "num_experts", None) else None


def switch_on(value: int) -> Callable[[], None]:
    report = Report(value)
    ON.append(report)
    load.ON.append(report.recorder)

    def switch_off() -> None:
        ON.clear()
        load.ON.remove(report.recorder)

    return switch_off


FEATURE = Feature(
    name="moe_load_report",
    summary="every N iterations, how evenly the experts of each layer are loaded",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    prepare=_prepare,
    refuses=_refuses,
    idle=_idle,
    settings=(
        Setting(
            name="",
            metavar="N",
            summary="iterations from one report to the next",
            parse=parse_interval,
        ),
    ),
    switch_on=switch_on,
    patches=(
        Patch(
            target=f"{_ROUTER}.router:TopKRouter.routing",
            replacement=f"{_HERE}:counted",
            how="wrap",
            expects=("self", "logits", "padding_mask"),
            why="The map that it returns says which experts get which tokens, whatever the dispatcher.",
        ),
        Patch(
            target=f"{_ROUTER}.moe_utils:apply_router_token_dropping",
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
        ),
        Patch(
            target="megatron.core.rerun_state_machine:RerunStateMachine.should_run_forward_backward",
            replacement=f"{_HERE}:from_zero",
            how="wrap",
            expects=("self", "data_iterator"),
            why="An iteration whose passes run again counts once, and what ran before it not at all.",
        ),
        Patch(
            target="megatron.training.training:training_log",
            replacement=f"{_HERE}:told",
            how="wrap",
            why="Megatron logs each iteration there, on every rank.",
        ),
    ),
)
