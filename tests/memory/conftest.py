"""What tests of memory share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel.device.cpu import memory


@pytest.fixture
def counted() -> Iterator[None]:
    """The device's memory is counted, as on the CPU device runtime."""
    memory.install()
    yield
    memory.uninstall()
