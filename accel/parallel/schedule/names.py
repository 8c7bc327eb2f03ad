"""Schedules that are asked for by name, or by a file: `Schedule.to_dict` as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel.parallel.schedule.actions import Kind, Placement, Schedule
from accel.parallel.schedule.generators import (
    dualpipe_v,
    forward_only,
    interleaved,
    one_f_one_b,
)
from accel.parallel.schedule.zero_bubble import v_half, v_min, zb_h1, zb_v

__all__ = [
    "INTERLEAVED",
    "NAMED",
    "Named",
    "has_parts",
    "is_file",
    "is_v",
    "named",
    "named_forward_only",
    "read",
]

INTERLEAVED = "interleaved"
"""Megatron's; with one chunk of a rank it is 1F1B."""


@dataclass(frozen=True)
class Named:
    """A schedule of its own, beside Megatron's."""

    chunks: int
    placement: Placement
    make: Callable[[int, int], Schedule]
    """Of the ranks and the micro-batches."""


NAMED = {
    "zb-h1": Named(1, Placement.LOOP, zb_h1),
    "zb-v": Named(2, Placement.V, zb_v),
    "v-half": Named(2, Placement.V, v_half),
    "v-min": Named(2, Placement.V, v_min),
    "dualpipev": Named(2, Placement.V, dualpipe_v),
}
"""With parts of backward passes, all of them."""


def named(
    name: str, p: int, v: int, m: int, group_size: int | None = None, extra_warmup: int = 0
) -> Schedule:
    """The schedule of that name: computation only, but for one in a file, which may have its transfers.

    Args:
        name: one of `NAMED`, `INTERLEAVED`, or a file.
        p, v, m: ranks, chunks of each, micro-batches.
        group_size, extra_warmup: of `interleaved`.

    Raises:
        ValueError: no such name, or counts that do not fit; the message says which do.
    """
    if is_file(name):
        made = read(Path(name))
        there = made.num_ranks, made.num_chunks, made.num_micro_batches
        if there != (p, v, m) or extra_warmup:
            raise ValueError(
                f"{name} is of p = {there[0]}, v = {there[1]}, m = {there[2]} and its own warm-up; "
                f"p = {p}, v = {v}, m = {m}, extra_warmup = {extra_warmup}"
            )
        return made
    if name == INTERLEAVED:
        if v != 1:
            return interleaved(p, v, m, group_size, extra_warmup)
        if extra_warmup or group_size is not None:
            raise ValueError("more warm-up and groups are for 2 chunks of a rank or more")
        return one_f_one_b(p, m)
    if name not in NAMED:
        raise ValueError(
            f"{name!r} is no schedule: give {INTERLEAVED}, {', '.join(NAMED)} or a .json file"
        )
    if v != NAMED[name].chunks or group_size is not None or extra_warmup:
        raise ValueError(
            f"{name} has {NAMED[name].chunks} chunks of a rank, no groups and no more warm-up; "
            f"v = {v}, group_size = {group_size}, extra_warmup = {extra_warmup}"
        )
    return NAMED[name].make(p, m)


def named_forward_only(
    name: str, p: int, v: int, m: int, group_size: int | None = None
) -> Schedule:
    """The forwards of the schedule of that name, where m is any.

    Raises:
        ValueError: as `named`.
    """
    if is_v(name):
        return forward_only(p, v, m, placement=Placement.V)
    return forward_only(p, v, m, group_size)


def is_file(name: str) -> bool:
    return name.endswith(".json")


def is_v(name: str) -> bool:
    """Whether a rank's chunks lie in a V."""
    if is_file(name):
        return read(Path(name)).placement is Placement.V
    return name in NAMED and NAMED[name].placement is Placement.V


def has_parts(name: str) -> bool:
    """Whether backward passes are in two parts."""
    if not is_file(name):
        return name in NAMED
    ranks = read(Path(name)).ranks
    return any(action.kind is Kind.BACKWARD_INPUT for own in ranks for action in own)


def read(path: Path) -> Schedule:
    """Of what `Schedule.to_dict` makes, as JSON.

    Raises:
        ValueError: the file is no schedule; the message names what is wrong.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    return Schedule.from_dict(data)
