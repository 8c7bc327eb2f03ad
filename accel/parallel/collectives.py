"""Collectives over the first dimension of a tensor, and transfers from rank to rank, each with the work that
is still to be waited for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["Transfer", "gather_rows", "reduce_scatter_rows"]


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
        self._outgoing, self._into = outgoing, into
        ops = []
        if outgoing is not None:
            ops.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=to))
        if into is not None:
            ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=source))
        self._works: list[Any] = dist.batch_isend_irecv(ops) if ops else []

    @property
    def receives(self) -> bool:
        return self._into is not None

    def wait_received(self) -> None:
        if self._into is not None:
            self._works[-1].wait()

    def wait_sent(self) -> None:
        """After it was received: the backend has one work for both, or one for each."""
        for sent in self._works if self._into is None else self._works[:-1]:
            sent.wait()

    def received(self) -> Tensor:
        """What came.

        Raises:
            ValueError: nothing was to come.
        """
        if self._into is None:
            raise ValueError("a transfer that receives nothing")
        self.wait_received()
        return self._into
