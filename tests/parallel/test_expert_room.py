"""Rows that do not fit a rank's memory are one error, the same on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from accel.device.cpu import memory as host_memory
from accel.parallel.experts.plan import Copy
from accel.parallel.experts.room import Sizes, check_room, fits
from accel.parallel.experts.traffic import Traffic
from accel.parallel.free_memory import free_bytes

COUNTS = [[5, 1, 2, 2], [9, 0, 1, 0]]
ROWS = Sizes(own=0, computed=1, in_place=1, matrices=0, gradients=0)


def check(free: list[int], factor: float | None = None, counts: Any = COUNTS) -> None:
    check_room(Traffic(counts, 0), free, ROWS, frozenset(), 3, factor)


def test_rows_that_fit_pass() -> None:
    check([15, 5])


def test_rows_that_do_not_fit_are_an_error() -> None:
    says = r"MoE layer 3: 15 tokens go to the experts of rank 0 .* 14 of them to expert 0, .* room for 14"
    with pytest.raises(MemoryError, match=says):
        check([14, 5])
    with pytest.raises(
        MemoryError, match=r"rank 1 .*, 3 of them to expert 2, .*factor bounds them"
    ):
        check([15, 4])
    with pytest.raises(
        MemoryError, match=r"room for 0: a .*-capacity-factor below 1\.5 takes fewer"
    ):
        check([-7, 5], 1.5)


@pytest.mark.parametrize(
    ("copies", "sizes", "least"),
    [
        ([], Sizes(3, 10, 10, 1000, 100), [30 + 150, 30 + 50]),
        ([Copy(0, 1)], Sizes(3, 10, 10, 1000, 100), [30 + 60 + 100, 30 + 140 + 1100]),
        ([Copy(1, 1)], Sizes(3, 10, 10, 1000, 100), [30 + 150, 30 + 50 + 1000]),  # without rows
        ([Copy(0, 1)], Sizes(3, 10, 10, 1000, 0), [30 + 60, 30 + 140 + 1000]),
        # of the last slice, and of copies: where they lie
        ([], Sizes(3, 10, 4, 1000, 100), [30 + 140 + 4, 30 + 50]),
        ([Copy(0, 1)], Sizes(3, 10, 4, 1000, 100), [30 + 50 + 4 + 100, 30 + 50 + 36 + 1100]),
    ],
)
def test_what_rows_and_copies_take(copies: list[Copy], sizes: Sizes, least: list[int]) -> None:
    traffic = Traffic(COUNTS, 0, frozenset(copies))
    assert fits(traffic, least, sizes)
    assert not fits(traffic, [least[0] - 1, least[1]], sizes)
    assert not fits(traffic, [least[0], least[1] - 1], sizes)


def test_matrices_that_are_there_already_are_not_counted_again() -> None:
    copies = frozenset([Copy(0, 1)])
    sizes = Sizes(0, 1, 1, 1000, 0)
    assert fits(Traffic(COUNTS, 0, copies), [6, 14], sizes, held=copies)
    assert not fits(Traffic(COUNTS, 0, copies), [6, 13], sizes, held=copies)
    assert fits(Traffic(COUNTS, 0), [15, 5 - 1000], sizes, held=copies), "they are let go"


def test_free_memory_of_the_host() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < psutil.virtual_memory().total


def test_free_memory_of_the_host_below_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_limit", lambda: 1000)
    monkeypatch.setattr(host_memory, "memory_allocated", lambda: 400)
    assert free_bytes(torch.device("cpu")) == 600
    monkeypatch.setattr(host_memory, "memory_allocated", lambda: 1400)
    assert free_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize(("fraction", "free"), [(1.0, 350), (0.5, 250), (0.2, 50)], ids=str)
def test_free_memory_of_a_device(
    fraction: float, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 in all, of which 300 are free; 300 are this process's, 50 of them kept."""
    module = SimpleNamespace(
        memory_reserved=lambda device: 300,
        memory_allocated=lambda device: 250,
        mem_get_info=lambda device: (300, 1000),
        get_per_process_memory_fraction=lambda device: fraction,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert free_bytes(torch.device("cuda", 0)) == free
