"""A function of Megatron's that sees other names, and imports other modules, than are there."""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any


def told(
    function: Callable[..., Any], modules: Mapping[str, Any], **names: object
) -> Callable[..., Any]:
    """The same code, which sees `names` beside what its module holds now, and finds `modules`, dotted name ->
    module, when it says ``from <name> import``.

    Wrappers around the function are left out: in ``FEATURES`` a feature that uses this comes before others
    that wrap the same function.
    """

    def find(name: str, *rest: Any) -> Any:
        return modules[name] if name in modules else builtins.__import__(name, *rest)

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
