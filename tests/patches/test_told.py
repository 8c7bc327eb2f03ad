"""`told`: other names for a function of Megatron's, and whose wrappers it may leave out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from accel.patches._told import told
from accel.patches.optimizer_without_lr import with_some_rate

NAME = "the module's"


def function(*args: Any) -> str:
    return NAME


def decorated(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def wrapper(*args: Any) -> Any:
        return inner(*args)

    return wrapper


def test_it_sees_other_names_past_the_wrappers_of_others() -> None:
    assert told(function, {}, NAME="another")() == "another"
    assert told(decorated(function), {}, NAME="another")() == "another"
    assert function() == NAME


def test_a_wrapper_of_accels_is_not_left_out() -> None:
    with pytest.raises(
        RuntimeError, match="optimizer_without_lr around function would be left out"
    ):
        told(with_some_rate(function), {})
