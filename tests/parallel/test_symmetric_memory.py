"""Which groups have symmetric memory. Its products: `tests/distributed/test_parallel_linear.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from accel.parallel.symmetric_memory import reason_of


@pytest.mark.parametrize(
    ("hosts", "devices", "all_read", "expected"),
    [
        ([7, 7], [0, 1], True, None),
        ([7, 7, 7], [2, 0, 1], True, None),
        ([7, 8], [0, 1], True, "several hosts"),
        ([7, 7], [0, 0], True, "CUDA_VISIBLE_DEVICES"),
        ([7, 7], [0, 1], False, "do not all read"),
    ],
)
def test_a_group_of_gpus_has_symmetric_memory_where_all_read_each_others(
    hosts: Sequence[int], devices: Sequence[int], all_read: bool, expected: str | None
) -> None:
    reason = reason_of(hosts, devices, all_read)
    assert (reason is None) if expected is None else (expected in str(reason))
