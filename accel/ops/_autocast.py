"""Autocast and code that has chosen its dtypes itself."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["autocasts", "without_autocast"]


def autocasts(x: Tensor) -> bool:
    """Whether products of x would be those of another dtype now."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` with autocast off on the device of its first tensor.

    A forward is run under the autocast of its caller, a backward under that of whoever calls `backward`.
    """

    @functools.wraps(body)
    def exact(*args: Any) -> Any:
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if first is None or not autocasts(first):
            return body(*args)
        with torch.autocast(first.device.type, enabled=False):
            return body(*args)

    return exact
