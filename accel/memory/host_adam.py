"""Adam whose states are in host memory: on the device are weights, gradients and two small buffers.

A step goes bucket by bucket, the largest parameters first. The device's share of them:

    states in     B0  B1  .   B2  .   B3          host -> device, into one of two buffers
    compute           B0  .   B1  .   B2  .       one pass of `accel.ops.adamw`
    states out            B0  .   B1  .   B2      device -> host; then the buffer is free

and the host's share, at the same time, with the CPU's kernel on the states where they are:

    gradients out     device -> host              weights in    host -> device

Both directions of the bus are busy at once. A bucket is a range of elements of all states, without regard to
where a parameter ends, so that each copy is long. Where the host's memory is the device's (the CPU device
runtime) its share is not copied.

Which share the host has is `HostOptions.ratio`, or what `accel.memory.host_split` finds for measured rates.
Weights that are kept on several ranks (`REPLICATED`: tied embeddings) are stepped by the device on
all of them, for two kernels may round differently.

The states of a parameter are views: `optimizer.state` reads as with any other Adam, and a state that somebody
puts in their place is taken over before the next step.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from accel.memory.host_split import Element, Rates, best_ratio
from accel.memory.lanes import COMPUTE, Lanes, lanes_of
from accel.memory.pinned import PinnedMemory
from accel.memory.precision_aware_adam import (
    MASTER,
    MOMENTS,
    PrecisionAwareAdam,
    step_at_once,
)

__all__ = ["REPLICATED", "Budget", "HostAdam", "HostOptions"]

_log = logging.getLogger("accel")

REPLICATED = ("shared_embedding", "accel_replicated")
"""Attributes of a parameter that other ranks step too: Megatron's, which shards have not got, and theirs."""
_ALIGNMENT = 64
"""Elements; parameters begin at whole cache lines of every state."""
_BUFFERS = 2
"""One is copied into while the other is copied out of: more would wait for the same bus."""


@dataclass
class Budget:
    """Bytes of host memory, of all the optimizers that are given it."""

    left: int

    def take(self, num_bytes: int) -> bool:
        """Take `num_bytes` if as many are left; returns whether they were."""
        fits = num_bytes <= self.left
        self.left -= num_bytes * fits
        return fits


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What is kept on the host, and where it is stepped."""

    budget: Budget | None = None
    """What is kept on the host is taken from it, in whole parameters; None: all is."""
    ratio: float | None = None
    """Share of the elements that the host steps; None: the best by `rates`, or 0 without these."""
    rates: Rates | None = None
    bucket_numel: int = 1 << 22
    """Elements of a bucket: 48 MiB of states, 1 ms on PCIe 5, and twice that of the device's memory."""
    lanes: Callable[[torch.device], Lanes] = lanes_of

    def __post_init__(self) -> None:
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise ValueError(f"the host's ratio must be within 0 and 1, got {self.ratio}")


@dataclass(frozen=True)
class _Kind:
    """What the parameters of an arena have in common."""

    device: torch.device
    weight: torch.dtype
    master: torch.dtype | None
    """None: the weight is its own master, and stays on the device."""
    shared: bool

    def states(self) -> dict[str, torch.dtype]:
        """What is on the host."""
        found = dict.fromkeys(MOMENTS, torch.float32)
        return found if self.master is None else {**found, MASTER: self.master}

    def num_bytes(self) -> int:
        """On the host, of one element."""
        return sum(dtype.itemsize for dtype in self.states().values())


def _padded(param: Tensor) -> int:
    """Elements from one parameter to the next."""
    return -(-param.numel() // _ALIGNMENT) * _ALIGNMENT


class _Arena:
    """The states of parameters of one kind, each state in one piece of pinned memory."""

    EXTRA = _ALIGNMENT
    """Elements beyond the last: who writes checkpoints in the background clones parts of something."""

    def __init__(self, kind: _Kind, params: Sequence[Tensor]) -> None:
        self.kind = kind
        self.memory = PinnedMemory(kind.device)
        self.starts: dict[Tensor, int] = {}
        self._views: dict[tuple[Tensor, str], Tensor] = {}
        self.numel = 0
        for param in params:
            self.starts[param] = self.numel
            self.numel += _padded(param)
        dtypes = kind.states().items()
        self.states = {n: self.memory.empty(self.numel + self.EXTRA, dtype) for n, dtype in dtypes}

    def view(self, param: Tensor, name: str) -> Tensor:
        """A state of a parameter, the same object each time."""
        if (param, name) not in self._views:
            start = self.starts[param]
            flat = self.states[name][start : start + param.numel()]
            self._views[param, name] = flat.view(param.shape)
        return self._views[param, name]

    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def element(self, grad: torch.dtype) -> Element:
        return Element(
            states=self.kind.num_bytes(),
            grad=grad.itemsize,
            weight=self.kind.weight.itemsize,
            weight_is_state=self.kind.master in (None, torch.int16),
        )

    def buckets(
        self, updates: dict[Tensor, _Update], begin: int, end: int, numel: int
    ) -> list[_Bucket]:
        """The elements from `begin` to `end`, up to `numel` in each; those where nothing is updated are left
        out."""
        found: dict[int, _Bucket] = {}
        for param, start in self.starts.items():
            if param not in updates:
                continue
            first, last = max(start, begin), min(start + param.numel(), end)
            while first < last:
                number = (first - begin) // numel
                lowest = begin + number * numel
                bucket = _Bucket(self, lowest, min(lowest + numel, end))
                bucket = found.setdefault(number, bucket)
                stop = min(last, bucket.end)
                bucket.add(first, updates[param].part(first - start, stop - start))
                first = stop
        return list(found.values())


@dataclass(frozen=True)
class _Update:
    """A parameter's part in a step."""

    weight: Tensor
    grad: Tensor
    step: float
    """Steps done before this one."""
    options: dict[str, Any]

    def part(self, begin: int, end: int) -> _Update:
        """Of some elements."""
        if end - begin == self.weight.numel():
            return self
        return replace(self, weight=self.weight[begin:end], grad=self.grad[begin:end])


@dataclass(frozen=True)
class _Bucket:
    """A range of an arena's elements, and what of parameters is in it."""

    arena: _Arena
    begin: int
    end: int
    pieces: list[tuple[int, _Update]] = field(default_factory=list)
    """Where it begins, counted from the bucket's first element."""

    def add(self, begin: int, part: _Update) -> None:
        self.pieces.append((begin - self.begin, part))

    def weights(self) -> list[Tensor]:
        return [part.weight for _, part in self.pieces]

    def grads(self) -> list[Tensor]:
        return [part.grad for _, part in self.pieces]

    def states(self) -> dict[str, Tensor]:
        """On the host."""
        return {name: state[self.begin : self.end] for name, state in self.arena.states.items()}

    def step(
        self, states: dict[str, Tensor], weights: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        """Step all pieces; `weights` and `grads`, one for each, are where `states` are."""
        same = collections.defaultdict[Any, list](list)
        for (begin, piece), weight, grad in zip(self.pieces, weights, grads, strict=True):
            part = {name: state[begin : begin + weight.numel()] for name, state in states.items()}
            # a count of its own: all pieces of a parameter do the same step
            step = torch.tensor(piece.step)
            row = (weight, grad, part.get(MASTER, weight), *(part[n] for n in MOMENTS), step)
            same[id(piece.options), grad.dtype].append((piece.options, row))
        for rows in same.values():
            options = rows[0][0]
            step_at_once([row for _, row in rows], options)


class HostAdam(PrecisionAwareAdam):
    """`PrecisionAwareAdam` with states in host memory.

    Args:
        params, **options: as `PrecisionAwareAdam` takes them.
        host: how much, and where it is stepped.

    Raises:
        ValueError: as `PrecisionAwareAdam`, or a state that is not fp32 (or a remainder).
    """

    def __init__(
        self, params: Iterable[Any], *args: Any, host: HostOptions, **options: Any
    ) -> None:
        super().__init__(params, *args, **options)
        if others := {name: dtype for name, dtype in self._dtypes.items() if dtype.itemsize != 4}:
            name, dtype = others.popitem()
            raise ValueError(f"states on the host are fp32 or remainders; {name} is {dtype}")
        self.host = host
        self._arenas: dict[Tensor, _Arena] = {}
        self._planned: set[Tensor] = set()
        self._lanes: dict[torch.device, Lanes] = {}
        self._host_buffers: dict[torch.device, list[_HostBuffer]] = {}

    def grad_scale(self) -> Tensor | None:
        """On the host, which steps some of the parameters."""
        found = super().grad_scale()
        return None if found is None else found.cpu()

    # Which parameters

    def _plan(self) -> None:
        """Choose among the parameters that are new, the largest first."""
        params = (p for group in self.param_groups for p in group["params"])
        new = sorted((p for p in params if p not in self._planned), key=Tensor.numel, reverse=True)
        budget = self.host.budget
        chosen = collections.defaultdict[_Kind, list[Tensor]](list)
        for param in new:
            if not param.is_contiguous() or not param.numel():
                continue
            kind = _Kind(
                param.device,
                param.dtype,
                None if self._is_own_master(param) else self._dtype_of(param, MASTER),
                any(getattr(param, name, False) for name in REPLICATED),
            )
            numel = _padded(param) + (0 if kind in chosen else _Arena.EXTRA)
            if budget is None or budget.take(numel * kind.num_bytes()):
                chosen[kind].append(param)
        for kind, of_kind in chosen.items():
            arena = _Arena(kind, of_kind)
            self._arenas.update(dict.fromkeys(of_kind, arena))
            _log.info(
                "host_optimizer: %.3f GiB of states of %d parameters are on the host",
                arena.num_bytes() / 2**30,
                len(of_kind),
            )
        self._planned.update(new)

    def _all_arenas(self) -> list[_Arena]:
        return list({id(arena): arena for arena in self._arenas.values()}.values())

    def is_on_host(self, param: Tensor) -> bool:
        """Whether the states of a parameter of this optimizer are on the host."""
        if param not in self._planned:
            self._plan()
        return param in self._arenas

    # States

    def _allocate(self, param: Tensor, name: str) -> Tensor:
        if self.is_on_host(param):
            return self._arenas[param].view(param, name)
        return super()._allocate(param, name)

    def _take_over(self, param: Tensor) -> None:
        """States that somebody has put in place of ours."""
        state, arena = self.state[param], self._arenas[param]
        for name in arena.states:
            ours = arena.view(param, name)
            if state[name] is not ours:
                state[name] = ours.copy_(state[name])

    # A step

    def _ready_state(self, param: Tensor) -> None:
        super()._ready_state(param)
        if self.is_on_host(param):
            self._take_over(param)

    def _take_step(self) -> None:
        on_device, updates = [], {}
        for rows, options in self._rows_of_groups():
            on_device.append(([row for row in rows if not self.is_on_host(row[0])], options))
            for param, grad in rows:
                if self.is_on_host(param):
                    step = float(self.state[param]["step"])
                    flat = param.detach().view(-1), grad.reshape(-1)
                    updates[param] = _Update(*flat, step, options)
        # all memory first: what does not fit stops the step before it has begun
        passes = [self._pass(device, arenas, updates) for device, arenas in self._by_device()]
        for rows, options in on_device:
            self._step_params(rows, options)
        for one in passes:
            one.run()
        for param, update in updates.items():
            self.state[param]["step"] = torch.tensor(update.step + 1)

    def _by_device(self) -> Iterable[tuple[torch.device, list[_Arena]]]:
        found = collections.defaultdict[torch.device, list[_Arena]](list)
        for arena in self._all_arenas():
            found[arena.kind.device].append(arena)
        return found.items()

    def _pass(
        self, device: torch.device, arenas: list[_Arena], updates: dict[Tensor, _Update]
    ) -> _Pass:
        if device not in self._lanes:
            self._lanes[device] = self.host.lanes(device)
            self._host_buffers[device] = []
        of_host: list[_Bucket] = []
        of_device: list[_Bucket] = []
        for arena in arenas:
            ours, theirs = self._buckets(arena, updates)
            of_host += ours
            of_device += theirs
        return _Pass(self._lanes[device], device, self._host_buffers[device], of_host, of_device)

    def _buckets(
        self, arena: _Arena, updates: dict[Tensor, _Update]
    ) -> tuple[list[_Bucket], list[_Bucket]]:
        """Of the host, and of the device."""
        first = next((param for param in arena.starts if param in updates), None)
        if first is None:
            return [], []
        ratio = self.ratio(arena, updates[first].grad.dtype)
        cut = round(arena.numel * (1 - ratio) / _ALIGNMENT) * _ALIGNMENT
        numel = self.host.bucket_numel
        # nothing is copied there: all in one call of the kernel
        at_once = self._lanes[arena.kind.device].shares_host_memory
        return (
            arena.buckets(updates, cut, arena.numel, arena.numel if at_once else numel),
            arena.buckets(updates, 0, cut, numel),
        )

    def ratio(self, arena: _Arena, grad: torch.dtype) -> float:
        """Share of the elements that the host steps."""
        if arena.kind.shared:
            return 0.0
        if self.host.ratio is not None:
            return self.host.ratio
        return best_ratio(self.host.rates, arena.element(grad)) if self.host.rates else 0.0


class _Pass:
    """The copies and kernels of one step on one device, and the memory that they need."""

    def __init__(
        self,
        lanes: Lanes,
        device: torch.device,
        host_buffers: list[_HostBuffer],
        of_host: Sequence[_Bucket],
        of_device: Sequence[_Bucket],
    ) -> None:
        self._lanes = lanes
        self._of_host = of_host
        self._of_device = of_device
        self._host_buffers = host_buffers  # of all steps: pinning takes longer than a copy
        numel = max((bucket.end - bucket.begin for bucket in of_host), default=0)
        enough = lanes.shares_host_memory or (host_buffers and host_buffers[0].numel >= numel)
        if numel and not enough:
            host_buffers[:] = [_HostBuffer(device, numel) for _ in range(_BUFFERS)]
        sizes: dict[tuple[str, torch.dtype], int] = {}
        for bucket in of_device:
            for name, state in bucket.states().items():
                key = (name, state.dtype)
                sizes[key] = max(sizes.get(key, 0), state.numel())
        # kept until the last copy has read them, which is after the end of `_device_share`
        self._device_buffers = [
            {key: torch.empty(n, dtype=key[1], device=device) for key, n in sizes.items()}
            for _ in range(min(_BUFFERS, len(of_device)))
        ]

    def run(self) -> None:
        self._lanes.open()
        try:
            host = self._host_share()
            next(host, None)  # its first gradients are on their way
            self._device_share()
            for _ in host:
                pass
        finally:
            self._lanes.close()

    def _device_share(self) -> None:
        run, buffers = self._lanes.run, self._device_buffers
        free: list[Any] = [None] * _BUFFERS
        for number, bucket in enumerate(self._of_device):
            slot = number % _BUFFERS
            here = bucket.states()
            there = {n: buffers[slot][n, s.dtype][: s.numel()] for n, s in here.items()}
            step = functools.partial(bucket.step, there, bucket.weights(), bucket.grads())
            arrived = run("states in", functools.partial(_copy, there, here), [free[slot]])
            stepped = run(COMPUTE, step, [arrived])
            free[slot] = run("states out", functools.partial(_copy, here, there), [stepped])

    def _host_share(self) -> Iterator[None]:
        """Stops once, when the first copies are asked for."""
        run, buckets, buffers = self._lanes.run, self._of_host, self._host_buffers
        if self._lanes.shares_host_memory:
            yield
            for bucket in buckets:
                bucket.step(bucket.states(), bucket.weights(), bucket.grads())
            return
        arrived = [
            run("gradients out", functools.partial(buffer.fetch, bucket))
            for buffer, bucket in zip(buffers, buckets, strict=False)
        ]
        yield
        for number, bucket in enumerate(buckets):
            slot = number % _BUFFERS
            buffer = buffers[slot]
            self._lanes.wait(arrived[slot])
            bucket.step(bucket.states(), buffer.weights(bucket), buffer.grads(bucket))
            written = run("weights in", functools.partial(buffer.write, bucket))
            if number + _BUFFERS < len(buckets):
                fetch = functools.partial(buffer.fetch, buckets[number + _BUFFERS])
                arrived[slot] = run("gradients out", fetch, [written])


def _copy(to: dict[str, Tensor], from_: dict[str, Tensor]) -> None:
    for name, target in to.items():
        target.copy_(from_[name], non_blocking=True)


class _HostBuffer:
    """Gradients and weights of one bucket on the host, in 4 bytes an element or fewer."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self.numel = numel
        self._memory = PinnedMemory(device)
        self._grads, self._weights = (self._memory.empty(numel, torch.float32) for _ in range(2))

    def grads(self, bucket: _Bucket) -> list[Tensor]:
        return [_within(self._grads, begin, part.grad) for begin, part in bucket.pieces]

    def weights(self, bucket: _Bucket) -> list[Tensor]:
        return [_within(self._weights, begin, part.weight) for begin, part in bucket.pieces]

    def fetch(self, bucket: _Bucket) -> None:
        """What a step reads."""
        pairs = list(zip(self.grads(bucket), bucket.grads(), strict=True))
        if bucket.arena.element(torch.float32).weight_is_state:
            pairs += zip(self.weights(bucket), bucket.weights(), strict=True)
        for here, there in pairs:
            here.copy_(there, non_blocking=True)

    def write(self, bucket: _Bucket) -> None:
        """The weights."""
        for here, there in zip(self.weights(bucket), bucket.weights(), strict=True):
            there.copy_(here, non_blocking=True)


def _within(buffer: Tensor, begin: int, like: Tensor) -> Tensor:
    """The elements from `begin` on of a buffer, in the dtype and size of `like`."""
    return buffer[begin:].view(like.dtype)[: like.numel()]
