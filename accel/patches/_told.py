"""A function of Megatron's that sees other names, and imports other modules, than are there."""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from accel.patching import written_in


def told(
    function: Callable[..., Any], modules: Mapping[str, Any], **names: object
) -> Callable[..., Any]:
    """The same code, which sees `names` beside what its module holds now, and finds `modules`, dotted name ->
    module, when it says ``from <name> import``.

    Wrappers around the function are left out: in ``FEATURES`` a feature that uses this comes before others
    that wrap the same function. One of accel's own that would be left out is an error.
    """

    def find(name: str, *rest: Any) -> Any:
        return modules[name] if name in modules else builtins.__import__(name, *rest)

    code = inspect.unwrap(function, stop=_refuse_ours)
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


def _refuse_ours(function: Any) -> bool:
    """For ``inspect.unwrap``, which asks at each wrapper whether to stop."""
    owner = written_in(function) or ""
    if hasattr(function, "__wrapped__") and owner.startswith("accel."):
        raise RuntimeError(
            f"the wrapper of {owner} around {function.__qualname__} would be left out: list it later"
        )
    return False
