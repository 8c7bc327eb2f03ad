"""Collectives over the first dimension of a tensor, and transfers from rank to rank, each with the work that
is still to be waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Messages",
    "Outbox",
    "Transfer",
    "gather_rows",
    "meet",
    "post_together",
    "reduce_scatter_rows",
]


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
        post: at once; else by `post_together`, before anybody waits.
    """

    def __init__(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        group: dist.ProcessGroup,
        *,
        post: bool = True,
    ) -> None:
        self._receives = [
            dist.P2POp(dist.irecv, into, group=group, group_peer=source)
            for into, source in receives
        ]
        self._sends = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=to) for tensor, to in sends
        ]
        self._received: list[Any] | None = None
        self._sent: list[Any] = []
        self._kept = sends
        self._into = [into for into, _ in receives]
        if post:
            post_together([self])

    @property
    def posted(self) -> bool:
        return self._received is not None

    def wait_received(self) -> None:
        """
        Raises:
            RuntimeError: they were never posted.
        """
        if self._received is None:
            raise RuntimeError("messages are waited for that were never posted")
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
        if self.posted and self._sent:
            self.wait_sent()


def post_together(messages: Sequence[Messages]) -> None:
    """Post messages at once: as one kernel of a device, which begins when all that they send is there."""
    # Receives first: gloo tells the sender that it may begin, which would else wait behind what leaves,
    # so that of two ranks that exchange the later one's values would come after its own have left.
    ops = [op for m in messages for op in m._receives]
    ops += [op for m in messages for op in m._sends]
    device = ops[0].tensor.device.type if ops else "cpu"
    rounds = [ops] if device in _REPEATS else _one_for_each(ops)
    works: list[Any] = [w for batch in rounds if batch for w in dist.batch_isend_irecv(batch)]
    if len(works) < len(ops) or len(rounds) > 1:  # a work is for everything
        for m in messages:
            m._received, m._sent = (works, []) if m._receives else ([], works if m._sends else [])
    else:
        left = iter(works)
        for m in messages:
            m._received = list(islice(left, len(m._receives)))
        for m in messages:
            m._sent = list(islice(left, len(m._sends)))
    for m in messages:
        m._receives, m._sends = [], []


class Outbox:
    """Messages of a group that leave at once, or together.

    Where streams share one queue a message that waits, for a product or for another message, keeps all that
    is launched after it from beginning. Those that are to leave beside the same product are put there right
    before it, as one kernel.

    Args:
        together: they wait for `post`.
    """

    def __init__(self, group: dist.ProcessGroup, *, together: bool) -> None:
        self.group, self.together = group, together
        self._waiting: list[Messages] = []

    def add(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Messages:
        messages = Messages(sends, receives, self.group, post=not self.together)
        if self.together:
            self._waiting.append(messages)
        return messages

    def post(self) -> None:
        """Send the messages that wait; to be called right before the work that is to hide them."""
        waiting, self._waiting = self._waiting, []
        post_together(waiting)


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
