"""Values of settings that several features take, and what they come from."""

from __future__ import annotations

from typing import Any

__all__ = ["needs_flags", "whole_number"]


def needs_flags(args: Any, flag: str, instead: str) -> None:
    """Before Megatron validates: raises ValueError where it takes its configuration from a file, in which it
    is nested, and a flag would change other flags in vain; `instead` says what to write into the file."""
    if hasattr(args, "model_parallel"):
        raise ValueError(f"{flag} changes other flags, in whose place --yaml-cfg is: {instead}")


def whole_number(given: Any, of: str, *, least: int = 1) -> int:
    """Raises ValueError for anything but a whole number of at least `least`; `of` says what it counts."""
    try:
        number = int(str(given))
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{given!r} is no number of {of}: give {least} or more")
    return number
