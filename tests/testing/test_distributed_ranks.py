"""The plugin for tests of several ranks: a rank that is done early is no other's failure."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from accel.testing.distributed import under_torchrun


@pytest.fixture
def group() -> Iterator[None]:
    if under_torchrun():
        dist.init_process_group("gloo")
    yield
    if under_torchrun():
        dist.destroy_process_group()


@pytest.mark.distributed(world_size=2)
def test_a_rank_that_is_done_waits_for_one_that_still_makes_a_group(group: None) -> None:
    if dist.get_rank() == 1:
        time.sleep(1)  # rank 0 holds the store: were it gone, the group could not be made
    dist.new_group([1])
