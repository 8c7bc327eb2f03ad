"""How the MoE layers of this process send their rows: in how many slices, and with which experts copied.

    price    rows of work that a copy of an expert must save: how long its matrices take to come, and their
             gradients to go back, by how long a row takes in its forward and backward. Both are measured once
             for each size of expert, on the slowest rank; a price that is given is taken instead

A copy travels beside other work, so the price is the most that it can cost. Ranks plan alike: from the same
counts and the same price. A plan is of a micro-batch's own counts, and then made once they are known; or
`Ahead`, from those of the micro-batches before, so that copies travel beside the attention before the layer.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel.device.streams import finish_current_stream
from accel.parallel.collectives import Messages
from accel.parallel.experts import load
from accel.parallel.experts.exchange import Experts, Loan
from accel.parallel.experts.plan import Copy, moving_average, plan_copies, rank_loads
from accel.parallel.experts.streams import OneStream, Streams, TwoStreams
from accel.parallel.experts.traffic import Traffic
from accel.slot import Slot
from accel.start_up import say

__all__ = [
    "Ahead",
    "Cost",
    "HotExperts",
    "Overlap",
    "copy_hot_experts",
    "current",
    "switch_on",
    "take_two_streams",
]


_FEW, _MANY, _REPEATS = 256, 2048, 5
_LEAST = 0.1
"""Of the time of many rows by their number: what a row costs where noise hides it."""


class Cost(NamedTuple):
    """What a copy and a row cost, in seconds, forward and backward."""

    copy: float
    """Of an expert."""
    row: float


class Ahead:
    """What is known of one layer before its tokens are routed: a moving average of its counts, and the copies
    that were planned from it."""

    def __init__(self) -> None:
        self.average: list[list[float]] = []
        self.copies: frozenset[Copy] = frozenset()
        self._seen = 0

    def note(self, counts: Sequence[Sequence[int]]) -> None:
        """Take in the counts of one micro-batch, on all ranks alike."""
        before: Sequence[list[float] | None] = self.average or [None] * len(counts)
        self.average = [moving_average(old, new) for old, new in zip(before, counts, strict=True)]
        self._seen += 1

    def reorder(self, order: Sequence[int]) -> None:
        """Experts have changed places: `order[slot]` is the expert that is there now. What was planned for
        the old places is forgotten."""
        self.average = [[of_rank[expert] for expert in order] for of_rank in self.average]
        self.copies = frozenset()

    def due(self, every: int) -> bool:
        """Whether to plan again: with the second micro-batch, then after `every` more each."""
        return self._seen > 0 and (self._seen - 1) % every == 0


class HotExperts:
    """Which experts are copied.

    Args:
        most: of a layer, for each micro-batch.
        price: see above; None: it is measured.
        every: plans are made ahead, each for so many micro-batches; None: for each from its own counts.
    """

    def __init__(self, most: int, price: float | None = None, every: int | None = None) -> None:
        self.most, self.given, self.every = most, price, every
        self.costs: dict[tuple[object, ...], Cost] = {}

    def lend(self, ahead: Ahead, group: dist.ProcessGroup, experts: Experts) -> Loan | None:
        """Send the copies that are planned for a layer; to be called before its tokens are routed.

        All ranks of the group ask alike.
        """
        if self.every is None:
            return None
        if ahead.due(self.every) and not load.computing_again():
            counts = [[round(rows) for rows in of_rank] for of_rank in ahead.average]
            ahead.copies = self.copies(counts, group, experts)
        if not ahead.copies:
            return None
        owners = owners_of(ahead.average)
        first = owners.index(group.rank())
        return Loan(ahead.copies, group, experts, owners.__getitem__, lambda e: e - first)

    def copies(
        self, counts: Sequence[Sequence[int]], group: dist.ProcessGroup, experts: Experts
    ) -> frozenset[Copy]:
        """All ranks of the group ask alike: it may measure, for which each needs the others."""
        owners = owners_of(counts)
        return frozenset(plan_copies(counts, owners, self.most, self.price(group, experts)))

    def price(self, group: dist.ProcessGroup, experts: Experts) -> float:
        if self.given is not None:
            return self.given
        cost = self.cost(group, experts)
        return cost.copy / cost.row

    def cost(self, group: dist.ProcessGroup, experts: Experts) -> Cost:
        """Measured once; all ranks of the group ask alike."""
        shapes = [weights[0].shape for weights in experts.weights]
        key = (group.group_name, *shapes, experts.weights[0][0].dtype)
        if key not in self.costs:
            self.costs[key] = cost = measured_cost(group, experts)
            if self.given is None:
                rows = round(cost.copy / cost.row)
                say(
                    f"hot_experts: a copy of an expert costs what {rows} rows do; --accel-hot-experts-price "
                    f"{rows} takes that without measuring"
                )
        return self.costs[key]

    def note(
        self, layer: int, traffic: Traffic, group: dist.ProcessGroup, experts: Experts
    ) -> None:
        """Tell the load report, if there is one, what the copies of a micro-batch do."""
        if not load.ON or load.computing_again() or not traffic.copies:
            return
        owners = owners_of(traffic.counts)
        before = rank_loads(traffic.counts, owners)
        after = rank_loads(traffic.counts, owners, traffic.copies)
        ends = Counter(rank for copy in traffic.copies for rank in (owners[copy.expert], copy.rank))
        moved = matrix_bytes(experts) * len(traffic.copies)
        moved += gradient_bytes(experts) * len(traffic.used)
        cost = self.cost(group, experts)
        saved = cost.row * (max(before) - max(after)) - cost.copy * max(ends.values())
        load.note_copies(layer, before, after, moved, saved)


def owners_of(counts: Sequence[Sequence[float]]) -> list[int]:
    """The ranks of the experts: as many each, in order."""
    ranks, num_experts = len(counts), len(counts[0])
    return [e * ranks // num_experts for e in range(num_experts)]


def matrix_bytes(experts: Experts) -> int:
    """Bytes of the matrices of one expert."""
    return sum(weights[0].nbytes for weights in experts.weights)


def gradient_bytes(experts: Experts) -> int:
    """Bytes of the gradients of one expert, in the dtype in which its owner adds them."""
    return sum(_gradient(weights[0], experts).nbytes for weights in experts.weights)


def _gradient(weight: Any, experts: Experts) -> Tensor:
    """One like it: a model that is never trained has no `main_grad`."""
    main_grad = getattr(weight, "main_grad", None) if experts.into_main_grad else None
    return weight if main_grad is None else main_grad


@torch.no_grad()
def measured_cost(group: dist.ProcessGroup, experts: Experts) -> Cost:
    """Measure what a copy and a row cost on the slowest rank; all ranks of the group together.

    A row's is what more rows take longer, as a few take what their launch and the reading of the matrices do.
    """
    first, second = (weights[0].detach() for weights in experts.weights)
    into = [torch.empty_like(first), torch.empty_like(second)]

    def copy() -> None:
        following, previous = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        sends = [(w.contiguous(), following) for w in (first, second)]
        messages = Messages(sends, [(w, previous) for w in into], group)
        messages.wait_received()
        messages.wait_sent()

    def computing(rows: int) -> Callable[[], object]:
        x, counts = first.new_ones(rows, first.shape[1]), torch.tensor([rows])
        products = (lambda x: x @ first.T), (lambda x: x @ second.T)
        return lambda: experts.mlp(x, x[:, 0], counts, *products)

    calls = (copy, computing(_FEW), computing(_MANY))
    found = [_seconds(call, first, group) for call in calls]
    seconds = torch.tensor(found, device=first.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    there, few, many = seconds.tolist()
    back = there * gradient_bytes(experts) / matrix_bytes(experts)
    row = max((many - few) / (_MANY - _FEW), _LEAST * many / _MANY)
    return Cost(copy=there + back, row=3 * row)


def _seconds(call: Callable[[], object], like: Tensor, group: dist.ProcessGroup) -> float:
    found = []
    for _ in range(1 + _REPEATS):  # the first does not count
        finish_current_stream(like.device)
        dist.barrier(group)
        start = time.perf_counter()
        call()
        finish_current_stream(like.device)
        found.append(time.perf_counter() - start)
    return median(found[1:])


class Overlap:
    """How the MoE layers of this process send their rows.

    Args:
        slices: of a rank's experts.
    """

    def __init__(self, slices: int = 5) -> None:
        self.slices = slices
        self.hot: HotExperts | None = None
        self.two_streams = False
        self._second: dict[torch.device, Any] = {}

    def traffic(
        self,
        counts: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        experts: Experts,
        loan: Loan | None = None,
        ahead: Ahead | None = None,
    ) -> Traffic:
        """All ranks of the group ask alike.

        Args:
            loan: of the copies that have set out.
            ahead: of the layer. Where it is computed again by itself, without the attention beside which they
                would have set out, they do so now.
        """
        slices = min(self.slices, len(experts.weights[0]))
        copies: frozenset[Copy] = loan.copies if loan else frozenset()
        if loan is None and ahead is not None and load.computing_again():
            copies = ahead.copies
        if self.hot and self.hot.every is None:
            copies = self.hot.copies(counts, group, experts)
        return Traffic(counts, group.rank(), copies, slices)

    def streams(self, device: torch.device) -> Streams:
        """For a layer that is about to be computed on a device."""
        if not self.two_streams:
            return OneStream()
        if device not in self._second:
            self._second[device] = torch.get_device_module(device).Stream(device)
        return TwoStreams(self._second[device], device)


_CURRENT = Slot[Overlap]()


def switch_on(slices: int) -> Callable[[], None]:
    """Send rows in so many slices of a rank's experts; returns what ends that."""
    return _CURRENT.set(Overlap(slices))


def copy_hot_experts(
    most: int, price: float | None, every: int | None = None
) -> Callable[[], None]:
    """Copy hot experts where overlap is switched on; returns what ends that.

    Raises:
        LookupError: it is not.
    """
    overlap = current()
    overlap.hot = HotExperts(most, price, every)
    return functools.partial(setattr, overlap, "hot", None)


def take_two_streams() -> Callable[[], None]:
    """Take two streams of devices that have them, where overlap is switched on; returns what ends that.

    Raises:
        LookupError: it is not.
    """
    overlap = current()
    overlap.two_streams = True
    return functools.partial(setattr, overlap, "two_streams", False)


def current() -> Overlap:
    """What was switched on; raises LookupError where nothing was."""
    return _CURRENT.value
