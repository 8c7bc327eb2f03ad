"""What one layer's activations take, and what it takes to compute parts of them again, or to swap them.

A part is what lies between two calls of modules inside a layer: what is allocated between them and held is
what recomputing the part would free, and the time between them is what that costs. A swap moves what chosen
modules save; where a part is computed again, its inputs stay and its outputs are gone, so neither moves. All
is read while the layer runs once, with its gradients recorded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel.device.cpu import memory
from accel.device.streams import finish_current_stream
from accel.memory import recompute
from accel.memory.planner import Layer, Option
from accel.memory.swap import Swap

__all__ = ["KEEP", "WHOLE", "Choice", "Costs", "Movable", "Span", "evened", "measure", "options_of"]

_PAGE = 4096
KEEP, WHOLE = "keep", "recompute layer"
OTHER = ""
"""The part of what belongs to none."""


Hook = Callable[[Callable[[Any], None]], Any]
"""Registers a function to be called at a place, with what passes there: a tensor, or a tuple with tensors.
Returns the handle that removes it."""


@dataclass(frozen=True)
class Span:
    """A part of a layer, from a hook of one module to a hook of another."""

    part: str
    begin: Hook
    end: Hook
    keeps_output: bool = False
    """Whether the output stays when the part is computed again."""


@dataclass(frozen=True)
class Movable:
    """What may be swapped: what these modules save, as far as `swap` takes it."""

    swap: Swap
    modules: Sequence[torch.nn.Module]


@dataclass
class Costs:
    """What one layer costs, for one micro-batch."""

    num_bytes: int = 0
    """Of everything that is held between forward and backward, but for input and output."""
    seconds: float = 0.0
    """Of the forward pass."""
    parts: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Part -> bytes and seconds."""
    twice: dict[str, int] = field(default_factory=dict)
    """Part -> bytes of its output, where that stays, and is there again while the part is computed again."""
    moved: dict[str, int] = field(default_factory=dict)
    """Part -> bytes that a swap moves, the layer's input among them, unless the part is computed again."""

    def numbers(self, parts: Sequence[str]) -> list[float]:
        """All in a row: as many for every layer, for ranks to compare."""
        found: list[float] = [self.num_bytes, self.seconds, self.moved.get(OTHER, 0)]
        for part in parts:
            found += self.parts.get(part, (0, 0.0))
            found += (self.twice.get(part, 0), self.moved.get(part, 0))
        return found

    @classmethod
    def of_numbers(cls, numbers: Sequence[float], parts: Sequence[str]) -> Costs:
        num_bytes, seconds, other, *rest = numbers
        found = cls(int(num_bytes), seconds, moved={OTHER: int(other)})
        for part, of_part in zip(parts, itertools.batched(rest, 4), strict=True):
            part_bytes, part_seconds, twice, moved = of_part
            found.parts[part] = int(part_bytes), part_seconds
            found.twice[part], found.moved[part] = int(twice), int(moved)
        return found


@dataclass(frozen=True)
class Choice(Option):
    """An option, and what is to be done for it."""

    parts: frozenset[str] = frozenset()
    """What is computed again."""
    whole: bool = False
    """Whether all of the layer is."""
    swapped: bool = False


@contextlib.contextmanager
def measure(
    device: torch.device, spans: Sequence[Span], movable: Movable | None = None
) -> Iterator[Costs]:
    """Fill in what one call of a layer costs; the host waits for the current stream at each span.

    The caller subtracts the bytes of the output, which it alone knows. What moves is seen where the call is
    the second one of a :class:`~accel.memory.recompute.Recomputed`.
    """

    def now() -> tuple[int, float]:
        if device.type == "cpu":
            return memory.memory_allocated(), time.perf_counter()
        finish_current_stream(device)
        return torch.get_device_module(device).memory_allocated(), time.perf_counter()

    costs = Costs()
    moves = _Moves(movable)
    handles = moves.hooks()
    begun: dict[Span, tuple[int, float]] = {}

    def begins(span: Span, given: Any) -> None:
        moves.open.append(span.part)
        begun[span] = now()

    def ends(span: Span, output: Any) -> None:
        after, moment = now()
        before, then = begun.pop(span)
        moves.open.remove(span.part)
        tensors = tensors_of(output)
        if not span.keeps_output:
            moves.made_by(span.part, tensors)
        kept = bytes_of(tensors) if span.keeps_output else 0
        num_bytes, seconds = costs.parts.get(span.part, (0, 0.0))
        costs.parts[span.part] = (num_bytes + after - before - kept, seconds + moment - then)
        costs.twice[span.part] = costs.twice.get(span.part, 0) + kept

    for span in spans:
        handles.append(span.begin(functools.partial(begins, span)))
        handles.append(span.end(functools.partial(ends, span)))
    before, began = now()
    try:
        with recompute.watched(moves.saw):
            yield costs
        after, ended = now()
        costs.num_bytes, costs.seconds = after - before, ended - began
        costs.moved = moves.bytes_by_part()
    finally:
        for handle in handles:
            handle.remove()


class _Moves:
    """Storages that movable modules save, and the part that each belongs to."""

    def __init__(self, movable: Movable | None) -> None:
        self._movable = movable
        self._parameters: list[set[int]] = []
        """Of the movable modules that are running, the innermost last."""
        self.open: list[str] = []
        """Parts that are running."""
        self._saved: dict[StorageWeakRef, tuple[int, str]] = {}
        self._made: dict[StorageWeakRef, str] = {}

    def hooks(self) -> list[Any]:
        def enters(module: torch.nn.Module, args: Any) -> None:
            self._parameters.append({recompute.storage_of(p) for p in module.parameters()})

        def leaves(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._parameters.pop()

        return [
            handle
            for module in (self._movable.modules if self._movable else ())
            for handle in (
                module.register_forward_pre_hook(enters),
                module.register_forward_hook(leaves),
            )
        ]

    def made_by(self, part: str, tensors: Sequence[Tensor]) -> None:
        self._made.update((StorageWeakRef(t.untyped_storage()), part) for t in tensors)

    def saw(self, tensor: Tensor) -> None:
        if self._movable is None or not self._parameters:
            return
        if self._movable.swap.can_go(tensor, self._parameters[-1]):
            storage = tensor.untyped_storage()
            part = self.open[-1] if self.open else OTHER
            self._saved.setdefault(StorageWeakRef(storage), (storage.nbytes(), part))

    def bytes_by_part(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for storage, (num_bytes, part) in self._saved.items():
            part = part or self._made.get(storage, OTHER)
            found[part] = found.get(part, 0) + num_bytes
        return found


def tensors_of(output: Any) -> list[Tensor]:
    found = output if isinstance(output, tuple) else (output,)
    return [t for t in found if isinstance(t, Tensor)]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors' storages."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def evened(costs: Sequence[Costs]) -> list[Costs]:
    """Layers that hold as much, to within a page, cost the same: the most bytes, the mean of the times."""
    kinds: dict[tuple[Any, ...], list[Costs]] = {}
    keys = []
    for cost in costs:
        numbers = [cost.num_bytes, *(num_bytes for num_bytes, _ in cost.parts.values())]
        keys.append((*cost.parts, *(round(number / _PAGE) for number in numbers)))
        kinds.setdefault(keys[-1], []).append(cost)
    means = {key: _mean(alike) for key, alike in kinds.items()}
    return [means[key] for key in keys]


def _mean(alike: Sequence[Costs]) -> Costs:
    parts = {}
    for part in alike[0].parts:
        found = [cost.parts[part] for cost in alike]
        parts[part] = (max(n for n, _ in found), math.fsum(s for _, s in found) / len(found))
    seconds = math.fsum(cost.seconds for cost in alike) / len(alike)
    twice, moved = (
        {part: max(each.get(part, 0) for each in of_all) for part in of_all[0]}
        for of_all in ([cost.twice for cost in alike], [cost.moved for cost in alike])
    )
    return Costs(max(cost.num_bytes for cost in alike), seconds, parts, twice, moved)


def options_of(
    name: str, costs: Costs, copy_rate: float = 0.0, not_swapped: frozenset[str] = frozenset()
) -> Layer:
    """What a layer may do: keep all, compute any of its parts again, or all of itself, or swap.

    Args:
        copy_rate: bytes per second of the link to the host, the slower way; 0: nothing is swapped.
        not_swapped: parts that are not computed again where the layer is swapped.
    """
    options = [Choice(KEEP, 0, 0.0)]
    parts = {part: cost for part, cost in costs.parts.items() if cost[0] > 0}
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(parts, count) for count in range(len(parts) + 1)
    ):
        freed = sum(parts[part][0] for part in chosen)
        seconds = sum(parts[part][1] for part in chosen)
        label, again = "recompute " + " + ".join(chosen), frozenset(chosen)
        twice = sum(costs.twice.get(part, 0) for part in chosen)
        if chosen:
            options.append(Choice(label, freed, seconds, workspace=freed + twice, parts=again))
        moved = sum(n for part, n in costs.moved.items() if part not in again)
        if moved and copy_rate and not again & not_swapped:
            saved, swap = freed + moved, "swap, " + label if chosen else "swap"
            link = moved / copy_rate
            options.append(Choice(swap, saved, seconds, link, saved + twice, again, swapped=True))
    if costs.num_bytes > 0:
        whole = costs.num_bytes
        options.append(Choice(WHOLE, whole, costs.seconds, workspace=whole, whole=True))
    return Layer(name, costs.seconds, tuple(options))
