"""What `make test` leaves to `make test-all`: trainings of layouts that are much like others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["cases"]


def cases(every: Iterable[str], always: str) -> list[Any]:
    """Arguments of `parametrize`, all of them; those that `always` does not name are ``thorough``.

    Args:
        always: names, separated by spaces.
    """
    quick, every = set(always.split()), list(every)
    assert quick <= set(every), f"no such cases: {quick - set(every)}"
    return [e if e in quick else pytest.param(e, marks=pytest.mark.thorough) for e in every]
