"""Tensors that autograd saves, in host memory between the forward and the backward pass.

    pack      a tensor is saved inside a group: its storage is copied to the host, on a lane of its own
    release   some groups later, the copy has had their time: the device's memory is let go
    fetch     the backward pass reaches a group: the storages of the one before it come back, on another lane
    unpack    the kernels wait for this one storage, and for no other

A chain is the forward pass of one micro-batch through one chunk of a model, a group one module's part of it:
so each chain knows what its backward pass needs next, whatever runs between. On the device stay parameters,
frozen ones too, and their views, small tensors, small parts of large storages, outputs that
:mod:`accel.memory.recompute` will free, what is saved under another stream than the chain was opened under,
as shared experts' beside their tokens' journey, and the groups that are not wanted, as the last ones, whose
backward pass comes first. A storage that is saved more than once, by any group of a chain, is copied once.
Whatever stream a backward pass asks under, a storage comes back in that of the chain opened last, and both
streams wait for it.

Nothing is emptied: a tensor that somebody else holds stays what it was, and merely frees no memory. A saved
tensor that is changed in place before it was released is an error, as it is without this.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from accel.memory import recompute
from accel.memory.lanes import COMPUTE, Lanes, lanes_of
from accel.memory.pinned import PinnedMemory

__all__ = ["Chain", "Swap"]

OUT, IN = "to host", "to device"
MIN_BYTES = 1 << 20
CHANGED = "a tensor needed for the backward pass was modified in place after it was saved (accel.memory.swap)"


class Swap:
    """What the chains of a device share: its lanes, and host memory that is pinned once and used again.

    Args:
        min_bytes: smaller storages stay.
        min_numel: tensors with fewer elements stay.
    """

    def __init__(
        self,
        device: torch.device,
        lanes: Lanes | None = None,
        min_bytes: int = MIN_BYTES,
        min_numel: int = 0,
    ) -> None:
        self.device = device
        self.lanes = lanes or lanes_of(device)
        self.min_bytes = min_bytes
        self.min_numel = min_numel
        self.pool = _Pool(device)

    def can_go(self, tensor: Tensor, keep: Collection[int] = ()) -> bool:
        """Whether a tensor that is saved may be copied to the host, if it is nobody's leaf.

        Args:
            keep: `recompute.storage_of` of tensors that stay.
        """
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return False
        if tensor.device != self.device or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= self.min_bytes
            and tensor.numel() >= self.min_numel
            and 4 * tensor.numel() * tensor.itemsize >= storage.nbytes()
            and storage._cdata not in keep
            and not recompute.will_be_freed(tensor)
        )

    def chain(
        self,
        wanted: Callable[[int], bool] = lambda number: True,
        depth: int = 1,
        timed: bool = False,
    ) -> Chain:
        """A new chain, whose groups are those of `wanted` (number in the chain, from 0).

        Args:
            depth: how many groups later a group is released, and earlier fetched.
            timed: stop the host at each group, to fill in `Chain.seconds`.
        """
        self.lanes.open()
        return Chain(self, wanted, depth, timed)


class Chain:
    """The groups of one forward pass. Close it when that has ended."""

    def __init__(self, swap: Swap, wanted: Callable[[int], bool], depth: int, timed: bool) -> None:
        self.swap = swap
        self.depth = depth
        self.sizes: list[int] = []
        """Bytes that each group can copy."""
        self.seconds: list[float] = []
        """Of the kernels between the end of each group and that of the next, without waits for copies."""
        self._wanted = wanted
        self._clock = self._now if timed else None
        self._began: float | None = None
        self._groups: list[_Group] = []
        # a backward pass may run before the chain is closed, and lets go of what it has fetched
        self._known: weakref.WeakValueDictionary[StorageWeakRef, _Copy] = (
            weakref.WeakValueDictionary()
        )
        self._in_flight: list[_Group] = []

    @contextlib.contextmanager
    def group(self, keep: Iterable[Tensor] = ()) -> Iterator[None]:
        """Tensors that autograd saves meanwhile are a group.

        Args:
            keep: tensors that stay on the device: a module's parameters.
        """
        if not torch.is_grad_enabled():
            yield
            return
        number = len(self._groups)
        earlier = self._groups[-self.depth] if number >= self.depth else None
        group = _Group(self, earlier, self._wanted(number), {recompute.storage_of(t) for t in keep})
        self._groups.append(group)
        self.sizes.append(0)
        hooks = saved_tensors_hooks(group.pack, _Saved.unpack)
        try:
            # what a recomputation's function saves is packed there: the group is empty
            with contextlib.nullcontext() if recompute.is_running() else hooks:
                yield
        finally:
            self.sizes[number] = group.num_bytes
            if self._clock and self._began is not None:
                self.seconds.append(self._clock() - self._began)
            self._in_flight.append(group)
            while len(self._in_flight) > self.depth:
                self._in_flight.pop(0).release()
            if self._clock:
                self._began = self._clock()

    def _now(self) -> float:
        """When the kernels that were launched have run."""
        lanes = self.swap.lanes
        lanes.wait(lanes.run(COMPUTE, _nothing))
        return time.perf_counter()

    def close(self) -> None:
        """Release what is left; the chain lives on in the graph."""
        for group in self._in_flight:
            group.release()
        self._in_flight.clear()
        self._known.clear()
        self._groups.clear()

    def copy_of(self, tensor: Tensor) -> _Copy:
        """The storage of a tensor on its way to the host."""
        reference = StorageWeakRef(tensor.untyped_storage())
        known = self._known.get(reference)
        if known is None or known.version != tensor._version:
            known = self._known[reference] = _Copy(self.swap, tensor)
        return known


class _Group:
    """What one module saved, in the order in which it did."""

    def __init__(self, chain: Chain, earlier: _Group | None, wanted: bool, keep: set[int]) -> None:
        self._chain: Chain | None = chain
        self._swap = chain.swap
        self._earlier = earlier  # the next one that a backward pass needs, but for those in between
        self._wanted = wanted
        self._keep = keep
        self._copies: list[weakref.ref[_Copy]] = []
        self._held: list[_Copy] = []
        self._counted: set[int] = set()
        self._begun = False
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> _Saved:
        stays = _is_of_a_leaf(tensor) or not self._swap.lanes.computes_here()
        if stays or not self._swap.can_go(tensor, self._keep):
            return _Saved(self, tensor, None)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            self.num_bytes += storage.nbytes()
        if not self._wanted:
            return _Saved(self, tensor, None)
        assert self._chain is not None
        copy = self._chain.copy_of(tensor)
        self._held.append(copy)
        self._copies.append(weakref.ref(copy))
        return _Saved(self, tensor, copy)

    def release(self) -> None:
        """The kernels wait for the copies; then nothing holds the storages for our sake."""
        for reference in self._copies:
            if (copy := reference()) is not None:
                copy.release()
        self._held.clear()
        self._keep = set()
        self._chain = None

    def begin_backward(self) -> None:
        """Fetch what is not fetched, and then what comes next."""
        if self._begun:
            return
        self._begun = True
        self._held.clear()  # from now on the graph alone holds what is not released
        self.fetch()
        earlier = self._earlier
        while earlier is not None:
            earlier.fetch()
            # nobody unpacks what an empty group saved, so nobody else fetches for it
            earlier = earlier._earlier if not earlier._copies else None

    def fetch(self) -> None:
        for reference in reversed(self._copies):
            copy = reference()
            if copy is not None:
                copy.fetch()


class _Saved:
    """What is kept in place of a tensor that an operation saved."""

    def __init__(self, group: _Group, tensor: Tensor, copy: _Copy | None) -> None:
        self._group = group
        self._copy = copy
        self._version = tensor._version
        # an output must not be held with its graph, a parameter is itself
        self._kept = None if copy else tensor if tensor.is_leaf else tensor.detach()
        self._layout = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def unpack(self) -> Tensor:
        self._group.begin_backward()
        if self._copy is not None:
            storage = self._copy.storage()
            dtype, *layout = self._layout
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *layout)
        assert self._kept is not None
        if self._kept._version != self._version:
            raise RuntimeError(CHANGED)
        return self._kept


class _Copy:
    """One storage: on the device, on the host, or both."""

    def __init__(self, swap: Swap, tensor: Tensor) -> None:
        self.version = tensor._version
        self._swap = swap
        self._source: Tensor | None = tensor.detach()  # of the same version
        self._device: Tensor | None = _bytes_of(tensor)
        self._changed = False
        self._buffer, free = swap.pool.take(self._device.numel())
        self._host = self._buffer[: self._device.numel()]
        self._arrival: Any = None
        device, host = self._device, self._host

        def send() -> None:
            host.copy_(device, non_blocking=True)

        computed = swap.lanes.run(COMPUTE, _nothing)
        self._departure = swap.lanes.run(OUT, send, after=(computed, free))
        self._waited = False

    def release(self) -> None:
        if self._source is None:
            return
        self._changed = self._source._version != self.version
        self._source = None
        self._wait(self._departure)
        self._device = None

    def fetch(self) -> None:
        """Start to copy the storage back, where it is not on the device."""
        if self._device is not None:
            return
        lanes, host = self._swap.lanes, self._host

        def allocate() -> None:
            self._device = torch.empty_like(host, device=self._swap.device, pin_memory=False)

        # the memory is of the kernels' lane, which may be at work on what was there before; it is asked for
        # there, because the backward pass may have come here under another stream
        computed = lanes.run(COMPUTE, allocate)
        device = self._device
        assert device is not None

        def receive() -> None:
            device.copy_(host, non_blocking=True)

        self._arrival = lanes.run(IN, receive, after=(computed, self._departure))
        self._waited = False

    def storage(self) -> torch.UntypedStorage:
        """On the device; kernels of now on wait for it."""
        if self._changed or (self._source is not None and self._source._version != self.version):
            raise RuntimeError(CHANGED)
        self.fetch()
        if not self._waited and self._arrival is not None:
            self._wait(self._arrival)
            self._waited = True
        assert self._device is not None
        self._swap.lanes.lend(self._device, self._arrival)
        return self._device.untyped_storage()

    def _wait(self, event: Any) -> None:
        self._swap.lanes.run(COMPUTE, _nothing, after=(event,))

    def __del__(self) -> None:
        if not hasattr(self, "_departure"):
            return
        if self._source is not None:  # its memory must not be used again before it was read
            self._wait(self._departure)
        last = self._departure
        if self._arrival is not None:
            if not self._waited:
                self._wait(self._arrival)
            last = self._arrival
        self._swap.pool.give_back(self._buffer, last)


class _Pool:
    """Pinned buffers, by size; given back with the event after which they are free. Sizes that differ from
    micro-batch to micro-batch, such as those of experts' rows, share buffers that are up to an eighth larger:
    each size of its own would stay pinned for good."""

    def __init__(self, device: torch.device) -> None:
        self._memory = PinnedMemory(device)
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}
        self._lock = threading.RLock()  # a collection of garbage inside may give a buffer back
        self.num_bytes = 0
        """Of all buffers."""

    def take(self, num_bytes: int) -> tuple[Tensor, Any]:
        """A buffer of that many bytes or more, and the event after which it is free; None: it is."""
        num_bytes = _with_room(num_bytes)
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                return free.pop(0)
            self.num_bytes += num_bytes
        return self._memory.empty(num_bytes, torch.uint8), None

    def give_back(self, buffer: Tensor, event: Any) -> None:
        with self._lock:
            self._free.setdefault(buffer.numel(), []).append((buffer, event))


def _with_room(num_bytes: int) -> int:
    """The next multiple of an eighth of the power of two below."""
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_of_a_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, frozen or not, another leaf that has a gradient, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def _nothing() -> None: ...
