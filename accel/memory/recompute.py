"""Outputs that are freed between their use in the forward pass and that in the backward.

    call      y = f(x) as ever; of what f's operations save for their backward nothing is kept but x
    free      after y's consumer has run: y's storage is emptied; whoever holds y holds its shape
    arrives   the gradient of what the consumer made of y: f(x) runs again, its result becomes y's
              storage, and what f's operations had saved is there again, once for both
    backward  of the consumer, then of f: each in the graph of the first call

The graph is that of the first call, so gradients flow as if nothing had been freed: to closures and
past frozen inputs, twice with ``retain_graph``, in double backward. Random generators, autocast and the
stream are as they were in the first call. ``torch.compile`` breaks its graph there and at `free`: both
times the function runs eagerly.

An output is left alone where freeing it would free something else, because it is a part of a larger
storage, or is an input's, a consumer's or another output's memory; where no gradient is recorded; and
where the consumer's result has none. That somebody else keeps a view of it is for the caller to know;
reading it then is an error that says so, where the native library is built (else it is not checked).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # the public one takes a second to import
from torch.autograd.graph import saved_tensors_hooks

from accel.memory.lanes import home_of
from accel.ops import _native

__all__ = [
    "Recomputed",
    "Restorer",
    "default_generators",
    "is_running",
    "storage_of",
    "watched",
    "will_be_freed",
]

Restorer = Callable[[], AbstractContextManager[None]]
"""Enters the state that was captured, and leaves the one of now behind again."""


class Recomputed:
    """One call of a function, whose outputs can be freed until the backward pass.

    Args:
        generators: captures the state of random generators; called before the function is. The default knows
            those of the host and of the inputs' device.
    """

    def __init__(self, generators: Callable[[], Restorer] | None = None) -> None:
        self._generators = generators
        self._frame: _Frame | None = None
        self._outputs: tuple[weakref.ref[Tensor], ...] = ()

    @_disable_dynamo
    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``: a tensor or a tuple with tensors. It runs again in the backward pass, and
        must do the same then. Inside another call's function it is a part of that, and frees nothing."""
        if not torch.is_grad_enabled() or is_running():
            return function(*args)
        self._frame = frame = _Frame(function, args, self._generators or default_generators(args))
        with _running(), saved_tensors_hooks(frame.pack, _Saved.unpack):
            outputs = function(*args)
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        self._outputs = tuple(weakref.ref(y) for y in found if isinstance(y, Tensor))
        frame.outputs = [None for y in found if isinstance(y, Tensor)]
        _PENDING.add(self)
        return outputs

    @_disable_dynamo
    def free(self, *until: Tensor) -> int:
        """Empty the storages of the outputs; to be called once their consumers have run.

        Args:
            until: what consumers made of the outputs; the first gradient of one of them fills the storages.

        Returns:
            How many bytes were freed.
        """
        frame, self._frame = self._frame, None
        _PENDING.discard(self)
        recorded = [t for t in until if t.requires_grad]
        if frame is None or not recorded or not torch.is_grad_enabled():
            return 0
        taken = {storage_of(t) for t in until}
        freed = 0
        for number, output in enumerate(self._own(frame)):
            if output is None or storage_of(output) in taken:
                continue
            taken.add(storage_of(output))
            freed += output.untyped_storage().nbytes()
            frame.outputs[number] = _Emptied(output)
        if freed:
            for tensor in recorded:
                tensor.register_hook(frame.fill)
        return freed

    def will_free(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is an output's that `free` may free."""
        own = () if self._frame is None else self._own(self._frame)
        return any(y is not None and storage_of(y) == storage_of(tensor) for y in own)

    def _own(self, frame: _Frame) -> Iterator[Tensor | None]:
        """Each output, or None where its memory is gone, a part of something, or an input's."""
        inputs = {storage_of(t) for t in frame.tensors()}
        for reference in self._outputs:
            output = reference()
            free = output is not None and _is_whole(output) and storage_of(output) not in inputs
            yield output if free else None


_PENDING: weakref.WeakSet[Recomputed] = weakref.WeakSet()
"""Calls that were not freed yet."""
_RUNNING = threading.local()


@contextlib.contextmanager
def _running() -> Iterator[None]:
    before = is_running()
    _RUNNING.now = True
    try:
        yield
    finally:
        _RUNNING.now = before


def is_running() -> bool:
    """Whether this thread is inside the function of a `Recomputed`, the first or the second time: what is
    saved there is nobody else's to pack."""
    return getattr(_RUNNING, "now", False)


@contextlib.contextmanager
def watched(watcher: Callable[[Tensor], None]) -> Iterator[None]:
    """Show `watcher` each tensor that operations of this thread save in a function's second run."""
    if not hasattr(_RUNNING, "watchers"):
        _RUNNING.watchers = []
    _RUNNING.watchers.append(watcher)
    try:
        yield
    finally:
        _RUNNING.watchers.remove(watcher)


def will_be_freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory is an output's of a call that was not freed yet."""
    return any(call.will_free(tensor) for call in _PENDING)


def storage_of(tensor: Tensor) -> int:
    """The same number for all tensors in one memory, as long as that lives."""
    return tensor.untyped_storage()._cdata


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor's elements are all of its storage."""
    storage = tensor.untyped_storage()
    return tensor.numel() > 0 and storage.nbytes() == tensor.numel() * tensor.itemsize


class _Emptied:
    """An output without its bytes, and without its graph, which holds the frame."""

    MESSAGE = "this output was freed until the backward pass: accel.memory.recompute computes it again there"

    def __init__(self, output: Tensor) -> None:
        self._alias = (
            output.data
        )  # has a version of its own: autograd does not see that it is written
        self._num_bytes = output.untyped_storage().nbytes()
        if _native.reason() is None:
            torch.ops.accel._storage_empty(self._alias, self.MESSAGE)
        else:
            self._alias.untyped_storage().resize_(0)

    def fill(self, value: Tensor) -> Tensor:
        """Returns a tensor that has the memory."""
        alias = self._alias
        if (value.dtype, value.size()) != (alias.dtype, alias.size()):
            raise RuntimeError(
                f"recomputation gave {value.dtype} {list(value.size())} where the forward pass had "
                f"{alias.dtype} {list(alias.size())}: the function is not the same the second time"
            )
        if _native.reason() is not None:
            alias.untyped_storage().resize_(self._num_bytes)
            return alias.copy_(value)
        if not _is_whole(value) or value.stride() != alias.stride():
            value = torch.empty_like(alias).copy_(value)
        torch.ops.accel._storage_fill(alias, value)
        return value


@dataclass(frozen=True)
class _Saved:
    """What is kept in place of a tensor that an operation saved."""

    frame: _Frame
    number: int

    def unpack(self) -> Tensor:
        return self.frame.saved_tensor(self.number)

    def __del__(self) -> None:
        """The operation's backward has run, and nobody retains the graph."""
        self.frame.drop(self.number)


class _Frame:
    """What a second call needs, and what it found."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        generators: Callable[[], Restorer],
    ) -> None:
        self._function = function
        self._args = tuple(_detached(a) for a in args)
        self._versions = [t._version for t in self.tensors()]
        self._generators = generators()
        self._autocast = _autocast_of(self.tensors())
        self._home = home_of(self.tensors())
        self._count = 0
        self._saved: list[Tensor | None] | None = None
        self.outputs: list[_Emptied | None] = []

    def tensors(self) -> list[Tensor]:
        """The inputs."""
        return [a for a in self._args if isinstance(a, Tensor)]

    def pack(self, tensor: Tensor) -> _Saved:
        self._count += 1
        return _Saved(self, self._count - 1)

    @_disable_dynamo
    def saved_tensor(self, number: int) -> Tensor:
        self._recompute()
        assert self._saved is not None
        tensor = self._saved[number]
        assert tensor is not None
        self._home.lend([tensor])
        return tensor

    def drop(self, number: int) -> None:
        if self._saved is not None:
            self._saved[number] = None

    @_disable_dynamo
    def fill(self, grad: Tensor) -> None:
        """The hook on what consumers made of the outputs."""
        self._recompute()
        self._home.lend(())

    def _recompute(self) -> None:
        if self._saved is not None:
            return
        if [t._version for t in self.tensors()] != self._versions:
            raise RuntimeError(
                "an input that is needed to recompute an output was modified in place after it was used"
            )
        with self._home.at():
            saved, found = self._run_again()
            pairs = zip(self.outputs, found, strict=True)
            filled = [emptied.fill(tensor) for emptied, tensor in pairs if emptied is not None]
        self._home.lend(filled)
        self._saved = saved
        # the hooks of the graph hold the frame for as long as anybody holds what the graph made
        self.outputs, self._args, self._function = [], (), _never

    def _run_again(self) -> tuple[list[Tensor | None], list[Tensor]]:
        """What its operations save, and its outputs."""
        saved: list[Tensor | None] = []

        def record(tensor: Tensor) -> None:
            for watcher in getattr(_RUNNING, "watchers", ()):
                watcher(tensor)
            # without its graph, which would hold it: nobody runs that backward
            saved.append(tensor if tensor.is_leaf else tensor.detach())

        with (
            self._generators(),
            self._autocast(),
            torch.enable_grad(),
            _running(),
            saved_tensors_hooks(record, _nothing_to_unpack),
        ):
            outputs = self._function(*(_recorded(a) for a in self._args))
        if len(saved) != self._count:
            raise RuntimeError(
                f"recomputation saved {len(saved)} tensors where the forward pass saved {self._count}: the "
                "function is not the same the second time"
            )
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        return saved, [y.detach() for y in found if isinstance(y, Tensor)]


def _never(*args: Any) -> Any:
    raise AssertionError("a recomputation runs once")


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


class _Alias(torch.autograd.Function):
    """The same memory, neither a leaf nor a view to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def _recorded(value: Any) -> Any:
    """No leaf where the first call had none: an operation may write its gradient over its input."""
    value = _detached(value)
    return _Alias.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


def _nothing_to_unpack(saved: Any) -> Tensor:
    raise AssertionError("there is no backward pass through a recomputation")


def default_generators(args: tuple[Any, ...]) -> Callable[[], Restorer]:
    """A function that captures the random state of the host and of the devices of `args`."""
    devices = {a.device for a in args if isinstance(a, Tensor)} - {torch.device("cpu")}

    def read() -> tuple[Tensor, dict[torch.device, Tensor]]:
        others = {d: torch.get_device_module(d).get_rng_state(d) for d in devices}
        return torch.get_rng_state(), others

    def write(host: Tensor, others: dict[torch.device, Tensor]) -> None:
        torch.set_rng_state(host)
        for device, state in others.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def capture() -> Restorer:
        captured = read()

        @contextlib.contextmanager
        def restored() -> Iterator[None]:
            now = read()
            write(*captured)
            try:
                yield
            finally:
                write(*now)

        return restored

    return capture


def _autocast_of(tensors: list[Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Captures autocast, of the host and of the tensors' devices."""
    kinds = {"cpu", *(t.device.type for t in tensors)}
    settings = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
    ]
    cached = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            yield

    return restored
