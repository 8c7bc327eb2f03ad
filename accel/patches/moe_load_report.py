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

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from accel.feature import Context, Feature, Setting
from accel.parallel.experts import load
from accel.parallel.experts.load import LayerLoad, Recorder
from accel.patches._expert_counts import DROPPING, ROUTING, of_all_ranks, uncounted_routers
from accel.patches._settings import no_experts, whole_number
from accel.patching import Patch, around
from accel.slot import Slot
from accel.upstream import SUPPORTED_RANGE

__all__ = ["FEATURE", "ON", "Report"]

_HERE = "accel.patches.moe_load_report"


@dataclass
class Report:
    """Counts of the iteration that runs, and when they are told."""

    every: int
    recorder: Recorder = field(default_factory=Recorder)


ON = Slot[Report]()


@around
def from_zero(should_run: Callable[..., bool], self: Any, data_iterator: Any) -> bool:
    """``RerunStateMachine.should_run_forward_backward``: asked before each run of an iteration's passes."""
    runs = should_run(self, data_iterator)
    if runs:
        ON.value.recorder.clear()
    return runs


@around
def told(
    training_log: Callable[..., Any],
    loss_dict: Any,
    total_loss_dict: Any,
    learning_rate: Any,
    iteration: int,
    *rest: Any,
    **more: Any,
) -> Any:
    """``training_log(loss_dict, total_loss_dict, learning_rate, iteration, ...)``, on every rank."""
    result = training_log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **more)
    if iteration % ON.value.every == 0:
        from megatron.training import get_args

        args = get_args()
        layers = of_all_ranks(ON.value.recorder, args)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        _tell(iteration, layers if last else [], args)
    return result


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
    return uncounted_routers(context.args)


def switch_on(value: int) -> Callable[[], None]:
    report = Report(value)
    undo = ExitStack()
    undo.callback(ON.set(report))
    undo.callback(load.switch_on(report.recorder))
    return undo.close


FEATURE = Feature(
    name="moe_load_report",
    summary="every N iterations, how evenly the experts of each layer are loaded",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    prepare=_prepare,
    refuses=_refuses,
    idle=no_experts,
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
        ROUTING,
        DROPPING,
        Patch(
            target="megatron.core.rerun_state_machine:RerunStateMachine.should_run_forward_backward",
            replacement=f"{_HERE}:from_zero",
            how="wrap",
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
