"""Schedules that are asked for by name: how many chunks a rank has, and who makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from accel.parallel.schedule.actions import Placement, Schedule
from accel.parallel.schedule.generators import (
    dualpipe_v,
    forward_only,
    interleaved,
    one_f_one_b,
)
from accel.parallel.schedule.zero_bubble import v_half, v_min, zb_h1, zb_v

__all__ = ["INTERLEAVED", "NAMED", "Named", "named", "named_forward_only"]

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
    """Of computation only.

    Args:
        p, v, m: ranks, chunks of each, micro-batches.
        group_size, extra_warmup: of `interleaved`.

    Raises:
        ValueError: no such name, or counts that do not fit; the message says which do.
    """
    if name == INTERLEAVED:
        if v > 1:
            return interleaved(p, v, m, group_size, extra_warmup)
        if extra_warmup or group_size is not None:
            raise ValueError("more warm-up and groups are for 2 chunks of a rank or more")
        return one_f_one_b(p, m)
    if name not in NAMED:
        raise ValueError(f"{name!r} is no schedule: give {INTERLEAVED}, {', '.join(NAMED)}")
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
    if name in NAMED and NAMED[name].placement is Placement.V:
        return forward_only(p, v, m, placement=Placement.V)
    return forward_only(p, v, m, group_size)
