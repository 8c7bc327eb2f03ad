"""The collectives of a training step: alone, each at once, or none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._ranks import Call
from benchmarks.lab.replaced import replaced

__all__ = ["asked_by", "at_once", "collectives_as", "here"]

How = Callable[[Callable[..., Any], Mapping[str, Any]], object]
"""Of a function of `torch.distributed` and its arguments."""
_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class _Done:
    def wait(self) -> bool:
        return True


@contextmanager
def collectives_as(how: How) -> Iterator[Callable[[Call], Call]]:
    """Gives what makes a call in which each collective is `how`, and is done where it is asked for."""
    active = False

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal active
            if not active:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            active = False  # a limited one asks for others
            how(original, bound.arguments)
            active = True
            return _Done() if bound.arguments["async_op"] else None

        return collective

    def within(call: Call) -> Call:
        def called() -> None:
            nonlocal active
            active = True
            try:
                call()
            finally:
                active = False

        return called

    functions = [getattr(dist, name) for name in _NAMES]
    with replaced({original: made(original) for original in functions}):
        yield within


def at_once(original: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """None goes on while something is computed."""
    original(**{**given, "async_op": False})


def here(original: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Nothing travels; what would come is this rank's own."""
    if "output_tensor" in given:
        mine = given["input_tensor"]
        given["output_tensor"].view(-1, *mine.shape).copy_(mine)
    elif "output" in given:
        given["output"].copy_(given["input"][: given["output"].shape[0]])


def asked_by(call: Call) -> Call:
    """The collectives that the call asks for, of zeros, one after the other."""
    asked: list[tuple[Callable[..., Any], dict[str, Any]]] = []

    def noted(original: Callable[..., Any], given: Mapping[str, Any]) -> None:
        asked.append(
            (
                original,
                {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in given.items()},
            )
        )
        at_once(original, given)

    with collectives_as(noted) as within:
        within(call)()

    def alone() -> None:
        for original, given in asked:
            at_once(original, given)

    return alone
