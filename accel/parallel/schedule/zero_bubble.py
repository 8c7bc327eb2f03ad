"""Schedules whose backward is in two parts, so that the weights' part fills the bubble.

    F, B, W    seconds of a chunk's forward, of its whole backward, and of that one's part for the weights
    bubble     seconds that a rank idles, where all chunks take the same time and transfers take none
    held       most activations of a rank, in chunks of one micro-batch (`in_flight`)

    schedule  v  bubble                 held                  from
    zb_h1     1  (p - 1) (F + B - 2 W)  p                     W <= F, B - W; arXiv 2401.10241
    zb_v      2  (p - 1) F              2 p                   the same
    v_half    2  under 3 (p - 1) F      2 (p // 2 + 1)        arXiv 2405.15362
    v_min     2  up to 4 (p - 1) F + F  2 ((p + 1) // 3 + 1)  the same

All are laid out for F = W = B / 2, and the bubbles of the last three are for that. In their unit, of half a
rank's layers, `one_f_one_b` has 6 (p - 1) F. None can be under (p - 1) F, as the last rank begins so late;
what is called zero counts each rank's time from its own start.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from accel.parallel.schedule.actions import Action, Kind, Message, Placement, Schedule
from accel.parallel.schedule.generators import check_counts, one_f_one_b

__all__ = ["v_half", "v_min", "zb_h1", "zb_v"]

_CYCLE = 6
"""Turns of a rank with two chunks for one micro-batch: two forwards, and two backwards of two parts."""


def zb_h1(p: int, m: int) -> Schedule:
    """`one_f_one_b` with the weights put off as far as its memory allows: each rank holds p chunks.

    Raises:
        ValueError: p or m is under 1.
    """
    schedule = one_f_one_b(p, m)
    kinds = {Kind.FORWARD: Kind.FORWARD, Kind.BACKWARD: Kind.BACKWARD_INPUT}
    ranks = tuple(tuple(replace(a, kind=kinds[a.kind]) for a in own) for own in schedule.ranks)
    return _fill(replace(schedule, ranks=ranks), p)


def zb_v(p: int, m: int) -> Schedule:
    """Zero bubble with the memory of `one_f_one_b`: each rank holds 2 p chunks.

    Raises:
        ValueError: p or m is under 1.
    """
    return _v_shape(p, m, steps=(3, 3, 3, 3), turns=(1, 1, 1), limit=2 * p)


def v_half(p: int, m: int) -> Schedule:
    """Half of `one_f_one_b`'s bubble with about half of its memory.

    Raises:
        ValueError: p or m is under 1.
    """
    turns = (1, 1, 2 if p % 2 else 5)
    return _v_shape(p, m, steps=(1, 2, 1, 2), turns=turns, limit=2 * (p // 2 + 1))


def v_min(p: int, m: int) -> Schedule:
    """Two thirds of `one_f_one_b`'s bubble with about a third of its memory; more where times differ.

    Raises:
        ValueError: p or m is under 1.
    """
    turns = (1, 1 if p % 3 else 3, 1)
    return _v_shape(p, m, steps=(1, 1, 1, 1), turns=turns, limit=2 * ((p + 1) // 3 + 1))


def _v_shape(
    p: int,
    m: int,
    steps: tuple[int, int, int, int],
    turns: tuple[int, int, int],
    limit: int,
) -> Schedule:
    """A micro-batch goes down the ranks and up, and so does its backward; the next follows a cycle later.

    Args:
        steps: time from rank to rank, of each of the four passes.
        turns: time from the end of each pass to the next, on the rank where it turns.
        limit: most activations that a rank may hold.
    """
    check_counts(p=p, m=m)
    down, up, back_down, back_up = steps
    first = [down * r for r in range(p)]
    second = [first[-1] + turns[0] + up * (p - 1 - r) for r in range(p)]
    third = [second[0] + turns[1] + back_down * r for r in range(p)]
    fourth = [third[-1] + turns[2] + back_up * (p - 1 - r) for r in range(p)]
    kinds = (Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD_INPUT, 1), (Kind.BACKWARD_INPUT, 0)
    ranks = []
    for times in zip(first, second, third, fourth, strict=True):
        assert len({time % _CYCLE for time in times}) == 4, (p, steps, turns, times)
        timed = [
            (time + _CYCLE * i, Action(kind, i, chunk))
            for time, (kind, chunk) in zip(times, kinds, strict=True)
            for i in range(m)
        ]
        ranks.append(tuple(action for _, action in sorted(timed, key=lambda pair: pair[0])))
    return _fill(Schedule(p, 2, m, Placement.V, tuple(ranks)), limit)


def _fill(schedule: Schedule, limit: int) -> Schedule:
    """With the weights' backwards where a rank has to wait, or holds as much as it may.

    All actions take one unit of time; the others stay in their order, each as early as it can be.
    """
    rest = [deque(actions) for actions in schedule.ranks]
    weights: list[deque[Action]] = [deque() for _ in rest]
    filled: list[list[Action]] = [[] for _ in rest]
    held = [0] * schedule.num_ranks
    made: set[Message] = set()
    """Before this unit of time."""
    while any(rest) or any(weights):
        new: list[Message | None] = []
        for rank, actions in enumerate(rest):
            if actions and _can(schedule, rank, actions[0], made, held[rank] < limit):
                action = actions.popleft()
            elif weights[rank]:
                action = weights[rank].popleft()
            else:
                continue
            filled[rank].append(action)
            new.append(schedule.makes(rank, action))
            if action.kind is Kind.BACKWARD_INPUT:
                weights[rank].append(replace(action, kind=Kind.BACKWARD_WEIGHT))
            held[rank] += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD_WEIGHT)
        assert new, f"a limit of {limit} stops the schedule"
        made.update(message for message in new if message is not None)
    return replace(schedule, ranks=tuple(map(tuple, filled)))


def _can(schedule: Schedule, rank: int, action: Action, made: set[Message], room: bool) -> bool:
    if action.kind is Kind.FORWARD and not room:
        return False
    needed = schedule.needs(rank, action)
    return needed is None or needed in made
