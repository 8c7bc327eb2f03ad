"""Matrix products of a tensor-parallel group that are computed while operands or results travel.

    gather_matmul           gather(x) w     the rows of other ranks are multiplied as they come
    matmul_reduce_scatter   reduce(x w)     rows for other ranks leave as they are computed; each gets its own
    matmul_all_reduce       reduce(x w)     the same, and every rank gets all
    begin_...               what there is to multiply of the latter two; what the caller does then runs beside
                            the rest of the sum

Letters     R  ranks;   S  first dimension of one rank;   T  rows of one rank, the product of S and what
            lies between the first dimension and the last;   K  in;   N  out features.   w [K, N]
Chunks      the rows of a rank are cut into `chunks` pieces (`pieces_of`); of a piece the ranks hold as many
            rows. More chunks than rows are as many as rows. Where the own rows are there to hide what
            travels, what nothing hides is the product of the last piece that comes, or of the first one that
            leaves: the last two or the first two are smaller
Forms       ring        pieces go from rank to rank, R - 1 times, by send and receive. A rank's own rows are
                        multiplied first (gather) or last (reduce), while the link is busy without them
            collective  a collective of torch.distributed for each chunk
            symmetric   PyTorch's products over symmetric memory (`symmetric_memory`), in as many pieces as
                        ranks whatever `chunks` is; all-reduced results by collectives
Bits        those of the product of all rows followed by the collective, where a row's product does not depend
            on how many rows there are, and a sum not on its order: of two ranks it does not
Memory      what stock holds, and one piece. A ring receives where it stays, with no copy but that of the own
            rows for who keeps them; of a sum it holds at most what the last hop sent, what this one sends and
            what comes. A collective multiplies what it gathers where it came, and copies it, held twice, for
            who keeps it in more than one piece (and what torch.distributed copies itself). Symmetric: and
            PyTorch's workspace
Errors      a rank that is gone: those of the collective or the receive, within the group's own time-out; not
            so of symmetric memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from accel.device.streams import one_queue
from accel.parallel import symmetric_memory
from accel.parallel.collectives import Transfer

__all__ = [
    "FORMS",
    "SYMMETRIC",
    "Form",
    "Kind",
    "Plan",
    "begin_matmul_all_reduce",
    "begin_matmul_reduce_scatter",
    "gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "pieces_of",
]

Kind = Literal["gather", "reduce_scatter", "all_reduce"]

Form = Literal["ring", "collective", "symmetric"]
FORMS: tuple[Form, ...] = ("ring", "collective")
"""By messages, everywhere."""
SYMMETRIC: Form = "symmetric"
"""By devices that read each other's memory."""


@dataclass(frozen=True)
class Plan:
    """How a product overlaps.

    Raises:
        ValueError: less than one chunk, or an unknown form.
    """

    chunks: int
    form: Form = "ring"

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"{self.chunks} chunks: give 1 or more")
        if self.form not in (*FORMS, SYMMETRIC):
            raise ValueError(f"form {self.form!r}: use {', '.join(FORMS)} or {SYMMETRIC}")


def pieces_of(rows: int, kind: Kind, plan: Plan, *, even: bool = False) -> list[slice]:
    """Cut so many rows into the pieces of a plan, none of them empty.

    Of a gather the last is half as large as the one before it, and that as those before; of a ring that
    reduces the first ones are, the other way around. Else, where they are to be even, and where there are
    too few rows, they differ by one row at most.
    """
    if rows == 0:
        return []
    chunks = min(rows, plan.chunks)
    shares = [1] * chunks
    if kind == "gather" and not even:
        shares = [*[4] * (chunks - 2), 2, 1][-chunks:]
    elif kind == "reduce_scatter" and plan.form == "ring":
        shares = [1, 2, *[4] * (chunks - 2)][:chunks]
    if rows < sum(shares):
        shares = [1] * chunks
    ends = [rows * end // sum(shares) for end in accumulate(shares, initial=0)]
    return [slice(*piece) for piece in pairwise(ends)]


def gather_matmul(
    x: Tensor,
    w: Tensor,
    group: dist.ProcessGroup,
    plan: Plan,
    *,
    keep: bool = False,
    each: Callable[[Tensor, int, slice], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`gather(x) w`.

    Args:
        x: `[S, ..., K]` of this rank; as much on every rank.
        keep: also return `gather(x)`.
        each: gets the rows of `x` too, once they are multiplied, as they come: `[T', K]`, their rank, and
            which of its T they are. Symmetric: a rank's rows after another's, when all have come.

    Returns:
        `[R S, ..., N]`, one rank after the other, and `[R S, ..., K]` or None.
    """
    ranks = group.size()
    if plan.form == SYMMETRIC and x.numel():
        y, whole = symmetric_memory.gather_matmul(x, w, group, keep=keep or each is not None)
        if each is not None and whole is not None:
            for owner, rows in enumerate(whole.view(ranks, -1, x.shape[-1])):
                each(rows, owner, slice(None))
        return y, whole if keep else None
    own = _rows(x)
    lead = (ranks * x.shape[0], *x.shape[1:-1])
    whole = x.new_empty((*lead, x.shape[-1])) if keep else None
    y = x.new_empty((*lead, w.shape[1]))  # no view of another tensor: who gets it may write into it
    ys = y.view(ranks, own.shape[0], w.shape[1])
    # with one queue a piece's product hides the next piece, in a ring also the first of the next rank's
    even = plan.form == "ring" and ranks > 2 and one_queue(x.device)
    pieces = pieces_of(own.shape[0], "gather", plan, even=even)
    kept = None if whole is None else whole.view(ranks, *own.shape)
    for rows, owner, piece in (_around if plan.form == "ring" else _together)(
        own, kept, group, pieces
    ):
        torch.mm(rows, w, out=ys[owner, piece])
        if each is not None:
            each(rows, owner, piece)
    return y, whole


def _ahead(x: Tensor, pieces: Sequence[slice]) -> int:
    """How many are under way at a time: with one queue the one that the next product hides, as that would not
    begin before all others that were put there have begun."""
    return 1 if one_queue(x.device) else len(pieces)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _around(
    x: Tensor, kept: Tensor | None, group: dist.ProcessGroup, pieces: Sequence[slice]
) -> Iterator[tuple[Tensor, int, slice]]:
    """The own rows at once, then what has come by the ring, with its rank and piece; all rows go into `kept`
    too, if it is given."""
    ranks, me = group.size(), group.rank()
    whole = x.new_empty((ranks, *x.shape)) if kept is None else kept
    hops = [((me - hop) % ranks, piece) for hop in range(1, ranks) for piece in pieces]
    sources = [x[piece] for piece in pieces] + [whole[hop] for hop in hops]
    ahead = _ahead(x, pieces)
    transfers = [
        Transfer(source, whole[hop], group)
        for source, hop in zip(sources, hops[:ahead], strict=False)
    ]
    yield x, me, slice(None)
    for i, hop in enumerate(hops):
        transfers[i].wait_received()
        if (onward := i + ahead) < len(hops):
            transfers.append(Transfer(sources[onward], whole[hops[onward]], group))
        yield whole[hop], *hop
    if kept is not None:
        kept[me] = x
    for transfer in transfers:
        transfer.wait_sent()


def _together(
    x: Tensor, kept: Tensor | None, group: dist.ProcessGroup, pieces: Sequence[slice]
) -> Iterator[tuple[Tensor, int, slice]]:
    """As `_around`, by all-gathers."""
    ranks, me = group.size(), group.rank()
    coming: deque[tuple[Tensor, Any]] = deque()

    def gather(piece: slice) -> None:
        into = x.new_empty((ranks, *x[piece].shape)) if kept is None or len(pieces) > 1 else kept
        rows = into.flatten(0, 1)  # gloo takes no other shape
        work = dist.all_gather_into_tensor(rows, x[piece], group=group, async_op=True)
        coming.append((into, work))

    ahead = _ahead(x, pieces)
    for piece in pieces[:ahead]:
        gather(piece)
    yield x, me, slice(None)
    for i, piece in enumerate(pieces):
        into, work = coming.popleft()
        work.wait()
        for next_piece in pieces[i + ahead :][:1]:
            gather(next_piece)
        for owner in range(ranks):
            if owner != me:
                yield into[owner], owner, piece
        if kept is not None and into is not kept:
            kept[:, piece] = into


def matmul_reduce_scatter(x: Tensor, w: Tensor, group: dist.ProcessGroup, plan: Plan) -> Tensor:
    """The sum over the ranks of `x w`, this rank's part of the first dimension.

    Args:
        x: `[R S, ..., K]`: of the rows of every rank, one after the other, this rank's part of the sum.

    Returns:
        `[S, ..., N]`.

    Raises:
        ValueError: the ranks do not divide the first dimension.
    """
    return begin_matmul_reduce_scatter(x, w, group, plan)()


def begin_matmul_reduce_scatter(
    x: Tensor, w: Tensor, group: dist.ProcessGroup, plan: Plan
) -> Callable[[], Tensor]:
    """The products of `matmul_reduce_scatter`.

    Returns:
        To be called once: waits for the rest of the sum, and gives it. Symmetric: waits here.
    """
    ranks = group.size()
    if x.shape[0] % ranks:
        raise ValueError(
            f"the first dimension, {x.shape[0]}, is to be scattered and is no multiple of the {ranks} ranks"
        )
    if plan.form == SYMMETRIC and x.numel():
        found = symmetric_memory.matmul_reduce_scatter(x, w, group)
        return lambda: found
    y = x.new_empty((x.shape[0] // ranks, *x.shape[1:-1], w.shape[1]))
    own = y.view(y.numel() // w.shape[1], w.shape[1])
    every = _rows(x).view(ranks, own.shape[0], x.shape[-1])
    pieces = pieces_of(own.shape[0], "reduce_scatter", plan)
    finish = (_sum_around if plan.form == "ring" else _sum_together)(every, w, own, group, pieces)

    def finished() -> Tensor:
        finish()
        return y

    return finished


def _sum_around(
    x: Tensor, w: Tensor, y: Tensor, group: dist.ProcessGroup, pieces: Sequence[slice]
) -> Callable[[], None]:
    """The sum of a rank's rows begins at the next rank and goes once around; it adds its own last."""
    ranks, me = group.size(), group.rank()
    coming: deque[Transfer] = deque()
    leaving: deque[Transfer] = deque()
    for hop in range(1, ranks):
        for piece in pieces:
            part = torch.mm(x[(me - hop) % ranks, piece], w)
            if hop > 1:
                before = coming.popleft()
                part += before.received()
                leaving.append(before)
            if len(leaving) > len(pieces):  # a hop ago: it has left long since
                leaving.popleft().wait_sent()
            coming.append(Transfer(part, torch.empty_like(part), group))
    torch.mm(x[me], w, out=y)

    def finish() -> None:
        for piece, transfer in zip(pieces, coming, strict=ranks > 1):
            y[piece] += transfer.received()
        for transfer in (*leaving, *coming):
            transfer.wait_sent()

    return finish


def _sum_together(
    x: Tensor, w: Tensor, y: Tensor, group: dist.ProcessGroup, pieces: Sequence[slice]
) -> Callable[[], None]:
    works = []
    for piece in pieces:
        parts = x.new_empty((x.shape[0], *y[piece].shape))
        for part, rows in zip(parts, x[:, piece], strict=True):
            torch.mm(rows, w, out=part)
        whole = parts.flatten(0, 1)
        works.append(dist.reduce_scatter_tensor(y[piece], whole, group=group, async_op=True))
    return partial(_wait, works)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def matmul_all_reduce(x: Tensor, w: Tensor, group: dist.ProcessGroup, plan: Plan) -> Tensor:
    """The sum over the ranks of `x w`; always by collectives.

    Args:
        x: `[..., K]`: this rank's part of the sum of every row.

    Returns:
        `[..., N]`.
    """
    return begin_matmul_all_reduce(x, w, group, plan)()


def begin_matmul_all_reduce(
    x: Tensor, w: Tensor, group: dist.ProcessGroup, plan: Plan
) -> Callable[[], Tensor]:
    """The products of `matmul_all_reduce`, and to be called as that of `begin_matmul_reduce_scatter`."""
    y = x.new_empty((*x.shape[:-1], w.shape[1]))
    rows, sums = _rows(x), y.view(y.numel() // w.shape[1], w.shape[1])
    works = []
    for piece in pieces_of(rows.shape[0], "all_reduce", plan):
        torch.mm(rows[piece], w, out=sums[piece])
        works.append(dist.all_reduce(sums[piece], group=group, async_op=True))

    def finish() -> Tensor:
        _wait(works)
        return y

    return finish
