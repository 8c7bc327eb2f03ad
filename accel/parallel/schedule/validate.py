"""Whether a schedule is right: what it lacks is an error that names rank, action and rule.

once           each micro-batch goes once through each chunk: a forward, and a backward or its two parts
order          a backward comes behind its forward, and the weights' part behind the input's
values         a computation comes behind the one, or the receive, that it takes its value of
transfers      each send has its receive, and between two ranks they are in one order
deadlock       every rank comes to its end where receives wait and sends do not
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

from accel.parallel.schedule.actions import Action, Kind, Message, Schedule
from accel.parallel.schedule.engine import Play, Times
from accel.parallel.schedule.transfers import with_transfers

__all__ = ["validate"]

_UNIT = Times(forward=1, backward=2, weight=1)


def validate(schedule: Schedule) -> None:
    """Raises where the schedule is not right; never hangs.

    A schedule of computation only is taken with the transfers that `with_transfers` gives it; one without any
    backward is right where its forwards are.

    Raises:
        ValueError: a rule is broken; the message names rank, action and rule.
        Deadlock: a ValueError; the ranks wait for each other.
    """
    _once(schedule)
    if schedule.compute_only:
        schedule = with_transfers(schedule)
    _transfers(schedule)
    for rank in range(schedule.num_ranks):
        _order(schedule, rank)
    Play(schedule, _UNIT, overlap=True)


def _broken(rank: int, action: Action, rule: str) -> ValueError:
    return ValueError(f"rank {rank}, {action}: {rule}")


def _once(schedule: Schedule) -> None:
    """Each forward is there once, and its backward in one of the two ways."""
    parts = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    pairs = list(product(range(schedule.num_micro_batches), range(schedule.num_chunks)))
    for rank, actions in enumerate(schedule.ranks):
        count = Counter(actions)
        for action, times in count.items():
            if times > 1:
                raise _broken(rank, action, f"is there {times} times, must be once")
        for micro_batch, chunk in pairs:
            forward, whole, *both = (
                Action(kind, micro_batch, chunk) for kind in (Kind.FORWARD, Kind.BACKWARD, *parts)
            )
            if forward not in count:
                raise _broken(rank, forward, "is missing, must be once")
            there = [action for action in both if action in count]
            if whole in count and there:
                raise _broken(rank, there[0], f"is there beside {whole}")
            if len(there) == 1:
                (lacks,) = set(both) - set(there)
                raise _broken(rank, lacks, f"is missing, {there[0]} is there")
            if not (whole in count or there or schedule.forward_only):
                raise _broken(rank, whole, "is missing, each forward has its backward")


def _transfers(schedule: Schedule) -> None:
    """Each send has its receive, in the same order between two ranks, and the other way round."""
    sends: dict[tuple[int, int], list[tuple[Message, Action]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[Message, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind.computes:
                continue
            of = schedule.makes if action.kind.sends else schedule.needs
            message = of(rank, action)
            if message is None:
                raise _broken(rank, action, "is a transfer beyond the model's ends")
            channel = schedule.ends(message)
            if channel[0] == channel[1]:
                raise _broken(rank, action, "is a transfer within one rank")
            (sends if action.kind.sends else receives)[channel].append((message, action))
    for channel in sorted({*sends, *receives}):
        sent, received = sends[channel], receives[channel]
        for rank, own, other, what in (
            (channel[0], sent, received, f"rank {channel[1]} has no receive for it"),
            (channel[1], received, sent, f"rank {channel[0]} has no send for it"),
        ):
            there = {message for message, _ in other}
            for message, action in own:
                if message not in there:
                    raise _broken(rank, action, what)
        for (first, action), (second, taken) in zip(sent, received, strict=True):
            if first != second:
                rule = f"is received where rank {channel[0]} sends {action}: both want one order"
                raise _broken(channel[1], taken, rule)


def _order(schedule: Schedule, rank: int) -> None:
    """What each action of a rank takes is there before it."""
    done: set[Action] = set()
    values: set[Message] = set()
    """Made here, or received."""
    for action in schedule.ranks[rank]:
        for kind in _BEHIND.get(action.kind, ()):
            before = Action(kind, action.micro_batch, action.chunk)
            if before not in done:
                raise _broken(rank, action, f"must come behind {before}")
        made, needed = schedule.makes(rank, action), schedule.needs(rank, action)
        if action.kind.computes and needed is not None and needed not in values:
            source = schedule.ends(needed)[0]
            what = "is computed" if source == rank else f"is received from rank {source}"
            raise _broken(rank, action, f"must come behind what it takes, which {what}")
        if action.kind.sends and made not in values:
            raise _broken(rank, action, "must come behind what it sends")
        if action.kind.receives and needed is not None:
            values.add(needed)
        if action.kind.computes and made is not None:
            values.add(made)
        done.add(action)


_BEHIND = {
    Kind.BACKWARD: (Kind.FORWARD,),
    Kind.BACKWARD_INPUT: (Kind.FORWARD,),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_INPUT,),
}
