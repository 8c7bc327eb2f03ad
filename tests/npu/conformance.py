"""torch-npu's ops on CPU tensors: the wheel's schemas over references written from the documentation.

A wrong argument name, order or type fails at the schema; a dtype, layout, size or mask that the
documentation does not name raises `NotAccepted`, more strictly than the hardware might; a wrong
formula fails at the results. What this cannot show is what the hardware really does: docs/ascend.md.

References compute in fp32 and round where the documents, or CANN's own kernels, are known to.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.npu import schemas

__all__ = ["NotAccepted", "called", "define", "need", "reference"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

called: list[str] = []
"""The ops that were called, in order."""

_REFERENCES: dict[str, Callable[..., Any]] = {}


class NotAccepted(RuntimeError):
    """What the documentation of the op does not allow."""


def need(condition: bool, what: str) -> None:
    """Raise `NotAccepted` unless the condition holds."""
    if not condition:
        raise NotAccepted(what)


def reference(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function is what `torch.ops.npu.<name>` computes; its parameters are the schema's."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _REFERENCES[name] = function
        return function

    return add


@functools.cache
def define() -> torch.library.Library:
    """Define every op that has a reference, with the wheel's schema; for the life of the process."""
    from tests.npu import references  # noqa: F401  they add themselves

    library = torch.library.Library("npu", "DEF")
    for name, function in _REFERENCES.items():
        library.define(schemas.schema_of(name))
        library.impl(name, _recorded(name, function), "CPU")
    return library


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        called.append(name)
        try:
            return function(*args, **options)
        except NotAccepted as error:
            raise NotAccepted(f"torch.ops.npu.{name}: {error}") from None

    return call
