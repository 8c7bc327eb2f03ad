"""Rows that do not fit a rank's memory are one error, the same on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from accel.device.cpu import memory as host_memory
from accel.parallel.experts.room import check_room, free_bytes

COUNTS = [[5, 1, 2, 2], [9, 0, 1, 0]]


def test_rows_that_fit_pass() -> None:
    check_room(COUNTS, [15, 5], 3)


def test_rows_that_do_not_fit_are_an_error() -> None:
    says = r"MoE layer 3: 15 tokens go to the experts of rank 0 .* 14 of them to expert 0, .* room for 14"
    with pytest.raises(MemoryError, match=says):
        check_room(COUNTS, [14, 5], 3)
    with pytest.raises(MemoryError, match=r"rank 1 .*, 3 of them to expert 2, .*capacity-factor"):
        check_room(COUNTS, [15, 4], 3)


def test_free_memory_of_the_host() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < psutil.virtual_memory().total


def test_free_memory_of_the_host_below_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_limit", lambda: 1000)
    monkeypatch.setattr(host_memory, "memory_allocated", lambda: 400)
    assert free_bytes(torch.device("cpu")) == 600
    monkeypatch.setattr(host_memory, "memory_allocated", lambda: 1400)
    assert free_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("fraction", "free"), [(None, 350), (1.0, 350), (0.5, 250), (0.2, 50)], ids=str
)
def test_free_memory_of_a_device(
    fraction: float | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 in all, of which 300 are free; 300 are this process's, 50 of them kept."""
    module = SimpleNamespace(
        memory_reserved=lambda device: 300,
        memory_allocated=lambda device: 250,
        mem_get_info=lambda device: (300, 1000),
    )
    if fraction is not None:
        module.get_per_process_memory_fraction = lambda device: fraction
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert free_bytes(torch.device("cuda", 0)) == free
