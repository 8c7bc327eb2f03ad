"""What one layer's activations take, and what it takes to compute parts of them again.

A part is what lies between two calls of modules inside a layer: what is allocated between them and held is
what recomputing the part would free, and the time between them is what that costs. Both are read while the
layer runs once, with its gradients recorded.
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

from accel.device.cpu import memory
from accel.memory.planner import Layer, Option

__all__ = ["KEEP", "WHOLE", "Costs", "Span", "evened", "measure", "options_of", "parts_of"]

_PAGE = 4096
KEEP, WHOLE = "keep", "recompute layer"


@dataclass(frozen=True)
class Span:
    """A part of a layer, from a hook of one module to a hook of another."""

    part: str
    begin: Callable[[Callable[[int], None]], Any]
    """Registers a function to be called where the part begins; returns the handle that removes it."""
    end: Callable[[Callable[[int], None]], Any]
    """The same where it ends; the function is told how many of the bytes are kept all the same."""


@dataclass
class Costs:
    """Of one layer and one micro-batch."""

    num_bytes: int = 0
    """Of everything that is held between forward and backward, but for input and output."""
    seconds: float = 0.0
    """Of the forward pass."""
    parts: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Part -> bytes and seconds."""


@contextlib.contextmanager
def measure(device: torch.device, spans: Sequence[Span]) -> Iterator[Costs]:
    """Fill in what one call of a layer costs; the host waits for the device at each span.

    The caller subtracts the bytes of the output, which it alone knows.
    """

    def now() -> tuple[int, float]:
        if device.type == "cpu":
            return memory.memory_allocated(), time.perf_counter()
        module = torch.get_device_module(device)
        module.synchronize()
        return module.memory_allocated(), time.perf_counter()

    costs = Costs()
    handles = []
    begun: dict[Span, tuple[int, float]] = {}

    def begins(span: Span, kept: int) -> None:
        begun[span] = now()

    def ends(span: Span, kept: int) -> None:
        after, moment = now()
        before, then = begun.pop(span)
        num_bytes, seconds = costs.parts.get(span.part, (0, 0.0))
        costs.parts[span.part] = (num_bytes + after - before - kept, seconds + moment - then)

    for span in spans:
        handles.append(span.begin(functools.partial(begins, span)))
        handles.append(span.end(functools.partial(ends, span)))
    before, began = now()
    try:
        yield costs
        after, ended = now()
        costs.num_bytes, costs.seconds = after - before, ended - began
    finally:
        for handle in handles:
            handle.remove()


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
    return Costs(max(cost.num_bytes for cost in alike), seconds, parts)


def options_of(name: str, costs: Costs) -> Layer:
    """What a layer may do: keep all, compute any of its parts again, or all of itself."""
    options = [Option(KEEP, 0, 0.0)]
    parts = {part: cost for part, cost in costs.parts.items() if cost[0] > 0}
    for count in range(1, len(parts) + 1):
        for chosen in itertools.combinations(parts, count):
            saved = sum(parts[part][0] for part in chosen)
            seconds = sum(parts[part][1] for part in chosen)
            label = "recompute " + " + ".join(chosen)
            options.append(Option(label, saved, seconds, workspace=saved))
    if costs.num_bytes > 0:
        whole = costs.num_bytes
        options.append(Option(WHOLE, whole, costs.seconds, workspace=whole))
    return Layer(name, costs.seconds, tuple(options))


def parts_of(choice: str) -> frozenset[str]:
    """The parts that an option computes again; none of a layer that is kept, or computed as a whole."""
    if choice in (KEEP, WHOLE):
        return frozenset()
    return frozenset(choice.removeprefix("recompute ").split(" + "))
