"""Megatron's forward and backward passes in the order of a schedule of accel's.

What Megatron's own two functions do around the passes is done here in the same way: gradients are
synchronized by the last backward of each chunk, parameters before the first forward, and the step ends with
`finalize_model_grads_func`. The passes themselves are Megatron's `forward_step` and `backward_step`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.device.cpu import memory
from accel.device.streams import one_queue
from accel.parallel.schedule import Action, Kind, Placement, Schedule, validate, with_transfers
from accel.parallel.schedule.link import GroupLink
from accel.parallel.schedule.measured import Found, Measurement
from accel.parallel.schedule.names import INTERLEAVED, named, named_forward_only
from accel.parallel.schedule.queues import posting
from accel.parallel.schedule.results import to_last_rank
from accel.parallel.schedule.runtime import ON_HOST, Posting, run
from accel.parallel.split_backward import WeightPart, input_part
from accel.patches._v_placement import MirroredGroup
from accel.patching import Patch, around
from accel.start_up import say

__all__ = ["DRIVER", "WANTED", "Wanted", "refused", "scheduled"]

_HERE = "accel.patches._pipeline"


@dataclass
class Wanted:
    """What was asked for; of nothing, Megatron's own functions run."""

    name: str | None = None
    extra_warmup: int = 0
    measurement: Measurement | None = None
    """Of this training's third and fourth step."""
    posted: dict[tuple[int, bool], tuple[Schedule, Posting]] = field(default_factory=dict)
    """Of schedules that a device has run, with sized values or not: when later receives are posted."""

    @property
    def on(self) -> bool:
        return self.name is not None or self.extra_warmup > 0

    def want(self, *, name: str | None = None, extra_warmup: int = 0) -> Callable[[], None]:
        """One of the two, of which steps are measured; returns what takes it back, the latest first."""
        before = self.name, self.extra_warmup
        self.name, self.extra_warmup = name or self.name, extra_warmup or self.extra_warmup
        self.measurement = Measurement(_Clock, _tell)

        def off() -> None:
            self.name, self.extra_warmup = before
            if not self.on:
                self.measurement = None

        return off

    def schedule(
        self,
        p: int,
        v: int,
        m: int,
        group_size: int | None,
        *,
        forward_only: bool,
        name: str | None = None,
    ) -> Schedule:
        """With its transfers; one that was checked."""
        name = name or self.name or INTERLEAVED
        return _schedule(name, p, v, m, group_size, self.extra_warmup, forward_only)

    def posting(self, schedule: Schedule, device: torch.device, *, sized: bool) -> Posting:
        """When receives are posted in this step."""
        if device.type == "cpu":
            return ON_HOST
        key = id(schedule), sized
        if key in self.posted:
            return self.posted[key][1]
        single = one_queue(device)
        first, later = (
            posting(schedule, sized=sized, one_queue=single, first=first) for first in (True, False)
        )
        self.posted[key] = schedule, later
        return first


WANTED = Wanted()


def refused(name: str, args: Any) -> str | None:
    """What Megatron's arguments ask for that this schedule, or any of accel's, does not do."""
    if args is None:
        return None
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        return "--overlap-moe-expert-parallel-comm has passes of its own: give one of the two"
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none"):
        return f"not with --cuda-graph-impl {args.cuda_graph_impl}: use none"
    ranks, chunks = (
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size or 1,
    )
    changing = ("rampup_batch_size", "step_batch_size_schedule")
    if ranks == 1 or any(getattr(args, name, None) for name in changing):
        return None  # counts that change are checked when a step begins
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    groups = args.microbatch_group_size_per_vp_stage
    try:
        WANTED.schedule(ranks, chunks, micro_batches, groups, forward_only=False, name=name)
    except ValueError as error:
        return f"{error} (p: pipeline ranks, v: virtual stages of each, m: micro-batches of a step)"
    return None


class _Clock:
    """Megatron's device: the CPU runtime serves `torch.cuda`, too."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type != "cpu"
        self.allocated = memory.memory_allocated
        if self._events:
            self.allocated = torch.get_device_module(device).memory_allocated

    def stamp(self) -> Any:
        if not self._events:
            return perf_counter()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._events else end - start)


def _tell(schedule: Schedule, found: Found) -> None:
    """What the schedule takes, beside Megatron's own."""
    if dist.get_rank() != 0:  # `say` would be silent, after all that is compared
        return
    name = WANTED.name or INTERLEAVED
    if WANTED.extra_warmup:
        name += f" with {WANTED.extra_warmup} more in warm-up"
    p, v, m = schedule.num_ranks, schedule.num_chunks, schedule.num_micro_batches
    try:
        stock = named(INTERLEAVED, p, v, m)
    except ValueError:
        stock = None  # counts that Megatron's does not take
    for line in found.compare(name, schedule, stock, _groups_of(p, v, m)):
        say(line)


def _groups_of(p: int, v: int, m: int) -> dict[str, Schedule]:
    """Megatron's order with larger groups, which hides more of the transfers for more memory."""
    made = {}
    if v > 1 and (WANTED.name or INTERLEAVED) == INTERLEAVED:
        for size in (p + (p + 1) // 2, 2 * p):
            with contextlib.suppress(ValueError):  # a size that does not fit
                flag = f"--microbatch-group-size-per-virtual-pipeline-stage {size}"
                made[flag] = named(INTERLEAVED, p, v, m, size)
    return made


@functools.lru_cache(maxsize=16)
def _schedule(
    name: str, p: int, v: int, m: int, group_size: int | None, extra_warmup: int, forward_only: bool
) -> Schedule:
    groups = group_size if name == INTERLEAVED and v > 1 else None
    made = (
        named_forward_only(name, p, v, m, groups)
        if forward_only
        else named(name, p, v, m, groups, extra_warmup)
    )
    schedule = with_transfers(made) if made.compute_only else made
    validate(schedule)
    _check_order(schedule)
    for own in () if forward_only else schedule.ranks:
        completing([action for action in own if action.kind in _BACKWARDS])
    return schedule


_ORDERED = (
    {Kind.FORWARD},
    {Kind.BACKWARD, Kind.BACKWARD_INPUT},
    {Kind.BACKWARD, Kind.BACKWARD_WEIGHT},
)


def _check_order(schedule: Schedule) -> None:
    """Data comes in the order of a rank's forward passes, and gradients add up in that of its backward ones.

    Raises:
        ValueError: a chunk has passes of one kind that are not in the order of the micro-batches.
    """
    for (rank, own), kinds in itertools.product(enumerate(schedule.ranks), _ORDERED):
        last: dict[int, Action] = {}
        for action in own:
            if action.kind not in kinds:
                continue
            before = last.get(action.chunk, action)
            if action.micro_batch < before.micro_batch:
                raise ValueError(
                    f"rank {rank}, {action}: comes behind {before}: each chunk takes the micro-batches of a "
                    "step in their order, as its data comes and its gradients add up"
                )
            last[action.chunk] = action


@around
def scheduled(get_forward_backward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``get_forward_backward_func``, which gives the function below where there is a pipeline."""
    from megatron.core.pipeline_parallel import schedules

    found = get_forward_backward_func(*args, **kwargs)
    if not WANTED.on or found is schedules.forward_backward_no_pipelining:
        return found
    return forward_backward


def unfit(model: Sequence[Any], schedule: Schedule) -> str | None:
    """Why a model cannot be trained so, by its configuration: a program need not have a command line."""
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "overlap_moe_expert_parallel_comm has passes of its own: set it to False"
    graphs = getattr(config, "cuda_graph_impl", None) or "none"
    if graphs != "none":
        return f"not with cuda_graph_impl={graphs!r}: use 'none'"
    in_parts = any(a.kind is Kind.BACKWARD_INPUT for own in schedule.ranks for a in own)
    in_a_v = schedule.placement is Placement.V and len(schedule.ranks) > 1
    if (in_parts or in_a_v) and getattr(config, "defer_embedding_wgrad_compute", False):
        return "not with defer_embedding_wgrad_compute: set it to False"
    if in_parts and getattr(config, "delay_wgrad_compute", False):
        return "not with delay_wgrad_compute, which puts off the same gradients: set it to False"
    if not in_a_v:
        return None
    chunk = model[1]
    while hasattr(chunk, "module"):
        chunk = chunk.module
    group = getattr(getattr(chunk, "pg_collection", None), "pp", None)
    if group is not None and not isinstance(group, MirroredGroup):
        return (
            "the second chunk of this model does not lie in a V: build it by megatron.training's get_model, "
            "after accel is on"
        )
    return None


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Megatron's arguments and result: what the loss function gave for each micro-batch, on the last rank."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_model_config

    if adjust_tensor_shapes_fn is not None:
        raise ValueError(
            "accel's schedules send tensors of one shape: without adjust_tensor_shapes_fn "
            "(distillation), or without --accel-schedule and --accel-vpp-extra-warmup"
        )
    model = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    config = get_model_config(model[0])
    groups = _groups(p2p_communicator, pg_collection)
    ranks, rank = groups.pp.size(), groups.pp.rank()
    group_size = config.microbatch_group_size_per_vp_stage
    schedule = WANTED.schedule(
        ranks, len(model), num_microbatches, group_size, forward_only=forward_only
    )
    if not forward_only and (reason := unfit(model, schedule)):
        raise ValueError(f"--accel-schedule or --accel-vpp-extra-warmup: {reason}")
    finalizes = config.finalize_model_grads_func is not None and not forward_only
    is_last = rank == ranks - 1

    embedding = None
    if finalizes:
        embedding = schedules.clear_embedding_activation_buffer(config, model, is_last)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    if getattr(config, "moe_paged_stash", False):
        schedules.paged_stash_reset(enabled=not forward_only, config=config)

    length = decoder_seq_length if len(model) == 1 and decoder_seq_length else seq_length
    length //= groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    device = next(model[0].parameters()).device
    sized = config.variable_seq_lengths or getattr(config, "mtp_standalone", False)
    shape = (length, micro_batch_size, config.hidden_size)
    link = _link(groups.pp, shape, config.pipeline_dtype, device, sized=sized)

    passes = _Passes(
        schedule=schedule,
        rank=rank,
        model=model,
        config=config,
        step=functools.partial(schedules.forward_step, forward_step_func),
        iterators=iterators,
        options={"cp_group_size": groups.cp.size(), "collect_non_loss_data": collect_non_loss_data},
        begins=functools.partial(schedules.check_first_val_step, first_val_step, forward_only),
    )
    runs = run if forward_only or WANTED.measurement is None else WANTED.measurement.run
    with passes.synchronizing():
        when = WANTED.posting(schedule, device, sized=sized)
        runs(schedule, rank, passes, link, posting=when)
    results, tokens = passes.results, passes.tokens
    if schedule.placement is Placement.V and ranks > 1:
        results = to_last_rank(results, tokens, groups.pp)

    if finalizes:
        schedules.finish_embedding_wgrad_compute(config, embedding, is_last, groups.tp)
        config.finalize_model_grads_func(
            model,
            tokens if config.calculate_per_token_loss else None,
            pg_collection=groups,
            force_all_reduce=force_all_reduce,
        )
    if getattr(config, "fine_grained_activation_offloading", False):
        schedules.off_interface.reset()
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return results


_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def completing(backwards: Sequence[Action]) -> set[Action]:
    """Of a rank's backwards those that complete gradients: of each chunk, the last one that forms those which
    can be put off, and the last one that forms the others.

    Raises:
        ValueError: the last is a weights' part, of an input's part that a whole backward follows: that one
            would complete only some.
    """
    found = set()
    for chunk in {action.chunk for action in backwards}:
        own = [action for action in backwards if action.chunk == chunk]
        put_off = [a for a in own if a.kind is not Kind.BACKWARD_INPUT][-1]
        others = [a for a in own if a.kind is not Kind.BACKWARD_WEIGHT][-1]
        if put_off.kind is Kind.BACKWARD_WEIGHT and others.kind is Kind.BACKWARD:
            raise ValueError(f"{others} comes before {put_off}, so neither completes all gradients")
        found |= {put_off, others}
    return found


@dataclass(kw_only=True)
class _Passes:
    """`runtime.Stages` of one step, through Megatron's own steps."""

    schedule: Schedule
    rank: int
    model: Sequence[Any]
    """The chunks."""
    config: Any
    step: Callable[..., tuple[Tensor, Tensor]]
    """Megatron's ``forward_step``, with the user's function."""
    iterators: Sequence[Any]
    options: Mapping[str, Any]
    """Of all forward steps."""
    begins: Callable[[bool], bool]
    """Whether a first micro-batch is one for Megatron, too."""
    results: list[Any] = field(default_factory=list)
    """What the loss function gave for each micro-batch, on the rank with the last stage."""

    def __post_init__(self) -> None:
        own = [action for action in self.schedule.ranks[self.rank] if action.kind.computes]
        backwards = [action for action in own if action.kind in _BACKWARDS]
        self.completing = completing(backwards)
        self.last = {action.chunk: action for action in backwards}
        self.turns = {a: at for at, a in enumerate(a for a in own if a.kind is Kind.FORWARD)}
        self.outstanding = own.index(backwards[0]) if backwards else len(own)
        """Forwards before the first backward."""
        self.device = next(self.model[0].parameters()).device
        self.tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self.later: dict[tuple[int, int], WeightPart] = {}
        """What first parts of backward passes left."""
        self.gradients = _Gradients(self.config, self.model)
        self.interleaved = self.config.virtual_pipeline_model_parallel_size is not None

    @contextlib.contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Around all passes."""
        self.gradients.hold()
        try:
            for chunk in range(min(2, len(self.model))):
                self._gather_parameters(chunk)
            yield
        finally:
            self.gradients.release()

    def forward(self, action: Action, taken: Tensor | None) -> Tensor:
        chunk, first = action.chunk, action.micro_batch == 0
        if first and 1 < chunk + 1 < len(self.model):
            self._gather_parameters(chunk + 1)
        kept = self.config.num_microbatches_with_partial_activation_checkpoints
        whole = None if kept is None else self.turns[action] % self.outstanding >= kept
        made, tokens = self.step(
            self.iterators[chunk],
            self.model[chunk],
            self.schedule.num_micro_batches,
            taken,
            self.results,
            self.config,
            checkpoint_activations_microbatch=whole,
            is_first_microbatch=self.begins(first),
            current_microbatch=action.micro_batch,
            vp_stage=chunk if self.interleaved else None,
            is_last_stage=self.schedule.stage(self.rank, chunk) == self.schedule.num_stages - 1,
            **self.options,
        )
        self.tokens += tokens
        return made

    def backward(
        self, action: Action, taken: Tensor | None, made: Tensor, grad: Tensor | None
    ) -> Tensor | None:
        from megatron.core.pipeline_parallel import schedules

        with self._completing(action), contextlib.ExitStack() as stack:
            if action.kind is Kind.BACKWARD_INPUT:
                part = stack.enter_context(input_part())
                self.later[action.micro_batch, action.chunk] = part
            of_input: Tensor | None = schedules.backward_step(taken, made, grad, self.config)
        return of_input

    def backward_weight(self, action: Action) -> None:
        with self._completing(action):
            self.later.pop((action.micro_batch, action.chunk)).compute()

    def sent(self, made: Tensor) -> None:
        from megatron.core.pipeline_parallel import schedules

        if not self.schedule.forward_only:
            schedules.deallocate_output_tensor(made, self.config.deallocate_pipeline_outputs)

    @contextlib.contextmanager
    def _completing(self, action: Action) -> Iterator[None]:
        """Gradients that a backward completes are reduced by its hooks, or by a function behind the last."""
        by_hooks = self.config.grad_sync_func is None
        if by_hooks and action in self.completing:
            self.gradients.release()
        yield
        if not by_hooks and action == self.last[action.chunk]:
            self.gradients.release()
            self.gradients.reduce(action.chunk)
        self.gradients.hold()

    def _gather_parameters(self, chunk: int) -> None:
        """As Megatron does in interleaved schedules: two chunks ahead, where it does not at first use."""
        functions = self.config.param_sync_func
        if functions is None or len(self.model) == 1 or self.schedule.forward_only:
            return
        function = functions[chunk] if isinstance(functions, list) else functions
        function(self.model[chunk].parameters())


class _Gradients:
    """Megatron's ``no_sync``, held around everything but what completes gradients."""

    def __init__(self, config: Any, model: Sequence[Any]) -> None:
        self.config, self.model = config, model
        self._held: contextlib.ExitStack | None = None

    def hold(self) -> None:
        if self._held is not None:
            return
        functions = self.config.no_sync_func or []
        self._held = contextlib.ExitStack()
        for function in functions if isinstance(functions, list) else [functions]:
            self._held.enter_context(function())

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def reduce(self, chunk: int) -> None:
        functions = self.config.grad_sync_func
        function = functions[chunk] if isinstance(functions, list) else functions
        function(self.model[chunk].parameters())


def _groups(p2p_communicator: Any, pg_collection: Any) -> Any:
    """Megatron's process groups, by the names that it gives them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if (p2p_communicator is None) is not (pg_collection is None):
        raise ValueError("p2p_communicator and pg_collection: give both or neither")
    if pg_collection is not None:
        own = getattr(p2p_communicator, "pp_group", None)
        if not isinstance(pg_collection, ProcessGroupCollection) or own is not pg_collection.pp:
            raise ValueError("accel's schedules run one model in one pipeline")
        return pg_collection
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp = parallel_state.get_data_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


_SECOND: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Of a pipeline's group the one beside it."""


def _link(
    group: dist.ProcessGroup,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    sized: bool,
) -> GroupLink:
    """Over the pipeline's group and a second one of the same ranks. At first every rank of the world comes
    here, as all make the groups of all pipelines."""
    if group in _SECOND:
        return GroupLink(group, _SECOND[group], shape, dtype, device, sized=sized)
    if group.size() > 2 and (why := _one_queue_for_all(group, device)):
        raise ValueError(
            f"{why} has one queue for all neighbours, in which accel's schedules would wait for ever; "
            "leave it out"
        )
    known = dist.distributed_c10d._world.pg_map
    for gone in [each for each in _SECOND if each not in known]:
        del _SECOND[gone]
    own = dist.get_process_group_ranks(group)
    ranks = torch.tensor(own, device=device)
    everyone = [torch.empty_like(ranks) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ranks)
    for pipeline in sorted({tuple(each.tolist()) for each in everyone}):
        made = dist.new_group(list(pipeline), _timeout(), dist.get_backend(group))
        if list(pipeline) == own:
            _SECOND[group] = made
    link = GroupLink(group, _SECOND[group], shape, dtype, device, sized=sized)
    link.connect()
    return link


def _one_queue_for_all(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What makes the messages of a rank to all others leave one after the other."""
    if device.type == "cuda" and group.bound_device_id is not None:
        return "init_process_group was given a device_id: then NCCL"
    if device.type == "npu" and os.environ.get("P2P_HCCL_BUFFSIZE") == "0":
        return "P2P_HCCL_BUFFSIZE=0 is set: then HCCL"
    return None


def _timeout() -> timedelta | None:
    """``--distributed-timeout-minutes``, where there are such arguments."""
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS
    minutes = getattr(args, "distributed_timeout_minutes", None)
    return None if minutes is None else timedelta(minutes=minutes)


DRIVER = Patch(
    target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    replacement=f"{_HERE}:scheduled",
    how="wrap",
    why="Upstream knows two orders of a pipeline's passes; here one function runs any that is valid.",
)
