"""Values of settings that several features take, and what they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from accel.feature import Context
from accel.upstream import flag_of

__all__ = [
    "divisors",
    "first_given",
    "idle_without",
    "needs_flags",
    "no_experts",
    "not_negative",
    "one_expert_rank",
    "whole_number",
]


def idle_without(*names: str) -> Callable[[Context], str | None]:
    """A feature's ``idle``: it serves the command lines that give all of Megatron's flags of these `names`
    (``"fp16"`` is ``--fp16``), and configurations without a command line."""

    def idle(context: Context) -> str | None:
        missing = [name for name in names if not getattr(context.args, name, None)]
        if context.args is None or not missing:
            return None
        return f"{flag_of(missing[0])} is not given"

    return idle


def first_given(options: Iterable[str], *owners: Any) -> str | None:
    """The first of Megatron's options that arguments or configurations have on; "none" is off."""
    off = (None, False, "none")
    return next((o for o in options if any(getattr(x, o, None) not in off for x in owners)), None)


def no_experts(context: Context) -> str | None:
    """For ``Feature.idle``."""
    return None if getattr(context.args, "num_experts", True) else "there are no experts"


def one_expert_rank(context: Context) -> str | None:
    """For ``Feature.idle``: that experts are sent nowhere."""
    ranks = getattr(context.args, "expert_model_parallel_size", None)
    return "there is one expert-parallel rank" if ranks == 1 else None


def needs_flags(args: Any, flag: str, instead: str) -> None:
    """Before Megatron validates: raises ValueError where it takes its configuration from a file, in which it
    is nested, and a flag would change other flags in vain; `instead` says what to write into the file."""
    if getattr(args, "yaml_cfg", None) or hasattr(args, "model_parallel"):
        raise ValueError(f"{flag} changes other flags, in whose place --yaml-cfg is: {instead}")


def divisors(number: int) -> str:
    """For an error that names what fits."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def whole_number(given: Any, of: str, *, least: int = 1) -> int:
    """Raises ValueError for anything but a whole number of at least `least`; `of` says what it counts."""
    try:
        number = int(str(given))
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{given!r} is no number of {of}: give {least} or more")
    return number


def not_negative(given: Any, what: str) -> float:
    """Raises ValueError for anything but a finite number of at least 0; `what` says which it is."""
    try:
        number = float(str(given))
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"{given!r} is no {what}: give 0 or more")
    return number
