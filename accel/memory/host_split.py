"""Which share of an optimizer step the host does, when its states are on the host.

    r           share of the elements that the host steps; 1 - r go to the device and come back
    S, G, W     bytes of one element: states, gradient, weight
    to device   (1 - r) S + r W         to host   (1 - r) S + r G (+ r W where the host needs the weight)
    device      (1 - r) kernel          host      r kernel

On a GPU the four go on at the same time, and a step takes as long as the longest of them. On the CPU the same
cores do all, one after the other, and nothing need be copied for the host's share.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from accel.device.streams import finish_current_stream
from accel.memory.pinned import PinnedMemory
from accel.ops import adamw

__all__ = ["Element", "Rates", "best_ratio", "measure_copies", "measure_rates", "seconds"]

_NUMEL = 1 << 22
"""Elements of a measurement: 16 MiB each way, 0.3 ms on PCIe 5 and longer than any start-up of a copy."""
_HOST_NUMEL = 1 << 25
"""Elements of the host's step beside a GPU: 512 MiB, more than caches hold."""
_ROUNDS = 5
_WARM_UP = 10
"""Copies each way, before any is timed: a bus that was idle had 15 GB/s at first, of 53."""


@dataclass(frozen=True)
class Rates:
    """How fast this machine is; bytes or elements per second."""

    to_device: float
    """Bytes, from pinned memory."""
    to_host: float
    """Bytes, to pinned memory."""
    device_step: float
    """Elements stepped by the device."""
    host_step: float
    """Elements stepped by the host."""
    at_once: bool
    """Whether the four go on at the same time."""


@dataclass(frozen=True)
class Element:
    """Bytes of one element of a parameter."""

    states: int
    """What is kept on the host."""
    grad: int
    weight: int
    weight_is_state: bool
    """Whether a step reads the weight: it is the master, or a part of it."""


def seconds(ratio: float, rates: Rates, element: Element) -> float:
    """Seconds of one element's step, when the host does `ratio` of all."""
    there, here = 1 - ratio, ratio
    device, host = there / rates.device_step, here / rates.host_step
    down, up = there * element.states, there * element.states
    if rates.at_once:
        up += here * element.weight
        down += here * (element.grad + element.weight * element.weight_is_state)
        return max(up / rates.to_device, down / rates.to_host, device, host)
    return up / rates.to_device + down / rates.to_host + device + host


def best_ratio(rates: Rates, element: Element) -> float:
    """The share for the host with which a step takes the shortest; of several the smallest."""
    # each of the four times is linear in the ratio: the least of their maximum is at an end or a crossing
    found = {0.0, 1.0}
    if rates.at_once:
        lines = [
            (at(0.0), at(1.0) - at(0.0)) for at in _parts(rates, element)
        ]  # value at 0, and slope
        for (a, slope_a), (b, slope_b) in itertools.combinations(lines, 2):
            if slope_a != slope_b and 0 <= (crossing := (b - a) / (slope_a - slope_b)) <= 1:
                found.add(crossing)
    return min(sorted(found), key=lambda ratio: seconds(ratio, rates, element))


def _parts(rates: Rates, element: Element) -> list[Callable[[float], float]]:
    """The four times by themselves."""

    def alone(name: str) -> Callable[[float], float]:
        others = {f.name: float("inf") for f in fields(Rates) if f.name not in (name, "at_once")}
        only = Rates(**{**others, name: getattr(rates, name)}, at_once=True)
        return lambda ratio: seconds(ratio, only, element)

    return [alone(f.name) for f in fields(Rates) if f.name != "at_once"]


def measure_rates(device: torch.device) -> Rates:
    """Time copies and steps of 4 Mi elements: some tens of milliseconds, and 80 MiB of the device.

    Beside a GPU the host's step is one of 512 MiB, while the bus is busy in both directions as it will be,
    which takes some tenths of a second. (Beside an H200 8 threads stepped 8.9 G elements a second of 64 MiB
    by themselves, and 1.7 in an optimizer's step.)
    """
    memory = PinnedMemory(device)
    host = [memory.empty(_NUMEL, torch.float32).zero_() for _ in range(4)]
    there = [tensor.to(device, copy=True) for tensor in host]
    to_device, to_host = _copies(host[0], there[0])
    device_step = _NUMEL / _median(lambda: _step(there), device)
    at_once = device.type != "cpu"
    if at_once:
        host_step = _HOST_NUMEL / _step_beside_copies(host, there, to_device)
    else:
        host_step = _NUMEL / _median(lambda: _step(host), device)
    return Rates(to_device, to_host, device_step, host_step, at_once)


def _step(tensors: Sequence[torch.Tensor]) -> None:
    *states, grad = tensors
    rows = [[states[0]], [grad], [states[1]], [states[2]], [torch.tensor(0.0)]]
    adamw(*rows, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def _step_beside_copies(
    host: Sequence[torch.Tensor], there: Sequence[torch.Tensor], bytes_per_second: float
) -> float:
    """Seconds of the host's step of `_HOST_NUMEL` elements, from when copies go both ways until after it."""
    large = [torch.zeros(_HOST_NUMEL) for _ in range(4)]
    took = 0.0
    for _ in range(3):  # each beside as many copies as would have lasted for the one before
        copies = functools.partial(_copy_both, host, there, 1.5 * took * bytes_per_second)
        took = _median(lambda: _step(large), there[0].device, beside=copies)
    return took


def _copy_both(
    host: Sequence[torch.Tensor], there: Sequence[torch.Tensor], num_bytes: float
) -> None:
    """Ask for copies of so many bytes in each direction, and do not wait for them."""
    module = torch.get_device_module(there[0].device)
    ways = [(there[0], host[0]), (host[1], there[1])]
    for to, source in ways:
        with module.stream(module.Stream()):
            for _ in range(math.ceil(num_bytes / to.nbytes)):
                to.copy_(source, non_blocking=True)


def measure_copies(device: torch.device) -> tuple[float, float]:
    """Bytes per second to the device and to the host, from and to pinned memory: some milliseconds."""
    memory = PinnedMemory(
        device
    )  # must outlive the copies, or they are of memory that is not pinned
    host = memory.empty(_NUMEL, torch.float32).zero_()
    return _copies(host, host.to(device, copy=True))


def _copies(host: torch.Tensor, there: torch.Tensor) -> tuple[float, float]:
    for _ in range(_WARM_UP):
        there.copy_(host, non_blocking=True)
        host.copy_(there, non_blocking=True)
    to_device = _median(lambda: there.copy_(host, non_blocking=True), there.device)
    to_host = _median(lambda: host.copy_(there, non_blocking=True), there.device)
    return host.nbytes / to_device, host.nbytes / to_host


def _median(
    work: Callable[[], object],
    device: torch.device,
    beside: Callable[[], None] | None = None,
) -> float:
    """Seconds of one call and of what it asks the device for; or of the call alone, beside what else that has
    to do."""
    wait = functools.partial(finish_current_stream, device)
    if beside is not None:  # in streams of its own
        wait = torch.get_device_module(device).synchronize
    times = []
    with torch.no_grad():
        for _ in range(_ROUNDS):
            wait()
            if beside is not None:
                beside()
            start = time.perf_counter()
            work()
            if beside is None:
                wait()
            times.append(time.perf_counter() - start)
        wait()
    return sorted(times)[len(times) // 2]
