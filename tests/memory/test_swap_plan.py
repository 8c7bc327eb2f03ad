"""Which groups are swapped: none whose copy the kernels would wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.memory.lanes import HostLanes
from accel.memory.swap import Swap
from accel.memory.swap_plan import FIRST_TIMED, History, what_hides


@given(data=st.data())
def test_kernels_never_wait(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=12))
    times = st.floats(0, 10, allow_nan=False)
    seconds = data.draw(st.lists(times, min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    rate = data.draw(st.floats(0.1, 100))
    depth = data.draw(st.integers(1, 3))
    chosen = what_hides(sizes, seconds, rate, depth)
    free = 0.0
    for number, (size, goes) in enumerate(zip(sizes, chosen, strict=True)):
        saved_at = sum(seconds[:number])
        waited_for = sum(seconds[: number + depth])
        end = max(free, saved_at) + size / rate
        if goes:
            assert number < len(sizes) - depth
            assert end <= waited_for * (1 + 1e-9) + 1e-9
            free = end
        elif size and number < len(sizes) - depth:
            assert end >= waited_for * (1 - 1e-9) - 1e-9  # what hides goes


def test_a_slow_link_takes_every_second_layer() -> None:
    assert what_hides([10] * 6, [1.0] * 5, rate=10) == [True] * 5 + [False]
    # a copy takes as long as 1.5 layers: with two layers' time, the next must wait for the link
    chosen = what_hides([15] * 7, [1.0] * 6, rate=10, depth=2)
    assert chosen == [True, True, False, True, True, False, False]
    assert what_hides([15] * 4, [1.0] * 3, rate=10) == [False] * 4
    assert what_hides([10, 10], [1.0], rate=0) == [False, False]


def chains(history: History, count: int, groups: int = 4) -> list[list[int]]:
    """For each chain, which of its groups were copied."""
    found = []
    for _ in range(count):
        x = torch.randn(64, 64).requires_grad_()
        chain, y = history.chain(), x * 1
        copied = []
        for number in range(groups):
            before = len(chain._known)
            with chain.group():
                y = (y * 2).exp().sigmoid()
            if len(chain._known) > before:
                copied.append(number)
        history.close(chain)
        found.append(copied)
        y.sum().backward()
    return found


def test_all_but_the_last_until_it_is_measured() -> None:
    swap = Swap(torch.device("cpu"), HostLanes(), min_bytes=1)
    history = History(swap, 1, rate=lambda: 1e30)
    assert chains(history, FIRST_TIMED + 1) == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert history.plan == [True, True, True, False]
    nothing = History(swap, 1, rate=lambda: 1e-30)
    assert chains(nothing, FIRST_TIMED + 3)[FIRST_TIMED + 1 :] == [[], []]
    everything = History(swap, 2, rate=None)
    assert chains(everything, 4) == [[0, 1, 2, 3], [0, 1], [0, 1], [0, 1]]
    assert everything.plan is None


def test_an_evaluation_teaches_nothing() -> None:
    history = History(Swap(torch.device("cpu"), HostLanes(), min_bytes=1), 1, rate=None)
    chains(history, 1)
    sizes = history.sizes
    with torch.no_grad():
        chain = history.chain()
        with chain.group():
            torch.ones(64).exp()
        assert not history.close(chain)
    assert history.sizes == sizes
    assert chains(history, 1, groups=6) == [[0, 1, 2]]  # of a longer chain, what was known


@pytest.mark.parametrize("depth", [1, 3])
def test_the_clock_sees_kernels_and_no_waits(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group's end, and when the kernels have waited for copies, are read one after the other."""
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    chain = Swap(torch.device("cpu"), HostLanes(), min_bytes=1).chain(depth=depth, timed=True)
    for _ in range(4):
        with chain.group():
            pass
    chain.close()
    assert chain.seconds == [1.0, 1.0, 1.0]
