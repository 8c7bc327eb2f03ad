"""What the tests of one rank share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import accel
from accel.testing.distributed import under_torchrun

pytest.register_assert_rewrite("tests.distributed.against_stock")


@pytest.fixture
def gloo_group() -> Iterator[None]:
    """The default group, with gloo as the only path until somebody calls `enable()`."""
    if not under_torchrun():
        yield
        return
    from accel.session import SESSION

    SESSION.attach()
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
    accel.disable()
