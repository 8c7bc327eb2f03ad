"""Each layer keeps its activations, computes them again or swaps them, whichever a budget of memory allows.

``--accel-memory-budget 20`` is 20 GiB of each rank's device, as PyTorch counts what is allocated at the peak
of the forward and backward passes. Training begins with every layer computed again as a whole, so that it
fits if anything does. There each layer is measured: the bytes and the time of its norms, its activation, its
core attention, and all of it, and the bytes that a swap of attention and norms would move
(``accel/memory/swap.py``). When the optimizer's states are there, the link to the host is timed, and an
integer program (``accel/memory/planner.py``) gives each layer one choice, so that the peak meets the budget
and the least time is added; the table of choices is printed, and after ten iterations what was predicted
beside what came.

Ranks of one pipeline stage decide alike, by the largest of their figures. A budget that no choice meets is
told, with the bytes that are missing and what would save them, and training goes on with the choice that
saves most. Losses are those of stock, bit for bit, whatever is chosen.

Of a hybrid model's Mamba layer the norm is computed again, or all of it; nothing of it is swapped. **Not
with** ``--dsa-indexer-topk-freq`` above 1, whose layers take indices from each other. Where Transformer
Engine is installed the feature is skipped.

What is not known to the plan: micro-batches of other shapes than the second, more of them in flight later
(``--rampup-batch-size`` with pipeline stages), states of the optimizer that come after the first iteration
(where fp16 skips steps), and an optimizer step that takes more than the passes do. The peak that PyTorch
reports (``max_memory_allocated``) begins anew in the iterations that are measured. On the CPU device runtime
the host is the device, and nothing is swapped.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from accel.feature import Context, Feature, Setting
from accel.log import log_once
from accel.memory.layer_costs import (
    Choice,
    Costs,
    Movable,
    bytes_of,
    measure,
    tensors_of,
)
from accel.memory.planner import CannotMeet, Plan, table
from accel.memory.recompute import Recomputed, Restorer
from accel.memory.stage_budget import Figures, Stage, largest_of_stage
from accel.patches import recompute_activation, swap_attention
from accel.patches._inner_masters import HOST, SHARED, WANTED
from accel.patches._kernels import kernels
from accel.patches._layer_spans import ATTENTION, PARTS, spans, switch
from accel.patches._layers import MAMBA_LAYER, TRANSFORMER_LAYER
from accel.patches._linear import LINEAR
from accel.patches._router_state import router_state, unlogged_indexer
from accel.patches.recompute_modules import megatrons_generators
from accel.patching import Patch, around
from accel.slot import Slot
from accel.upstream import SUPPORTED_RANGE, flag_of, te_checkpoints

_HERE = "accel.patches.memory_budget"
_GIB = 1 << 30
PATIENCE = 5
"""Iterations until a layer whose backward pass never came, for it is frozen, is taken to keep nothing."""
CALLS_UNTIL_A_WORD = 8
"""Of a layer's forward pass, where no iteration is measured."""
TOLD_AT = 10
"""The iteration after which prediction and measurement are compared."""


def _state(layer: Any) -> Restorer:
    """What a second run of a layer begins with: generators' states, and what its router held."""
    generators, router = megatrons_generators(), router_state(layer)

    @contextmanager
    def restored() -> Iterator[None]:
        with generators(), router(), unlogged_indexer():
            yield

    return restored


class Measured:
    """One layer: what it costs, and what it does."""

    def __init__(self, block: Any) -> None:
        self.block = None if block is None else weakref.ref(block)
        """The block in which it runs; None: it runs in none."""
        self.costs: Costs | None = None
        self.choice: Choice | None = None
        """None: all is computed again, until the plan is made."""
        self.calls = 0
        self.outstanding = 0
        self.in_flight = 0
        """The largest number of forward passes whose backward pass had not begun."""


@dataclass
class Passes:
    """The forward and backward passes of one iteration."""

    began: float
    forward_peak: int | None = None
    """Bytes, when the first layer's backward pass began."""
    measured: bool = False
    """Whether a layer was timed, which stops the host."""
    peak: int = 0
    seconds: float = 0.0


class Planner:
    """Layers in the order in which they ran first, and the plan as soon as there is one."""

    def __init__(self, num_bytes: int) -> None:
        self.budget = num_bytes
        self.layers: weakref.WeakKeyDictionary[Any, Measured] = weakref.WeakKeyDictionary()
        self.iteration = 0
        self.passes: Passes | None = None
        self.plan: Plan | None = None
        self.predicted = (0, 0.0)
        """Peak in bytes, and seconds of the passes of an iteration."""
        self.swapping = Planned(self)
        self.running: Measured | None = None
        """The layer whose forward pass is running as the plan has it."""

    # --- one iteration

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The forward and backward passes of an iteration."""
        self.iteration += 1
        if self.plan is not None and self.iteration != TOLD_AT:
            yield
            return
        for measured in self.layers.values():
            measured.outstanding = 0  # of a graph that nobody ran backward
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.passes = passes = Passes(time.perf_counter())
        try:
            yield
        finally:
            self.passes = None
        torch.cuda.synchronize()
        passes.peak = torch.cuda.max_memory_allocated()
        passes.seconds = time.perf_counter() - passes.began
        if self.plan is not None:
            self._compare(passes)
        else:
            unknown = any(measured.costs is None for measured in self.layers.values())
            early = self.iteration == 1 or (unknown and self.iteration < PATIENCE)
            if not _anywhere(early or passes.measured):
                self._decide(passes)

    def run(self, layer: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer's forward pass."""
        if layer not in self.layers:
            if reason := _shares_indices(getattr(layer, "config", None)):
                raise ValueError(f"memory_budget: {reason}")
            if self.plan is not None:
                log_once(
                    "memory_budget", "layers that come after the plan are computed again as a whole"
                )
            self.layers[layer] = Measured(self.swapping.block)
            switch(layer, frozenset())  # an earlier plan may have left something on
        measured = self.layers[layer]
        if measured.choice is not None and not measured.choice.whole:
            self.running = measured
            try:
                return forward(layer, *args, **kwargs)
            finally:
                self.running = None
        measured.calls += 1
        if measured.calls == CALLS_UNTIL_A_WORD and self.iteration == 0:
            log_once(
                "memory_budget",
                "layers are computed again as a whole until iterations of megatron.training's train_step are "
                "measured",
            )
        measured.outstanding += 1
        measured.in_flight = max(measured.in_flight, measured.outstanding)
        timed = measured.costs is None and measured.calls > 1
        times = 0

        def again(*inputs: Any) -> Any:
            nonlocal times
            times += 1
            given = dict(zip(kwargs, inputs[len(args) :], strict=True))
            if times == 1:
                return forward(layer, *inputs[: len(args)], **given)
            measured.outstanding -= 1
            if self.passes is not None and self.passes.forward_peak is None:
                self.passes.forward_peak = torch.cuda.max_memory_allocated()
            if not timed:
                return forward(layer, *inputs[: len(args)], **given)
            device = next(layer.parameters()).device
            movable = Movable(self.swapping.swap(device), swap_attention.modules_of(layer))
            with measure(device, spans(layer), movable) as costs:
                outputs = forward(layer, *inputs[: len(args)], **given)
            costs.num_bytes -= bytes_of(tensors_of(outputs))
            measured.costs = costs
            if self.passes is not None:
                self.passes.measured = True
            return outputs

        return Recomputed(functools.partial(_state, layer))(again, *args, *kwargs.values())

    # --- the plan

    def _decide(self, passes: Passes) -> None:
        layers = list(self.layers.items())
        figures = Figures(
            passes.peak,
            passes.forward_peak or passes.peak,
            self.swapping.seconds_of_a_byte(),
            [(measured.in_flight, measured.costs or Costs()) for _, measured in layers],
        )
        figures = largest_of_stage(figures, PARTS, _pipeline_stage(), _device())
        if not layers:
            self.plan = Plan((), 0, 0.0, 0)
            self.predicted = figures.peak, passes.seconds
            return
        names = [str(layer.layer_number) for layer, _ in layers]
        # the last layer of a block waits for its copies before anything hides them
        blocks = [*(measured.block for _, measured in layers), None]
        hides = [here is not None and here == behind for here, behind in itertools.pairwise(blocks)]
        stage = Stage(figures, names, hides, not_swapped=frozenset({ATTENTION}))
        lines = [
            f"{self.budget / _GIB:.3f} GiB asked, "
            f"{max(stage.forward, stage.backward) / _GIB:.3f} GiB if all is kept"
        ]
        try:
            plan = stage.choose(self.budget)
        except CannotMeet as error:
            plan = error.best
            lines.append(
                f"{error.short / _GIB:.3f} GiB cannot be saved: {_advice(error.short, layers)}"
            )
        self.plan = plan
        for (layer, measured), choice in zip(layers, plan.choices, strict=True):
            assert isinstance(choice, Choice)
            measured.choice = choice
            switch(layer, choice.parts)
        self.swapping.on = any(choice.link for choice in plan.choices)
        turns = max(measured.calls for _, measured in layers) / self.iteration
        saved = turns * (sum(layer.seconds for layer in stage.layers) - plan.seconds)
        self.predicted = stage.peak(plan), max(0.0, passes.seconds - saved)
        lines.append(
            f"predicted: {self.predicted[0] / _GIB:.3f} GiB, {1e3 * self.predicted[1]:.1f} ms for the passes"
        )
        _say([*lines, *table(stage.layers, plan).splitlines()])

    def _compare(self, passes: Passes) -> None:
        peak, seconds = self.predicted
        _say(
            [
                f"iteration {TOLD_AT}: {passes.peak / _GIB:.3f} GiB ({peak / _GIB:.3f} predicted), "
                f"{1e3 * passes.seconds:.1f} ms for the passes ({1e3 * seconds:.1f} predicted)"
            ]
        )


class Planned(swap_attention.Swapping):
    """Swaps the layers that the plan swaps."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(tuple(swap_attention.MODULES))
        self.on = False
        self.block: Any = None
        """The block that is running."""
        self._planner = planner

    @contextmanager
    def running(self, block: torch.nn.Module) -> Iterator[None]:
        outer, self.block = self.block, block
        first = next(block.parameters(), None) if self.on else None
        try:
            if first is None:
                yield
                return
            chain = self.swap(first.device).chain(self._wanted, len(self.modules))
            with closing(chain), self.inside(chain):
                yield
        finally:
            self.block = outer

    def _wanted(self, number: int) -> bool:
        layer = self._planner.running
        return layer is not None and layer.choice is not None and layer.choice.swapped

    def seconds_of_a_byte(self) -> float:
        """Of the slowest link; infinite where nothing is moved."""
        rates = [swap_attention.rate_of(swap) for swap in self._swaps.values()]
        return max((1 / rate if rate else math.inf for rate in rates), default=math.inf)


ON = Slot[Planner]()
"""Filled while the feature is on."""


def _device() -> torch.device:
    return torch.empty(0, device=torch.cuda.current_device()).device


def _anywhere(here: bool) -> bool:
    """Whether it is so on any rank."""
    if not torch.distributed.is_initialized():
        return here
    found = torch.tensor(float(here), device=_device())
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)


def _advice(short: int, layers: Sequence[tuple[Any, Measured]]) -> str:
    """The cheapest thing that is not on and would save so many bytes; of the optimizer, whole states."""
    numel = sum(p.numel() for layer, _ in layers for p in layer.parameters())
    for name, each in ((SHARED, 2), (HOST, 12)):
        if name not in WANTED and each * numel >= short:
            flag = flag_of(f"accel_{name}")
            return f"{flag} would, with up to {each * numel / _GIB:.3f} GiB of these layers"
    return "more tensor or pipeline parallelism would, or a smaller micro-batch"


def _pipeline_stage() -> int:
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        return 0
    return int(parallel_state.get_pipeline_model_parallel_rank())


def _say(lines: Sequence[str]) -> None:
    """On the first rank of each pipeline stage."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized() and (
        parallel_state.get_tensor_model_parallel_rank()
        or parallel_state.get_data_parallel_rank(with_context_parallel=True)
    ):
        return
    for line in lines:
        print(f"accel: memory_budget, stage {_pipeline_stage()}: {line}", flush=True)


@around
def planned(forward: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's ``forward``, as a whole or as the plan has it."""
    if not torch.is_grad_enabled() or not self.training:
        return forward(self, *args, **kwargs)
    return ON.value.run(self, forward, args, kwargs)


@around
def watching(train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config,
    forward_backward_func, ...)``."""
    name, position = "forward_backward_func", 6
    passes = kwargs[name] if name in kwargs else args[position]

    @functools.wraps(passes)
    def watched(*inner: Any, **options: Any) -> Any:
        with ON.value.watched():
            return passes(*inner, **options)

    if name in kwargs:
        return train_step(*args, **{**kwargs, name: watched})
    return train_step(*args[:position], watched, *args[position + 1 :], **kwargs)


def parse_budget(given: Any) -> int:
    """Bytes from GiB."""
    try:
        num_bytes = -1.0 if isinstance(given, bool) else float(given) * _GIB
    except (TypeError, ValueError):
        num_bytes = -1.0
    if not 1 <= num_bytes < float("inf"):
        raise ValueError(f"{given!r} is no budget: give GiB of device memory above 0")
    return int(num_bytes)


def switch_on(value: int) -> Callable[[], None]:
    planner = Planner(value)
    undo = ExitStack()
    undo.callback(ON.set(planner))
    undo.callback(swap_attention.ON.set(planner.swapping))
    return undo.close


def _unavailable(context: Context) -> str | None:
    return te_checkpoints(context) or kernels()(context)


def _refuses(context: Context) -> str | None:
    return swap_attention.refuses_graphs(context) or _shares_indices(context.args)


def _shares_indices(config: Any) -> str | None:
    """By Megatron's arguments or a layer's configuration: a layer that takes another's indices finds those of
    the newest micro-batch, as it does under Megatron's own recomputation."""
    layers = getattr(config, "dsa_indexer_topk_freq", None) or 1
    if layers == 1:
        return None
    return (
        f"not with --dsa-indexer-topk-freq {layers}: a layer that is computed again would find another "
        "micro-batch's indices: use 1"
    )


FEATURE = Feature(
    name="memory_budget",
    summary="recompute or swap of each layer what it takes to meet so many GiB at the least time",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    requires=("recompute_modules",),
    unavailable=_unavailable,
    conflicts={
        "overlap_moe_expert_parallel_comm": "layers run in pieces of Megatron's there",
        "recompute_granularity": "the plan says what is computed again",
        "recompute_norm": "the plan says what is computed again",
        "recompute_activation": "the plan says what is computed again",
        "swap_attention": "the plan says what is swapped",
        "fine_grained_activation_offloading": "the plan does not know what is moved",
        "cpu_offloading_num_layers": "the plan does not know what is moved",
    },
    refuses=_refuses,
    settings=(
        Setting(
            name="",
            metavar="GiB",
            summary="GiB of each rank's device memory",
            parse=parse_budget,
        ),
    ),
    switch_on=switch_on,
    patches=(
        recompute_activation.MLP_FORWARD,
        swap_attention.LAYER_INIT,
        *swap_attention.BLOCK_FORWARD,
        LINEAR,
        *(
            Patch(
                target=f"{layer}.forward",
                replacement=f"{_HERE}:planned",
                how="wrap",
                why="A layer is computed again as a whole, or parts of it, as the plan has it.",
            )
            for layer in (TRANSFORMER_LAYER, MAMBA_LAYER)
        ),
        Patch(
            target="megatron.training.training:train_step",
            replacement=f"{_HERE}:watching",
            how="wrap",
            why="The peak and the time of the passes are those of an iteration.",
        ),
    ),
)
