"""Collectives on gloo with NCCL's manners.

What Megatron relies on and gloo does not give, each served by a wrap of the ``torch.distributed``
function:

* ``backend="nccl"``, ``device_id`` and NCCL options name a CUDA device: they become plain gloo;
* gloo connects a group when it is made, under its number on this rank, where NCCL waits for the first
  collective: groups that only their members make share a number, and gloo mixes up their ranks;
* NCCL counts elements where gloo compares shapes: gathers and scatters into one tensor are
  flattened;
* gloo refuses per-rank sizes in ``all_gather`` and ``reduce_scatter``: padded to the largest, or
  summed whole;
* gloo has no sum of what each rank has scaled first (``PREMUL_SUM``): scaled, then summed;
* with gradients, gloo has no gather into one tensor, and an ``all_to_all`` of lists within the whole world
  only: one exchange that counts elements;
* gloo cannot coalesce: inside ``_coalescing_manager`` each call starts at once and the manager
  waits for all;
* Megatron frees a tensor (``deallocate_output_tensor`` swaps ``.data``) whose ``isend`` may still
  be under way. On a CUDA stream that is safe; gloo would read freed memory. The send gets an alias
  of its own, which keeps the storage alive as long as its work handle.

A group on another backend is passed through untouched.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel.device.cpu.shared_memory import UNFINISHED, moves, reduces, take_timeout

__all__ = ["UnevenWork"]


class _Coalesced(threading.local):
    """Of each thread."""

    def __init__(self) -> None:
        self.open: list[list[Any]] = []
        """Work lists of the coalescing managers that are open, innermost last."""


_COALESCED = _Coalesced()
_FINISHING = threading.Lock()


EXIT_SECONDS = 0.02
"""What gloo's threads have left to do takes microseconds."""
MAX_GATHERED = 4
"""Up to that many ranks an all-reduce that sums here sends the whole tensor to each of them."""


def sums_here(tensor: torch.Tensor, op: Any) -> bool:
    """Whether a reduction moves its operands as they are and sums them on arrival, instead of letting
    gloo sum. No; the feature ``host_half_collectives`` says yes for 16-bit sums."""
    return False


def shared_memory(group: Any) -> Any:
    """The :class:`~accel.device.cpu.shared_memory.Channel` that serves a group in place of gloo. None;
    the feature ``host_shared_memory_collectives`` gives those to groups on one host."""
    return None


def starting_threads() -> contextlib.AbstractContextManager[None]:
    """Around what makes a group, and gloo's threads for it. Nothing; the feature ``host_batch_scheduling``
    tells the kernel that they may wait."""
    return contextlib.nullcontext()


def devices_of_new_group() -> contextlib.AbstractContextManager[None]:
    """Around what makes a group beside the default one. Nothing: each has a gloo device of its own; with the
    feature ``host_shared_gloo_device`` they have the default group's."""
    return contextlib.nullcontext()


def _exchange_and_sum(output: torch.Tensor, input: torch.Tensor, group: Any) -> UnevenWork:
    """reduce-scatter: every rank gets all operands of its own shard, sums in fp32 in the order of
    ranks, and rounds once."""
    operands_RN = input.new_empty((dist.get_world_size(group), output.numel()))
    work = dist.all_to_all_single(operands_RN.view(-1), input, group=group, async_op=True)
    return UnevenWork(work, lambda: _sum_rows(operands_RN, output))


def _repeat_and_sum(tensor: torch.Tensor, group: Any) -> UnevenWork:
    """all-reduce of a few ranks: as above, of the whole tensor on each; the same bits everywhere."""
    repeated_RN = tensor.reshape(1, -1).expand(dist.get_world_size(group), -1)
    return _exchange_and_sum(tensor, repeated_RN.reshape(-1), group)


def _sum_rows(operands_RN: torch.Tensor, output: torch.Tensor) -> None:
    with torch.no_grad():
        output.copy_(operands_RN.sum(0, dtype=torch.float32).view_as(output))


def init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_on_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        with starting_threads():
            original(_host_backend(backend), *args, **kwargs)
        _let_threads_end_at_exit()

    return init_on_gloo


@functools.cache
def _let_threads_end_at_exit() -> None:
    """A thread of gloo's that drops the last collective's tensors takes Python's lock, and where Python is
    finalizing by then the process is aborted (pytorch/pytorch#190489). They get the lock before that."""
    atexit.register(time.sleep, EXIT_SECONDS)


def new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group_on_gloo(*args: Any, **kwargs: Any) -> Any:
        # ranks, timeout, backend, pg_options, ...: Megatron passes keywords, others may not.
        args = tuple(
            _backend_of_a_group(a) if i == 2 else None if i == 3 else a for i, a in enumerate(args)
        )
        if "backend" in kwargs:
            kwargs["backend"] = _backend_of_a_group(kwargs["backend"])
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        _let_threads_end_at_exit()  # the default group may be older than this
        with starting_threads(), devices_of_new_group():
            return original(*args, **kwargs)

    return new_group_on_gloo


def set_group_timeout(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_pg_timeout(timeout: Any, group: Any = None) -> None:
        original(timeout, group)
        take_timeout(dist.group.WORLD if group is None else group)

    return set_pg_timeout


def process_group_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Names a group after its ranks, and how many of the same ranks there were before it."""
    made_under = weakref.WeakKeyDictionary[Any, collections.Counter[str]]()

    @functools.wraps(original)
    def name_by_ranks(ranks: Sequence[int], use_hashed_name: bool) -> Any:
        number = original(ranks, use_hashed_name)
        if use_hashed_name or not ranks or not dist.is_initialized():
            return number
        members = hashlib.sha1(repr(list(ranks)).encode(), usedforsecurity=False).hexdigest()
        made = made_under.setdefault(dist.group.WORLD, collections.Counter())
        made[members] += 1
        return f"{members}_{made[members]}"

    return name_by_ranks


def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce_(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if (factor := _factor(op, group)) is not None:
            with torch.no_grad():
                tensor.mul_(factor)
            op = dist.ReduceOp.SUM
        if reduces(tensor, op) and (shared := shared_memory(group)) is not None:
            return _issued(shared.all_reduce(tensor, op, _async(async_op)), async_op)
        if _on_gloo(group) and sums_here(tensor, op) and dist.get_world_size(group) <= MAX_GATHERED:
            return _issued(_repeat_and_sum(tensor, group), async_op)
        return _issued(original(tensor, op, group, _async(async_op)), async_op)

    return all_reduce_


def all_gather_into_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if moves(input_tensor) and (shared := shared_memory(group)) is not None:
            work = shared.all_gather([output_tensor], input_tensor, _async(async_op))
            return _issued(work, async_op)
        if _on_gloo(group):
            output_tensor, input_tensor = _flat(output_tensor), _flat(input_tensor)
        return _issued(original(output_tensor, input_tensor, group, _async(async_op)), async_op)

    return all_gather


def reduce_scatter_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter_(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if (factor := _factor(op, group)) is not None:
            input, op = input * factor, dist.ReduceOp.SUM
        if reduces(input, op) and (shared := shared_memory(group)) is not None:
            work = shared.reduce_scatter(output, [input], op, _async(async_op))
            return _issued(work, async_op)
        if _on_gloo(group):
            output, input = _flat(output), _flat(input)
            if sums_here(input, op):
                return _issued(_exchange_and_sum(output, input, group), async_op)
        return _issued(original(output, input, op, group, _async(async_op)), async_op)

    return reduce_scatter_


def all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_uneven(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if moves(tensor) and (shared := shared_memory(group)) is not None:
            return _issued(shared.all_gather(tensor_list, tensor, _async(async_op)), async_op)
        sizes = [t.numel() for t in tensor_list]
        if len(set(sizes)) <= 1 or not _on_gloo(group):
            return _issued(original(tensor_list, tensor, group, _async(async_op)), async_op)
        padded = [tensor.new_empty(max(sizes)) for _ in sizes]
        mine = tensor.new_zeros(max(sizes))
        mine[: tensor.numel()].copy_(tensor.reshape(-1))

        def unpad() -> None:
            for out, got in zip(tensor_list, padded, strict=True):
                out.copy_(got[: out.numel()].view_as(out))

        return _issued(UnevenWork(original(padded, mine, group, True), unpad), async_op)

    return gather_uneven


def reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scatter_uneven(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if (factor := _factor(op, group)) is not None:
            input_list, op = [t * factor for t in input_list], dist.ReduceOp.SUM
        if reduces(output, op) and (shared := shared_memory(group)) is not None:
            work = shared.reduce_scatter(output, input_list, op, _async(async_op))
            return _issued(work, async_op)
        if len({t.numel() for t in input_list}) <= 1 or not _on_gloo(group):
            return _issued(original(output, input_list, op, group, _async(async_op)), async_op)
        whole = torch.cat([t.reshape(-1) for t in input_list])
        rank = dist.get_rank(group)
        start = sum(t.numel() for t in input_list[:rank])

        def take() -> None:
            output.copy_(whole[start : start + output.numel()].view_as(output))

        with _apart():
            work = dist.all_reduce(whole, op, group, True)
        return _issued(UnevenWork(work, take), async_op)

    return scatter_uneven


def all_to_all_with_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        ctx: Any, group: Any, out_tensor_list: list[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if not _on_gloo(group):
            return original(ctx, group, out_tensor_list, *tensors)
        ctx.group = group
        ctx.input_tensor_size_list = [t.size() for t in tensors]
        sizes = [t.numel() for t in out_tensor_list]
        sent = torch.cat([t.reshape(-1) for t in tensors])
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, sizes, [t.numel() for t in tensors], group)
        for out, part in zip(out_tensor_list, received.split(sizes), strict=True):
            out.copy_(part.view_as(out))
        return tuple(out_tensor_list)

    return forward


def gradient_of_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        if not _on_gloo(ctx.group):
            return original(ctx, grad_output)
        rows, rest = divmod(len(grad_output), dist.get_world_size(ctx.group))
        if rest:
            raise RuntimeError(
                f"the first dimension of {list(grad_output.shape)} is not divisible by the group's "
                f"{dist.get_world_size(ctx.group)} ranks"
            )
        grad = grad_output.new_empty(rows, *grad_output.shape[1:])
        dist.reduce_scatter_tensor(grad, grad_output.contiguous(), group=ctx.group)
        return None, grad, None

    return backward


def broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def broadcast_(
        tensor: torch.Tensor,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        one_source = (src is None) != (group_src is None)
        if one_source and moves(tensor) and (shared := shared_memory(group)) is not None:
            root = group_src if src is None else _rank_in(group, src)
            return _issued(shared.broadcast(tensor, root, _async(async_op)), async_op)
        return _issued(original(tensor, src, group, _async(async_op), group_src), async_op)

    return broadcast_


def barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier_(
        group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None
    ) -> Any:
        if timeout is None and (shared := shared_memory(group)) is not None:
            return shared.barrier(async_op)
        limit = {} if timeout is None else {"timeout": timeout}  # torch has it since 2.13
        return original(group, async_op, device_ids, **limit)

    return barrier_


def isend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def isend_alias(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend_alias


def coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def start_each_at_once(
        group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        if not _on_gloo(group):
            with original(group, None, async_ops) as manager:
                yield manager
            return
        manager = dist.distributed_c10d._CoalescingManager()
        _COALESCED.open.append(manager.works)
        try:
            yield manager
        finally:
            _COALESCED.open.pop()
        if not async_ops:
            manager.wait()

    return start_each_at_once


class UnevenWork(dist.Work):
    """The handle of a padded collective: unpads, once, when it is waited for."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._finish: Callable[[], None] | None = finish
        UNFINISHED.add(self)

    def wait(self, *args: Any) -> bool:
        UNFINISHED.discard(self)  # a failure is told once
        done = bool(self._work.wait(*args))
        with _FINISHING:
            if self._finish is not None:
                self._finish()
                self._finish = None
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed()) and self.wait()


def _host_backend(backend: Any) -> Any:
    if backend is None or not isinstance(backend, str):
        return "gloo"
    return "gloo" if "nccl" in backend.lower() else backend


def _backend_of_a_group(backend: Any) -> Any:
    """None stays: the default group's, which may be another one than gloo."""
    return None if backend is None else _host_backend(backend)


def _on_gloo(group: Any) -> bool:
    """No for what stands for a group that this rank is not in, too."""
    return group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_backend(group) == "gloo"


def _factor(op: Any, group: Any) -> Any:
    """What a rank's operand is multiplied by before the sum, on gloo; None for other reductions."""
    premultiplied = op == dist.ReduceOp.PREMUL_SUM and _on_gloo(group)
    return op.__getstate__()[1] if premultiplied else None


def _rank_in(group: Any, rank: int) -> int:
    """Of a rank of the whole world."""
    return rank if group is None else dist.get_group_rank(group, rank)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Of a coalescing manager that is open, for a collective that is a part of another."""
    outer, _COALESCED.open = _COALESCED.open, []
    try:
        yield
    finally:
        _COALESCED.open = outer


def _async(async_op: bool) -> bool:
    return async_op or bool(_COALESCED.open)


def _issued(work: Any, async_op: bool) -> Any:
    """Hand the work to the open manager; else wait for it unless the caller wants to."""
    if _COALESCED.open:
        if work is not None:
            _COALESCED.open[-1].append(work)
        return None
    if async_op or work is None:
        return work
    if isinstance(work, UnevenWork):
        work.wait()
    return None
