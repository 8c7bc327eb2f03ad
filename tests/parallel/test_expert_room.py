"""Rows that do not fit a rank's memory are one error, the same on every rank."""

from __future__ import annotations

import psutil
import pytest
import torch

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
