"""The host's share of an optimizer step, against every share."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.memory import host_split
from accel.memory.host_split import Element, Rates, best_ratio, measure_rates, seconds
from accel.memory.pinned import PinnedMemory

speeds = st.floats(min_value=1e8, max_value=1e12)
rates = st.builds(
    Rates,
    to_device=speeds,
    to_host=speeds,
    device_step=speeds,
    host_step=speeds,
    at_once=st.booleans(),
)
elements = st.sampled_from(
    [
        Element(states=12, grad=4, weight=2, weight_is_state=False),
        Element(states=10, grad=4, weight=2, weight_is_state=True),
        Element(states=8, grad=2, weight=4, weight_is_state=True),
    ]
)


@given(rates, elements)
def test_no_other_share_is_faster(rates: Rates, element: Element) -> None:
    best = seconds(best_ratio(rates, element), rates, element)
    assert all(best <= seconds(i / 200, rates, element) * (1 + 1e-9) for i in range(201))


def test_shares_at_the_ends() -> None:
    element = Element(states=12, grad=4, weight=2, weight_is_state=False)
    gpu = {"to_device": 50e9, "to_host": 50e9, "device_step": 1e11, "at_once": True}
    assert best_ratio(Rates(**gpu, host_step=1.0), element) < 1e-6
    # 12 (1 - r) + 4 r bytes to the host at 50e9 a second, and r elements at 1e9
    ratio = best_ratio(Rates(**gpu, host_step=1e9), element)
    assert math.isclose((12 - 8 * ratio) / 50e9, ratio / 1e9)
    assert math.isclose(ratio, 12 / 58)
    cpu = Rates(to_device=1e10, to_host=1e10, device_step=1e9, host_step=1e9, at_once=False)
    assert best_ratio(cpu, element) == 1


def test_rates_of_this_machine() -> None:
    found = measure_rates(torch.device("cpu"))
    assert not found.at_once
    for name in ("to_device", "to_host", "device_step", "host_step"):
        assert 1e6 < getattr(found, name) < 1e13
    element = Element(states=12, grad=4, weight=2, weight_is_state=False)
    assert best_ratio(found, element) == 1  # there the host's share is not copied


def test_copies_are_timed_while_their_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: weakref.WeakSet[PinnedMemory] = weakref.WeakSet()
    found = []

    class Recorded(PinnedMemory):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            pinned.add(self)

    def median(*args: object, **options: object) -> float:
        found.append(len(pinned))
        return 1.0

    monkeypatch.setattr(host_split, "PinnedMemory", Recorded)
    monkeypatch.setattr(host_split, "_median", median)
    host_split.measure_copies(torch.device("cpu"))
    assert found == [1, 1]
