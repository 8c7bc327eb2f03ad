"""Megatron's forward and backward passes in the order of a schedule of accel's.

What Megatron's own two functions do around the passes is done here in the same way: gradients are
synchronized by the last backward of each chunk, parameters before the first forward, and the step ends with
`finalize_model_grads_func`. The passes themselves are Megatron's `forward_step` and `backward_step`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from accel.device.cpu import memory
from accel.device.streams import one_queue
from accel.parallel.schedule import Kind, Placement, Schedule, validate, with_transfers
from accel.parallel.schedule.in_order import BACKWARDS, check_order, completing
from accel.parallel.schedule.measured import Found, Measurement
from accel.parallel.schedule.names import INTERLEAVED, named, named_forward_only
from accel.parallel.schedule.pipeline_link import pipeline_link
from accel.parallel.schedule.queues import posting
from accel.parallel.schedule.results import to_last_rank
from accel.parallel.schedule.runtime import ON_HOST, Posting, run
from accel.patches._pipeline_passes import Passes
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
    check_order(schedule)
    for own in () if forward_only else schedule.ranks:
        completing([action for action in own if action.kind in BACKWARDS])
    return schedule


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
    embedding = _begin(model, config, groups, forward_only=forward_only)

    length = decoder_seq_length if len(model) == 1 and decoder_seq_length else seq_length
    length //= groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    device = next(model[0].parameters()).device
    sized = config.variable_seq_lengths or getattr(config, "mtp_standalone", False)
    shape = (length, micro_batch_size, config.hidden_size)
    link = pipeline_link(
        groups.pp, shape, config.pipeline_dtype, device, sized=sized, timeout=_timeout()
    )
    passes = Passes(
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

    if _finalizes(config, forward_only):
        schedules.finish_embedding_wgrad_compute(config, embedding, rank == ranks - 1, groups.tp)
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


def _finalizes(config: Any, forward_only: bool) -> bool:
    return config.finalize_model_grads_func is not None and not forward_only


def _begin(model: Sequence[Any], config: Any, groups: Any, *, forward_only: bool) -> Any:
    """What Megatron does before all passes; returns the buffer of its deferred embedding gradients."""
    from megatron.core.pipeline_parallel import schedules

    embedding = None
    if _finalizes(config, forward_only):
        is_last = groups.pp.rank() == groups.pp.size() - 1
        embedding = schedules.clear_embedding_activation_buffer(config, model, is_last)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    if getattr(config, "moe_paged_stash", False):
        schedules.paged_stash_reset(enabled=not forward_only, config=config)
    return embedding


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
