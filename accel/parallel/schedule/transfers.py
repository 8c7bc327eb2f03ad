"""Sends and receives for a schedule of computation.

    send       where its value is made
    receive    where its value is taken, or earlier: what a sends to b is received in the order of the sends

Values that go from one rank to another are not always taken in the order that they are made, where those of
forwards and of backwards go there (two ranks in a loop, or a V). A receive that comes early for that waits no
longer than the one that is taken there, whose value is made later.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from accel.parallel.schedule.actions import Action, Kind, Message, Schedule

__all__ = ["with_transfers"]


def with_transfers(schedule: Schedule, *, paired: bool = False) -> Schedule:
    """The schedule with its sends and receives.

    Args:
        schedule: of computation only.
        paired: a forward and the whole backward right behind it are one step, with the transfers of both
            before and behind it, as in Megatron's interleaved schedule without `overlap_p2p_comm`, and where
            they are computed together (DualPipe's F&B).

    Raises:
        ValueError: the schedule has transfers, or a value is taken that no rank makes, or none takes.
    """
    if not schedule.compute_only:
        raise ValueError("the schedule has transfers already")
    sends: dict[Message, tuple[int, int, Action]] = {}
    receives: dict[Message, tuple[int, int, Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        pairs = _pairs(actions) if paired else set()
        for at, action in enumerate(actions):
            made, needed = schedule.makes(rank, action), schedule.needs(rank, action)
            if made is not None:
                sends[made] = (rank, at + 1 + (at in pairs), action)
            if needed is not None:
                receives[needed] = (rank, at - (at - 1 in pairs), action)
    _check(schedule, sends, receives)
    gaps = _gaps(schedule, sends, receives)
    return replace(
        schedule,
        ranks=tuple(
            tuple(
                each
                for at in range(len(actions) + 1)
                for each in (*gaps[rank, at], *actions[at : at + 1])
            )
            for rank, actions in enumerate(schedule.ranks)
        ),
    )


def _pairs(actions: tuple[Action, ...]) -> set[int]:
    """Where a forward is with a whole backward right behind it, in a steady state: the last forward and the
    first backward are none.
    """
    kinds = [action.kind for action in actions]
    pairs = {at for at, two in enumerate(pairwise(kinds)) if two == (Kind.FORWARD, Kind.BACKWARD)}
    return pairs if len(pairs) > 1 else set()


_End = dict[Message, tuple[int, int, Action]]
"""Of a message: rank, the gap between its computations, and the computation."""


def _check(schedule: Schedule, sends: _End, receives: _End) -> None:
    for message, (rank, _, action) in receives.items():
        if message not in sends:
            raise ValueError(f"rank {rank}, {action}: no rank makes what it takes")
    for message, (rank, _, action) in sends.items():
        if message not in receives:
            raise ValueError(f"rank {rank}, {action}: no rank takes what it makes")


def _gaps(schedule: Schedule, sends: _End, receives: _End) -> dict[tuple[int, int], list[Action]]:
    """The transfers of each rank before each of its computations: sends, then receives."""
    gaps: dict[tuple[int, int], list[Action]] = defaultdict(list)
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message, (rank, gap, action) in sends.items():
        source, target = schedule.ends(message)
        if source != target:
            channels[source, target].append(message)
            kind = Kind.SEND_FORWARD if message.forward else Kind.SEND_BACKWARD
            gaps[rank, gap].append(Action(kind, action.micro_batch, action.chunk))
    for messages in channels.values():
        latest = len(schedule.ranks[receives[messages[-1]][0]])
        placed = []
        for message in reversed(messages):
            rank, gap, action = receives[message]
            latest = min(latest, gap)
            kind = Kind.RECEIVE_FORWARD if message.forward else Kind.RECEIVE_BACKWARD
            placed.append((rank, latest, Action(kind, action.micro_batch, action.chunk)))
        for rank, gap, action in reversed(placed):
            gaps[rank, gap].append(action)
    return gaps
