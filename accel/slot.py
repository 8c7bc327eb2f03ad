"""A place for what a module has while a feature is on.

Standard library only; knows neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Slot"]


class Slot[T]:
    """A place for at most one value: empty at first, and false while it is."""

    def __init__(self) -> None:
        self._value: T | None = None

    def __bool__(self) -> bool:
        return self._value is not None

    def set(self, value: T) -> Callable[[], None]:
        """Replace the value; returns what empties the slot."""
        self._value = value
        return self.clear

    def clear(self) -> None:
        self._value = None

    def get(self) -> T | None:
        return self._value

    @property
    def value(self) -> T:
        """Raises LookupError where the slot is empty."""
        if self._value is None:
            raise LookupError("no active feature fills this slot")
        return self._value
