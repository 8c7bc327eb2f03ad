"""A function of Megatron's that sees other names, or imports from elsewhere, than its module does."""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable
from typing import Any


def told(
    function: Callable[..., Any], find: Callable[..., Any], **names: object
) -> Callable[..., Any]:
    """The same code, which sees `names` beside what its module holds now, and imports by `find` as its
    ``__import__``."""
    code = inspect.unwrap(function)
    assert isinstance(code, types.FunctionType)
    found = {**vars(builtins), "__import__": find}
    copy = types.FunctionType(
        code.__code__,
        {**code.__globals__, **names, "__builtins__": found},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    copy.__kwdefaults__ = code.__kwdefaults__
    return copy
