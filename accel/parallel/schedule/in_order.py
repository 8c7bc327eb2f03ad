"""What a training asks of a schedule beside `validate`: micro-batches in their order, and gradients complete.

order        a rank's chunk takes its data, and adds up its gradients, micro-batch after micro-batch
complete     some backwards of a chunk are the last that form gradients: these may be reduced then
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from accel.parallel.schedule.actions import Action, Kind, Schedule

__all__ = ["BACKWARDS", "check_order", "completing"]

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_ORDERED = (
    {Kind.FORWARD},
    {Kind.BACKWARD, Kind.BACKWARD_INPUT},
    {Kind.BACKWARD, Kind.BACKWARD_WEIGHT},
)


def check_order(schedule: Schedule) -> None:
    """Data comes in the order of a rank's forward passes, and gradients add up in that of its backward ones.

    Raises:
        ValueError: a chunk has passes of one kind that are not in the order of the micro-batches.
    """
    for (rank, own), kinds in itertools.product(enumerate(schedule.ranks), _ORDERED):
        last: dict[int, Action] = {}
        for action in own:
            if action.kind not in kinds:
                continue
            before = last.get(action.chunk, action)
            if action.micro_batch < before.micro_batch:
                raise ValueError(
                    f"rank {rank}, {action}: comes behind {before}: each chunk takes the micro-batches of a "
                    "step in their order, as its data comes and its gradients add up"
                )
            last[action.chunk] = action


def completing(backwards: Sequence[Action]) -> set[Action]:
    """Of a rank's backwards those that complete gradients: of each chunk, the last one that forms those which
    can be put off, and the last one that forms the others.

    Raises:
        ValueError: the last is a weights' part, of an input's part that a whole backward follows: that one
            would complete only some.
    """
    found = set()
    for chunk in {action.chunk for action in backwards}:
        own = [action for action in backwards if action.chunk == chunk]
        put_off = [a for a in own if a.kind is not Kind.BACKWARD_INPUT][-1]
        others = [a for a in own if a.kind is not Kind.BACKWARD_WEIGHT][-1]
        if put_off.kind is Kind.BACKWARD_WEIGHT and others.kind is Kind.BACKWARD:
            raise ValueError(f"{others} comes before {put_off}, so neither completes all gradients")
        found |= {put_off, others}
    return found
