"""A model, on the CPU, of a device's streams and of its allocator, which says what is in order by luck alone.

Operations are computed at once, as ever; what each reads and writes, and in which stream a device would do
it, is noted. Two accesses to the same bytes, of which one writes, must be in order: in one stream, or by
waits.

clock     of a stream: how much of each stream's work comes before all that it does from now on
memory    belongs to the stream in which it was allocated, and may be given out again there as soon as nobody
          holds it: to work before which all other streams' uses must come, but for those of streams that the
          allocator was told of (`Tensor.record_stream`)

Tensors of floating point are on the device, all others on the host. `Noted` messages are of a third stream.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.parallel import collectives
from accel.parallel.collectives import Messages
from accel.parallel.experts import journey


class Access(NamedTuple):
    stream: str
    number: int
    begin: int
    end: int
    writes: bool
    operation: str


@dataclass
class Memory:
    storage: StorageWeakRef
    owner: str
    told: set[str] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Stream:
    def __init__(self, name: str, order: Order) -> None:
        self.name, self._order = name, order

    def wait_stream(self, other: Stream) -> None:
        self._order.wait(self.name, self._order.clock_of(other.name))


class Order(TorchDispatchMode):
    """Also what `torch.get_device_module` would return: `current_stream`, `stream`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stream("first", self), Stream("second", self)
        self._current = [self.first]
        self._clocks: dict[str, Counter[str]] = defaultdict(Counter)
        self._memory: dict[int, Memory] = {}
        self._free: dict[str, list[Memory]] = defaultdict(list)
        self.faults: list[str] = []
        """What a device may do in another order than the program says."""
        self._done = Counter[tuple[str, str]]()

    def named(self, part: str) -> Counter[str]:
        """How many operations of a name were in each stream."""
        found = Counter[str]()
        for (stream, operation), number in self._done.items():
            found[stream] += number * (part in operation)
        return found

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def clock_of(self, stream: str) -> Counter[str]:
        self._look_for_freed()
        return self._clocks[stream].copy()

    def wait(self, stream: str, clock: Counter[str]) -> None:
        self._look_for_freed()
        self._clocks[stream] |= clock

    def tell(self, tensor: Tensor, stream: Stream) -> None:
        """What `Tensor.record_stream` does."""
        self._memory_of(tensor, self.current_stream().name).told.add(stream.name)

    def work(
        self, stream: str, reads: Sequence[Tensor], writes: Sequence[Tensor], operation: str
    ) -> None:
        self._look_for_freed()
        clock = self._clocks[stream]
        clock[stream] += 1
        self._done[stream, operation] += 1
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in filter(_on_device, tensors):
                memory = self._memory_of(tensor, stream)
                begin, end = _extent(tensor)
                access = Access(stream, clock[stream], begin, end, written, operation)
                for before in memory.accesses:
                    meets = before.begin < end and begin < before.end
                    if meets and (written or before.writes) and not _precedes(before, clock):
                        self.faults.append(f"{access} and {before}")
                memory.accesses.append(access)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace in ("c10d", "prim"):
            return found
        schema = func._schema
        named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
        named |= kwargs or {}
        into = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        written = [t for name in into for t in _tensors(named.get(name))]
        read = [t for name, value in named.items() if name not in into for t in _tensors(value)]
        self.work(self.current_stream().name, read, written + _tensors(found), str(func))
        return found

    def _memory_of(self, tensor: Tensor, stream: str) -> Memory:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self._memory:
            for old in self._free.pop(stream, []):
                for access in old.accesses:
                    if access.stream not in old.told and not _precedes(
                        access, self._clocks[stream]
                    ):
                        self.faults.append(f"{stream} gives out again what is in use: {access}")
            # what others allocated and sent is given back to the first
            owner = self.first.name if stream == "messages" else stream
            self._memory[storage.cdata] = Memory(storage, owner)
        return self._memory[storage.cdata]

    def _look_for_freed(self) -> None:
        """Before anything that changes the order: what was let go of meanwhile."""
        for key in [key for key, memory in self._memory.items() if memory.storage.expired()]:
            memory = self._memory.pop(key)
            self._free[memory.owner].append(memory)


def _precedes(access: Access, clock: Counter[str]) -> bool:
    return clock[access.stream] >= access.number


def _on_device(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the storage that a tensor has, and the one after its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


class Noted(Messages):
    """Messages as a device's backend has them: in a stream of its own, after what the current one has been
    told; of a batch the first wait is for all, and is the current stream's."""

    order: Order

    def __init__(
        self,
        sends: Iterable[tuple[Tensor, int]],
        receives: Iterable[tuple[Tensor, int]],
        group: Any,
        *,
        post: bool,
    ) -> None:
        assert post
        order, sends, receives = self.order, list(sends), list(receives)
        super().__init__(sends, receives, group)
        order.wait("messages", order.clock_of(order.current_stream().name))
        order.work("messages", [t for t, _ in sends], [t for t, _ in receives], "messages")
        self._done: Counter[str] | None = order.clock_of("messages")
        self._waits_to_receive = bool(receives)

    def _wait(self) -> None:
        if self._done is not None:
            self.order.wait(self.order.current_stream().name, self._done)
        self._done = None

    def wait_received(self) -> None:
        super().wait_received()
        if self._waits_to_receive:
            self._wait()

    def wait_sent(self) -> None:
        super().wait_sent()
        self._wait()


@contextlib.contextmanager
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """What is computed meanwhile, and what experts' messages carry."""
    order = Order()
    noted = type("Noted", (Noted,), {"order": order})
    with monkeypatch.context() as patch, order:
        patch.setattr(collectives, "Messages", noted)
        patch.setattr(journey, "asks_ahead", lambda device: False)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: order.tell(tensor, stream))
        yield order
