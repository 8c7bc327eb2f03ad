"""Functions that are others for a while, also where a module keeps one by a name of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

__all__ = ["replaced"]


@contextmanager
def replaced(others: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Wherever a module has a function of `others`, under whatever name, it has the other one within."""
    holders = [
        (module, name, value)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if type(value) is FunctionType and value in others
    ]
    with ExitStack() as stack:
        for module, name, value in holders:
            stack.enter_context(mock.patch.object(module, name, others[value]))
        yield
