"""Values of settings that several features take."""

from __future__ import annotations

from typing import Any

__all__ = ["whole_number"]


def whole_number(given: Any, of: str, *, least: int = 1) -> int:
    """Raises ValueError for anything but a whole number of at least `least`; `of` says what it counts."""
    try:
        number = int(str(given))
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{given!r} is no number of {of}: give {least} or more")
    return number
