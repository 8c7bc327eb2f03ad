"""Which products of a tensor-parallel group overlap with their communication, and how.

    fixed   every product in the same chunks
    auto    each in the chunks and the form that are the quickest by the times of this shape on this link: of
            the product of all rows and of some, of a transfer of one row and of all. The ranks take the
            slowest one's times, so they choose alike. Of all that should beat the plain way, these are the
            quickest four with its bits at this number of rows, which products of few rows may not have; if
            none has them, the quickest, and a line says that times decide on bits.
            They and the plain way then run side by side, and the quickest stays if it is 3 % quicker than the
            plain way in most rounds, and again in as many new ones, in which it had no luck to be chosen for:
            a wrong prediction costs nothing but that. Products over symmetric memory, where they were asked
            for, run beside them: with its bits, or where nothing has these

    y = gather_matmul(x, w, group, plan)        where `current()` gives a plan for it

What hides the reduction of a backward pass, or a gather that sums a weight gradient as it comes (`Beside`),
counts: the pass is then what runs side by side.
Shapes are told apart up to the next power of two of their rows. Measuring a new one takes some sixty
times what it takes itself, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # the public one takes a second to import

from accel.device.streams import finish_current_stream
from accel.log import log_once
from accel.parallel import symmetric_memory
from accel.parallel.collectives import Transfer, gather_rows, reduce_scatter_rows
from accel.parallel.free_memory import free_bytes
from accel.parallel.overlapped_linear import (
    FORMS,
    SYMMETRIC,
    Form,
    Kind,
    Plan,
    gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    pieces_of,
)
from accel.slot import Slot

__all__ = ["Beside", "Overlap", "Times", "current", "plain", "predict", "switch_on"]

CHUNKS = (1, 2, 4, 8, 16)
_REPEATS, _HALVINGS = 3, 6
_FINALISTS, _ROUNDS = 4, 5
"""Plans that run beside the plain way, and how often: the prediction does not know what transfers cost the
core that computes. Where transfers take as long as products, eight choices were on average 2.6 % slower than
the best plan; by prediction alone, over three rounds, 4 %."""
_MOST = 0.97
"""Of the plain way's seconds that a plan may take."""


@dataclass(frozen=True)
class Beside:
    """The backward pass of a product whose reduction, or whose gather, runs beside the weight gradient."""

    gather: Callable[[], object]
    """What travels from its beginning on, for the weight gradient."""
    product: Callable[[], object]
    """The weight gradient, after that and the product; of a gather that of each piece after its product."""
    run: Callable[[Plan | None], object]
    """All of it, by a plan or the plain way; nobody's gradient changes."""


class Overlap:
    """Chooses a plan for each product.

    Args:
        chunks: of every product, 1 for none at all; None: chosen for each by its times.
        form: of every product; None: ring where chunks are given, else chosen too. Symmetric, where chunks
            are not given: tried beside the others.
        sums_in_pieces: a weight gradient of rows that are gathered is summed as they come.
    """

    def __init__(
        self, chunks: int | None = None, form: Form | None = None, *, sums_in_pieces: bool = False
    ) -> None:
        self.sums_in_pieces = sums_in_pieces
        self.fixed = None if chunks is None else Plan(chunks, form or "ring")
        self._form = form
        self._symmetric = form == SYMMETRIC
        self._serves: set[str] = set()
        self.chosen: dict[tuple[object, ...], Plan | None] = {}
        """What was measured -> its plan, None for the plain way."""

    def plan(
        self,
        kind: Kind,
        x: Tensor,
        w: Tensor,
        group: dist.ProcessGroup,
        beside: Callable[[], Beside] | None = None,
        held: Callable[[], int] = int,
    ) -> Plan | None:
        """The plan of `kind`'s product of x and w (`overlapped_linear`); None: it does not overlap.

        All ranks of the group ask alike: it may measure, for which each needs the others.

        Args:
            beside: gives the backward pass that the product is a part of, if it is to be measured.
            held: gives the bytes that this holds meanwhile. Where a rank has no room, nothing overlaps.

        Raises:
            ValueError: symmetric memory was asked for, and the group has none.
        """
        if self.fixed is not None and self.fixed.chunks == 1:
            return None
        symmetric = self._symmetric and kind != "all_reduce"
        if symmetric:
            self._require_symmetric_memory(x.device, group)
        if self.fixed is not None:
            return self.fixed
        x = x.reshape(-1, x.shape[-1]).contiguous()
        rows = x.shape[0].bit_length()
        alone = beside is None
        key = (kind, alone, group.group_name, rows, w.shape, w.is_contiguous(), x.dtype, x.device)
        if key not in self.chosen and beside is not None and not _all_have(held(), x, group):
            log_once(
                "tp_overlap", f"no room for {held()} bytes to time a backward pass: the plain way"
            )
            self.chosen[key] = None
        if key not in self.chosen:
            also = [Plan(group.size(), SYMMETRIC)] if symmetric else []
            form = None if self._symmetric else self._form
            self.chosen[key] = _choose(
                kind, x, w, group, also, form, None if beside is None else beside()
            )
        return self.chosen[key]

    def _require_symmetric_memory(self, device: torch.device, group: dist.ProcessGroup) -> None:
        if group.group_name in self._serves:
            return
        if (reason := symmetric_memory.reason(device, group)) is not None:
            raise ValueError(
                f"tp_overlap: form {SYMMETRIC}: the tensor-parallel group cannot: {reason}; use "
                f"{' or '.join(FORMS)}"
            )
        self._serves.add(group.group_name)


def _all_have(held: int, x: Tensor, group: dist.ProcessGroup) -> bool:
    left = x.new_tensor([free_bytes(x.device) - held], dtype=torch.int64)
    dist.all_reduce(left, dist.ReduceOp.MIN, group=group)
    return left.item() >= 0


@dataclass(frozen=True)
class Times:
    """Seconds of one kind of product, on the slowest rank."""

    rows: int
    """That the ranks cut into pieces: of one rank; of all of them where the result is all-reduced."""
    product: Mapping[int, float]
    """Rows -> of their product: for all of a rank's, and for some numbers below."""
    transfers: Mapping[Form, tuple[float, float]]
    """Form -> of one row, and of all."""
    gather: float = 0.0
    """Of what travels from the beginning on, before what is reduced."""
    beside: float = 0.0
    """Of what is computed after that and the product, while the rest is reduced; or with each piece of a
    gather, of them all."""

    def multiply(self, rows: int) -> float:
        """Linear between the numbers of rows that were measured."""
        above = min((size for size in self.product if size >= rows), default=self.rows)
        below = max((size for size in self.product if size <= rows), default=above)
        share = (rows - below) / max(1, above - below)
        return self.product[below] + share * (self.product[above] - self.product[below])

    def transfer(self, form: Form, rows: int) -> float:
        """Linear in the rows."""
        one, every = self.transfers[form]
        return one + (every - one) * (rows - 1) / max(1, self.rows - 1)


def predict(kind: Kind, ranks: int, plan: Plan, times: Times) -> float:
    """Seconds of a product that overlaps: one lane computes, one transfers, both in order."""
    sizes = [piece.stop - piece.start for piece in pieces_of(times.rows, kind, plan)]
    with_each = times.beside / (ranks * times.rows) if kind == "gather" else 0.0
    own = times.multiply(times.rows) + with_each * times.rows
    pieces = [
        (times.multiply(size) + with_each * size, times.transfer(plan.form, size)) for size in sizes
    ]
    if plan.form == "collective":
        return _collective(kind, ranks, own, pieces, times)
    computed, link = 0.0, times.gather
    arrived: list[float] = []
    if kind == "gather":
        computed = own
        for hop, (product, transfer) in enumerate(pieces * (ranks - 1)):
            here = arrived[hop - len(pieces)] if hop >= len(pieces) else 0.0
            link = max(link, here) + transfer
            arrived.append(link)
            computed = max(computed, link) + product
        return computed
    for hop, (product, transfer) in enumerate(pieces * (ranks - 1)):
        computed += product
        if hop >= len(pieces):
            computed = max(computed, arrived[hop - len(pieces)])
        link = max(link, computed) + transfer
        arrived.append(link)
    return max(link, max(computed + own, times.gather) + times.beside)


def _collective(
    kind: Kind, ranks: int, own: float, pieces: Sequence[tuple[float, float]], times: Times
) -> float:
    computed, link = 0.0, times.gather
    if kind == "gather":
        computed = own
        for product, transfer in pieces:
            link += transfer
            computed = max(computed, link) + (ranks - 1) * product
        return computed
    parts = 1 if kind == "all_reduce" else ranks
    for product, transfer in pieces:
        computed += parts * product
        link = max(link, computed) + transfer
    return max(link, max(computed, times.gather) + times.beside)


def plain(kind: Kind, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Without overlap: the product before or after one collective."""
    if kind == "gather":
        return gather_rows(x, group)[0] @ w
    y = x @ w
    if kind == "reduce_scatter":
        return reduce_scatter_rows(y, group)[0]
    dist.all_reduce(y, group=group)
    return y


def overlapped(kind: Kind, x: Tensor, w: Tensor, group: dist.ProcessGroup, plan: Plan) -> Tensor:
    """As `plain`, by `plan`."""
    if kind == "gather":
        return gather_matmul(x, w, group, plan)[0]
    by_kind = {"reduce_scatter": matmul_reduce_scatter, "all_reduce": matmul_all_reduce}
    return by_kind[kind](x, w, group, plan)


def _run(kind: Kind, x: Tensor, w: Tensor, group: dist.ProcessGroup, plan: Plan | None) -> Tensor:
    return plain(kind, x, w, group) if plan is None else overlapped(kind, x, w, group, plan)


@_disable_dynamo
@torch.no_grad()
def _choose(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    group: dist.ProcessGroup,
    also: Sequence[Plan] = (),
    form: Form | None = None,
    beside: Beside | None = None,
) -> Plan | None:
    """Of those that should be quicker than the plain way, and of `also`; of one form, if the kind has it."""
    rows = _rows(kind, x, group)
    if rows == 0:
        return None
    times = measure(kind, x, w, group, beside)
    forms = [form] if form is not None and form in times.transfers else list(times.transfers)
    predicted = {
        plan: predict(kind, group.size(), plan, times)
        for each in forms
        for plan in (Plan(chunks, each) for chunks in CHUNKS if chunks <= rows)
    }
    in_order = sorted(predicted, key=predicted.__getitem__)
    unless = _in_order(kind, group.size(), times)
    better = [plan for plan in in_order if predicted[plan] < unless]
    with_bits = [
        *_with_same_bits(kind, x, w, group, better),
        *_with_same_bits(kind, x, w, group, also),
    ]
    finalists = with_bits or [*better[:1], *also]
    if not finalists:
        return None
    run = partial(_run, kind, x, w, group) if beside is None else beside.run
    best = _quickest(x, group, run, finalists)
    if not with_bits:
        log_once("tp_overlap", _other_bits(kind, x, w, best))
    return best


def _quickest(
    x: Tensor,
    group: dist.ProcessGroup,
    run: Callable[[Plan | None], object],
    plans: Sequence[Plan],
) -> Plan | None:
    """That of the plans, if it is quicker than the plain way by the margin, twice."""
    ratio, best = min(zip(_ratios(x, group, run, plans), plans, strict=True), key=itemgetter(0))
    if ratio > _MOST or _ratios(x, group, run, [best])[0] > _MOST:
        return None
    return best


def _ratios(
    x: Tensor,
    group: dist.ProcessGroup,
    run: Callable[[Plan | None], object],
    plans: Sequence[Plan],
) -> list[float]:
    """Of each plan's seconds to the plain way's in the same round, the median."""
    calls = [partial(run, plan) for plan in (None, *plans)]
    stock, *ours = _alternately(x, group, _ROUNDS, *calls)
    return [median(a / b for a, b in zip(found, stock, strict=True)) for found in ours]


def _other_bits(kind: Kind, x: Tensor, w: Tensor, best: Plan | None) -> str:
    chosen = "nothing overlaps" if best is None else f"{best.form} of {best.chunks}"
    return (
        f"{kind} of a {list(x.shape)} by {list(w.shape)} product: no way to overlap it has the plain way's "
        f"bits; by measured times: {chosen}. Another run may choose otherwise, and differ in roundings; "
        "--accel-tp-chunks N leaves no choice"
    )


def _in_order(kind: Kind, ranks: int, times: Times) -> float:
    """Seconds of the plain way."""
    _, collective = times.transfers["collective"]
    computed = times.product[times.rows] * (1 if kind == "all_reduce" else ranks)
    if kind == "gather":
        return collective + computed + times.beside
    ready = max(times.gather, computed)
    return ready + max(collective, times.beside)


def _with_same_bits(
    kind: Kind, x: Tensor, w: Tensor, group: dist.ProcessGroup, plans: Sequence[Plan]
) -> list[Plan]:
    """The first that give what the plain way does, on every rank, of rows that are drawn."""
    if not plans:
        return []
    draw = torch.Generator(x.device).manual_seed(group.rank())
    x = torch.empty_like(x).normal_(generator=draw)  # x may be all 0, or the same everywhere
    expected = plain(kind, x, w, group)
    found: list[Plan] = []
    for plan in plans:
        same = torch.equal(expected, overlapped(kind, x, w, group, plan))
        everywhere = x.new_tensor(float(same), dtype=torch.float32)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
        if everywhere:
            found.append(plan)
        if len(found) == _FINALISTS:
            break
    return found


def measure(
    kind: Kind, x: Tensor, w: Tensor, group: dist.ProcessGroup, beside: Beside | None = None
) -> Times:
    """Time the parts of a product; all ranks of the group together."""
    rows = _rows(kind, x, group)
    own = x[:rows]
    travels = own if kind == "gather" else own.new_zeros((rows, w.shape[1]))
    sizes = sorted({max(1, rows >> halvings) for halvings in range(_HALVINGS + 1)})
    forms: tuple[Form, ...] = ("collective",) if kind == "all_reduce" else FORMS
    calls: list[Callable[[], object]] = [partial(torch.mm, own[:size], w) for size in sizes]
    for form in forms:
        for size in (1, rows):
            of_all = kind == "reduce_scatter" and form == "collective"
            piece = travels[:size].repeat(group.size() if of_all else 1, 1)
            calls.append(partial(_travel, kind, form, piece, group))
    if beside is not None:
        calls += [beside.gather, beside.product]
    found = [median(_alternately(x, group, _REPEATS, call)[0]) for call in calls]
    transfers = iter(found[len(sizes) :])
    return Times(
        rows,
        dict(zip(sizes, found, strict=False)),
        {form: (next(transfers), next(transfers)) for form in forms},
        *transfers,
    )


def _rows(kind: Kind, x: Tensor, group: dist.ProcessGroup) -> int:
    return x.shape[0] // (group.size() if kind == "reduce_scatter" else 1)


def _travel(kind: Kind, form: Form, rows: Tensor, group: dist.ProcessGroup) -> None:
    """One hop of a ring, or the collective of a piece: of as many rows of each rank, which it has all where
    they are scattered."""
    if form == "ring":
        transfer = Transfer(rows, torch.empty_like(rows), group)
        transfer.wait_received()
        transfer.wait_sent()
    elif kind == "gather":
        gather_rows(rows, group)
    elif kind == "reduce_scatter":
        reduce_scatter_rows(rows, group)
    else:
        dist.all_reduce(rows, group=group)


def _alternately(
    x: Tensor, group: dist.ProcessGroup, rounds: int, *calls: Callable[[], object]
) -> list[list[float]]:
    """Seconds of each in each round on the slowest rank, after a first round that does not count; the ranks
    begin each together."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(1 + rounds):
        for call, found in zip(calls, seconds, strict=True):
            finish_current_stream(x.device)
            dist.barrier(group)
            start = perf_counter()
            call()
            finish_current_stream(x.device)
            found.append(perf_counter() - start)
    slowest = x.new_tensor([found[1:] for found in seconds], dtype=torch.float32)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


_CURRENT = Slot[Overlap]()


def switch_on(overlap: Overlap) -> Callable[[], None]:
    """Let the linear layers of this process ask it; returns what ends that."""
    return _CURRENT.set(overlap)


def current() -> Overlap | None:
    """What linear layers ask for plans; None: nothing overlaps."""
    return _CURRENT.get()
