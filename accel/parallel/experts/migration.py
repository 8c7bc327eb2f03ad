"""Experts that change ranks, with all that belongs to them.

Expert e lies in slot e, and slots in order on the ranks, as many on each. Experts that move swap slots, and
with them their numbers: whoever holds something for each expert puts it into the same order, and every
expert gets the tokens that it got before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from accel.parallel.collectives import Messages, meet

__all__ = ["bring", "new_order"]


def new_order(placed: Sequence[int], ranks: int) -> list[int]:
    """`[E]`: the expert that each slot gets.

    Those that stay on their rank keep their slots.

    Args:
        placed: `[E]`, the rank of each expert.

    Raises:
        ValueError: ranks that do not divide the experts, or a rank with more or fewer than its share.
    """
    experts = len(placed)
    if experts % ranks or any(placed.count(rank) != experts // ranks for rank in range(ranks)):
        raise ValueError(f"experts on ranks {list(placed)}: each of {ranks} needs as many")
    each = experts // ranks
    order = list(range(experts))
    for rank in range(ranks):
        coming = [e for e, to in enumerate(placed) if to == rank and e // each != rank]
        left = [e for e in range(rank * each, (rank + 1) * each) if placed[e] != rank]
        for slot, expert in zip(left, coming, strict=True):
            order[slot] = expert
    return order


def bring(
    order: Sequence[int],
    state: Callable[[int], Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[int, Tensor]:
    """What belongs to the experts that come to this rank, by the slot that they get.

    Args:
        order: of :func:`new_order`, the same on all ranks of the group.
        state: what belongs to an expert of this rank, which leaves; alike for all experts. It is asked for
            each of them in the order of slots.
        device: of the states.
    """
    meet(group, device)
    each = len(order) // group.size()
    moves = [(slot, e) for slot, e in enumerate(order) if slot != e]
    here = group.rank()
    sends = [(state(e).contiguous(), slot // each) for slot, e in moves if e // each == here]
    coming = [(slot, e // each) for slot, e in moves if slot // each == here]
    # a swap takes as many from a rank as it gives it
    came = {slot: torch.empty_like(sends[0][0]) for slot, _ in coming}
    messages = Messages(sends, [(came[slot], source) for slot, source in coming], group)
    messages.wait_received()
    messages.wait_sent()
    return came
