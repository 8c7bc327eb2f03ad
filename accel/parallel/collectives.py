"""Collectives over the first dimension of a tensor, and transfers from rank to rank, each with the work that
is still to be waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Messages", "Transfer", "gather_rows", "meet", "reduce_scatter_rows"]


def gather_rows(
    x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> tuple[Tensor, Any]:
    """`[S, ...]` of every rank -> `[ranks * S, ...]`, one rank after the other."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    return out, dist.all_gather_into_tensor(out, x, group=group, async_op=async_op)


def reduce_scatter_rows(
    x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> tuple[Tensor, Any]:
    """`[ranks * S, ...]` on every rank -> `[S, ...]`, this rank's rows of the sum."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return out, dist.reduce_scatter_tensor(out, x, group=group, async_op=async_op)


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before `Messages` that not all ranks of a group have, where they may be its first: NCCL connects all
    ranks with the first batch, and would wait for those that have none."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


class Messages:
    """Tensors to and from ranks of a group; between two ranks they arrive in the order of sending.

    Args:
        sends: contiguous, and the rank that each goes to; not to be changed before `wait_sent`.
        receives: contiguous, to be written, and the rank that each comes from.
    """

    def __init__(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        group: dist.ProcessGroup,
    ) -> None:
        # Receives first: gloo tells the sender that it may begin, which would else wait behind what leaves,
        # so that of two ranks that exchange the later one's values would come after its own have left.
        ops = [
            dist.P2POp(dist.irecv, into, group=group, group_peer=source)
            for into, source in receives
        ]
        ops += [dist.P2POp(dist.isend, tensor, group=group, group_peer=to) for tensor, to in sends]
        device = ops[0].tensor.device.type if ops else "cpu"
        rounds = [ops] if device in _REPEATS else _one_for_each(ops)
        works: list[Any] = [w for batch in rounds if batch for w in dist.batch_isend_irecv(batch)]
        one_for_all = len(works) < len(ops) or len(rounds) > 1
        self._received = works if one_for_all and receives else works[: len(receives)]
        self._sent = [] if one_for_all and receives else works[len(receives) :]
        self._kept = sends
        self._into = [into for into, _ in receives]

    def wait_received(self) -> None:
        for work in self._received:
            work.wait()
        self._received = []

    def received(self) -> list[Tensor]:
        """What came; it is let go of, so nothing the second time."""
        self.wait_received()
        into, self._into = self._into, []
        return into

    def wait_sent(self) -> None:
        """After all was received: a backend may have one work for everything."""
        for work in self._sent:
            work.wait()
        self._sent, self._kept = [], []

    def release_sent(self) -> None:
        """Before all was received: waits for what is sent and lets go of it, if it has works of its own."""
        if self._sent:
            self.wait_sent()


_REPEATS = ("cpu", "cuda")
"""Where a batch may have several messages between two ranks. HCCL's may not: "The task list must not contain
duplicate sending or receiving tasks pointed to the same rank" (CANN's documentation of HcclBatchSendRecv)."""


def _one_for_each(ops: Sequence[dist.P2POp]) -> list[list[dist.P2POp]]:
    """Rounds with one message to and one from each rank at most: the n-th of two ranks is in the n-th."""
    rounds: list[list[dist.P2POp]] = []
    seen: Counter[tuple[Any, int]] = Counter()
    for op in ops:
        number = seen[op.op, op.group_peer]
        seen[op.op, op.group_peer] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(op)
    return rounds


class Transfer:
    """A tensor to one rank of a group, one from another: the next and the one before, unless they are given.

    Args:
        outgoing: contiguous, not to be changed before `wait_sent`; None: nothing is sent.
        into: contiguous, what comes; None: nothing does.
        to, source: ranks of the group.
    """

    def __init__(
        self,
        outgoing: Tensor | None,
        into: Tensor | None,
        group: dist.ProcessGroup,
        to: int | None = None,
        source: int | None = None,
    ) -> None:
        ranks, me = group.size(), group.rank()
        to = (me + 1) % ranks if to is None else to
        source = (me - 1) % ranks if source is None else source
        self._messages = Messages(
            [] if outgoing is None else [(outgoing, to)],
            [] if into is None else [(into, source)],
            group,
        )

    def wait_received(self) -> None:
        self._messages.wait_received()

    def wait_sent(self) -> None:
        """After it was received."""
        self._messages.wait_sent()

    def received(self) -> Tensor:
        """What came; it is let go of.

        Raises:
            ValueError: nothing was to come, or it has been taken.
        """
        if not (came := self._messages.received()):
            raise ValueError("a transfer that receives nothing, or whose tensor has been taken")
        return came[0]
