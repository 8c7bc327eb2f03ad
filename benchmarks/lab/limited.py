"""`torch.distributed` on gloo with a rate limit, for machines without network namespaces.

    through = max(now, when the link is free) + bytes / rate

at each rank, where an operation is asked for. It is done when its own work is and the latest `through` of its
ranks has come (a sender goes by its own). The ranks tell each other by a message of 8 bytes beside each
operation; they are on one machine, whose clock they share.

    isend, irecv, batch_isend_irecv    bytes of the tensor; a link for each peer and direction
    all_gather                         what comes from others
    all_gather_into_tensor             (n - 1) / n of the output
    reduce_scatter_tensor              (n - 1) / n of the input
    all_reduce                         2 (n - 1) / n of the tensor
    all_to_all_single                  what goes to others or comes from them, whichever is more

The collectives have a link for each group and take what a ring takes on n ranks. It is a model: links do not
share a network card, have no latency, and the data crosses the loopback at full speed beforehand, for which
the processor works in bursts. Measure on :mod:`benchmarks.lab.network` where that can be.

All other functions of `torch.distributed` that move tensors or objects raise, or are made of these.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from benchmarks.lab.replaced import replaced

__all__ = ["Limit", "LimitedWork", "limit"]


class Limit:
    """A rate and, for each link, when it is free."""

    kind = "rate-limited wrapper"
    """For a result's method."""

    def __init__(self, bytes_per_second: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"{bytes_per_second} bytes per second: more than 0")
        self.bytes_per_second = bytes_per_second
        self._free: dict[Hashable, float] = {}

    def occupy(self, link: Hashable, num_bytes: float) -> Tensor:
        """Queue a transfer; when its last byte is through, as a message."""
        start = max(time.monotonic(), self._free.get(link, 0.0))
        self.hold(link, start + num_bytes / self.bytes_per_second)
        return torch.tensor([self._free[link]], dtype=torch.float64, device="cpu")

    def hold(self, link: Hashable, moment: float) -> None:
        """The link is not free before that."""
        self._free[link] = max(moment, self._free.get(link, 0.0))


class LimitedWork:
    """Stands for a work, and is not done before its bytes are through."""

    def __init__(
        self, works: list[dist.Work], through: list[Tensor], done: Callable[[float], None]
    ) -> None:
        self._works = works
        self._through = through
        self._done: Callable[[float], None] | None = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(*(() if timeout is None else (timeout,)))
        self._works.clear()  # some of gloo's are never completed
        through = max(moment.item() for moment in self._through)
        if self._done is not None:
            self._done(through)
            self._done = None
        while (seconds := through - time.monotonic()) > 0:
            time.sleep(seconds)
        return True

    def is_completed(self) -> bool:
        """Of a send or a receive true only after `wait`, as gloo's own."""
        if not all(work.is_completed() for work in self._works):
            return False
        return time.monotonic() >= max(moment.item() for moment in self._through)


@contextmanager
def limit(bytes_per_second: float) -> Iterator[Limit]:
    """Within, the operations above are at most as fast; all ranks have to be within at the same time.

    Wherever a module has the function, under whatever name. Not limited: what else has kept one, functional
    collectives and a process group's own methods.

    Raises:
        NotImplementedError: within, of a collective that is not counted, or one of several coalesced.
    """
    limit = Limit(bytes_per_second)
    makers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "isend": functools.partial(_isend, limit),
        "irecv": functools.partial(_irecv, limit),
        **{name: functools.partial(_collective, limit, count) for name, count in _COUNTED.items()},
        **dict.fromkeys(_REFUSED, _refusing),
    }
    limited = {
        original: _unless_inside(original, make(original))
        for name, make in makers.items()
        for original in {getattr(module, name, None) for module in (dist, distributed_c10d)}
        - {None}
    }
    with replaced(limited):
        yield limit


class _Inside(threading.local):
    """Whether this thread is asking for what has been counted."""

    yes = False


_INSIDE = _Inside()


def _unless_inside(original: Callable[..., Any], limited: Callable[..., Any]) -> Callable[..., Any]:
    """Limited, but what torch or accel makes of it, by other functions, is not counted again."""

    @functools.wraps(original)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if _INSIDE.yes:
            return original(*args, **kwargs)
        _INSIDE.yes = True
        try:
            return limited(*args, **kwargs)
        finally:
            _INSIDE.yes = False

    return outermost


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        counted = ", ".join(("isend", "irecv", *_COUNTED))
        raise NotImplementedError(f"{original.__name__} is not limited; these are: {counted}")

    return refused


def _isend(
    limit: Limit, original: Callable[..., dist.Work | None]
) -> Callable[..., LimitedWork | None]:
    def isend(
        tensor: Tensor,
        dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> LimitedWork | None:
        link = ("to", _global_rank(group, dst, group_dst))
        through = limit.occupy(link, tensor.nbytes)
        return _both(
            original(through, dst, group, tag, group_dst),
            original(tensor, dst, group, tag, group_dst),
            [through],
        )

    return isend


def _irecv(
    limit: Limit, original: Callable[..., dist.Work | None]
) -> Callable[..., LimitedWork | None]:
    def irecv(
        tensor: Tensor,
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> LimitedWork | None:
        if src is None and group_src is None:
            raise NotImplementedError("a limited receive has a source")
        through = limit.occupy(("from", _global_rank(group, src, group_src)), tensor.nbytes)
        senders = torch.empty_like(through)
        return _both(
            original(senders, src, group, tag, group_src),
            original(tensor, src, group, tag, group_src),
            [through, senders],
        )

    return irecv


def _both(
    first: dist.Work | None,
    second: dist.Work | None,
    through: list[Tensor],
    done: Callable[[float], None] = lambda moment: None,
) -> LimitedWork | None:
    """``None``, as torch's, at a rank that is not of the group."""
    if first is None or second is None:
        return None
    return LimitedWork([first, second], through, done)


def _global_rank(group: dist.ProcessGroup | None, rank: int | None, group_rank: int | None) -> int:
    if rank is not None:
        return rank
    assert group_rank is not None
    return dist.get_global_rank(_or_default(group), group_rank)


def _or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    assert group is not None, "no process group"
    return group


Count = Callable[[Mapping[str, Any], int, int], float]
"""Bytes that a rank sends to others, from the arguments, the number of ranks and the rank."""


def _collective(
    limit: Limit, count: Count, original: Callable[..., dist.Work | None]
) -> Callable[..., LimitedWork | None]:
    signature = inspect.signature(original)

    def limited(*args: Any, **kwargs: Any) -> LimitedWork | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        group = _or_default(given["group"])
        if group in distributed_c10d._world.pg_coalesce_state:
            raise NotImplementedError(f"{original.__name__}: coalesced collectives are not limited")
        through = limit.occupy(
            group, count(given, dist.get_world_size(group), dist.get_rank(group))
        )
        work = _both(
            dist.all_reduce(through, dist.ReduceOp.MAX, group=group, async_op=True),
            original(**{**given, "async_op": True}),
            [through],
            functools.partial(limit.hold, group),
        )
        if work is not None and not given["async_op"]:
            work.wait()
            return None
        return work

    return limited


def _ring(name: str, rounds: int = 1) -> Count:
    """Of a tensor: each rank passes on all parts but one, once or twice."""
    return lambda given, size, rank: rounds * given[name].nbytes * (size - 1) / size


def _all_to_all(given: Mapping[str, Any], size: int, rank: int) -> float:
    def others(tensor: Tensor, split: Sequence[int] | None) -> float:
        """Megatron's splits are of numpy."""
        if split is None or len(split) == 0:
            return tensor.nbytes * (1 - 1 / size)
        mine = split[rank] / max(1, sum(split))
        return tensor.nbytes * (1 - mine)

    sent = others(given["input"], given["input_split_sizes"])
    return max(sent, others(given["output"], given["output_split_sizes"]))


def _all_gather(given: Mapping[str, Any], size: int, rank: int) -> float:
    return sum(tensor.nbytes for r, tensor in enumerate(given["tensor_list"]) if r != rank)


_COUNTED: dict[str, Count] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _ring("output_tensor"),
    "all_gather_single": _ring("output_tensor"),
    "reduce_scatter_tensor": _ring("input"),
    "reduce_scatter_single": _ring("input"),
    "all_reduce": _ring("tensor", rounds=2),
    "all_to_all_single": _all_to_all,
}

_REFUSED = (
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "scatter",
)
