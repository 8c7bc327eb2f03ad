"""Which rank computes the rows of which expert: copies for one micro-batch, owners for many. Plain numbers.

    E, R         experts, ranks
    counts       [R][E] rows of each rank's own tokens: a token has one for each of its choices
    owners       [E] the rank that computes an expert's rows
    copy (e, r)  rank r, not the owner, gets the weights of e and computes its own counts[r][e] rows of it
    y[q]         rows that rank q computes
    n[q]         copies that rank q sends or receives, together
    J            max(y) + price max(n): ranks transfer at the same time, each its own one after another

Routing never changes, and so no result does. `plan_copies` looks for a small J. It relieves the longest rank,
again and again, by the copy that leaves the longer of its two ranks shortest. Where none helps, the rank's
expert with the most rows elsewhere joins those that are copied. Each time that happens, copies without which
J would be no larger are left out, and the smallest J is the plan. Where that is above `EVEN_ENOUGH` of the
mean, chains are tried too: a copy that makes another rank the longest, which then hands on rows of its own.
It is not always the least there is: other experts may be the better ones to copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

__all__ = [
    "Copy",
    "longest_over_mean",
    "moving_average",
    "place_eplb",
    "place_greedy",
    "plan_copies",
    "plan_migration",
    "rank_loads",
    "slot_loads",
]


EVEN_ENOUGH = 1.05
"""Of the mean. Of 16 experts on 4 ranks by Zipf's law, up to 4 copied, one in ten of 200 draws has more: the
worst 1.16, with chains 1.10. A plan takes 0.1 ms, with chains 0.5; of 64 experts on 8 ranks 0.2 and 0.8; of
256 on 64 about 3 ms, 8 where up to 8 are copied."""

_Number = TypeVar("_Number", int, float)
_Lent = tuple[int, int, int]
"""Rows, their expert, their rank."""


class Copy(NamedTuple):
    """A copy of an expert, on a rank that does not own it."""

    expert: int
    rank: int


def rank_loads(
    counts: Sequence[Sequence[int]], owners: Sequence[int], copies: Iterable[tuple[int, int]] = ()
) -> list[int]:
    """`[R]`: rows computed on each rank.

    Raises:
        ValueError: counts or owners as in :func:`plan_copies`; a copy of no expert, on no rank, or twice.
    """
    _check_counts(counts, owners)
    loads = _sums(_totals(counts), owners, len(counts))
    seen = set()
    for expert, rank in copies:
        copy = (expert, rank)
        if not (0 <= expert < len(owners) and 0 <= rank < len(counts)):
            raise ValueError(f"copy {copy}: of {len(owners)} experts, on {len(counts)} ranks")
        if copy in seen:
            raise ValueError(f"copy {copy} is there twice")
        seen.add(copy)
        loads[owners[expert]] -= counts[rank][expert]
        loads[rank] += counts[rank][expert]
    return loads


def longest_over_mean(loads: Sequence[float]) -> float:
    """The largest load by the mean; 1.0 where there are no rows at all."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def plan_copies(
    counts: Sequence[Sequence[int]], owners: Sequence[int], most: int, price: float
) -> tuple[Copy, ...]:
    """Copies that shorten the longest rank, sorted; on each rank the same from the same numbers.

    J, above, is smaller with the plan than without, so that max(y) falls by more than price max(n). It would
    be larger without any one of the copies, and each has rows.

    Args:
        counts: `[R][E]`, rows of each rank's tokens.
        owners: `[E]`.
        most: different experts that may be copied, each to any number of ranks.
        price: of one expert's copy to one rank: the rows that are computed in the time that it takes.

    Raises:
        ValueError: rows of counts of different lengths, or with a number under 0; owners that are not one
            rank for each expert; most or price under 0, or a price that is not finite.
    """
    _check_counts(counts, owners)
    if most < 0:
        raise ValueError(f"most must be 0 or more, got {most!r}")
    if not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price must be finite and not negative, got {price!r}")
    start = _Relief(counts, owners)
    reached = [start, *_steps(start, most, _Relief.next)]
    plan, cost = _cheapest(reached, price)
    if cost > EVEN_ENOUGH * sum(start.loads) / len(start.loads):
        done = next((at for at, relief in enumerate(reached) if relief.chains()), most)
        if done < most:  # the steps before are the same
            others = _steps(reached[done], most - done, _Relief.next_by_chains)
            other, less = _cheapest([*reached[: done + 1], *others], price)
            plan = other if less < cost else plan
    return tuple(sorted(Copy(e, r) for _, e, r in plan))


def _steps(
    relief: _Relief, most: int, step: Callable[[_Relief], _Relief | None]
) -> Iterator[_Relief]:
    """What is reached after one step, after two, and so on."""
    for _ in range(most):
        after = step(relief)
        if after is None:
            return
        yield (relief := after)


def _cheapest(reached: Iterable[_Relief], price: float) -> tuple[list[_Lent], float]:
    """The copies whose J is smallest, and that J."""
    plan: list[_Lent] = []
    cost = math.inf
    for relief in reached:
        if max(relief.loads) + price * bool(relief.copies) < cost:
            less, copies = relief.worthwhile(price)
            if less < cost:
                plan, cost = copies, less
    return plan, cost


class _Relief:
    """Loads and copies while the longest rank is relieved."""

    def __init__(self, counts: Sequence[Sequence[int]], owners: Sequence[int]) -> None:
        self.counts, self.owners = counts, owners
        totals = _totals(counts)
        self.loads = _sums(totals, owners, len(counts))
        elsewhere = [totals[e] - counts[q][e] for e, q in enumerate(owners)]
        self.closed: list[list[int]] = [[] for _ in counts]
        """Each rank's experts that are not copied, the one with the most rows elsewhere first."""
        for e in sorted(range(len(owners)), key=elsewhere.__getitem__, reverse=True):
            self.closed[owners[e]].append(e)
        self.missing: list[dict[int, list[tuple[int, int]]]] = [{} for _ in counts]
        """Each rank's others: (-rows, r) of the ranks that have rows and no copy, in order."""
        self.copies: list[_Lent] = []

    def fork(self) -> _Relief:
        """Another one that goes on from here."""
        other = object.__new__(_Relief)
        other.counts, other.owners = self.counts, self.owners
        other.loads, other.copies = self.loads.copy(), self.copies.copy()
        # what is in these is replaced, never changed
        other.closed, other.missing = self.closed.copy(), self.missing.copy()
        return other

    def next(self) -> _Relief | None:
        """One more expert copied as far as that helps; None: no copy of another one does."""
        after = self.fork()
        if not after.open():
            return None
        while after.step():
            pass
        return after

    def next_by_chains(self) -> _Relief | None:
        """As `next`, or after a copy that makes its rank the longest, whose expert is next: the shorter."""
        after = [each for each in map(_Relief.next, [self, *self.chains()]) if each is not None]
        return min(after, key=lambda each: sorted(each.loads, reverse=True), default=None)

    def chains(self) -> list[_Relief]:
        """Each with one more copy, which makes its rank the longest."""
        q = self.loads.index(max(self.loads))
        found = []
        for e, missing in self.missing[q].items():
            for minus, r in missing:
                if self.longest_after(q, r, -minus) == r:
                    found.append(self.fork())
                    found[-1].lend(q, r, e, -minus)
        return found

    def longest_after(self, q: int, r: int, rows: int) -> int:
        """The longest rank, if r computes so many rows of q."""
        loads = self.loads.copy()
        loads[q] -= rows
        loads[r] += rows
        return loads.index(max(loads))

    def open(self) -> bool:
        """One more of the longest rank's experts may be copied; False: no copy would help."""
        top = max(self.loads)
        q = self.loads.index(top)
        for e in self.closed[q]:
            found = [(-row[e], r) for r, row in enumerate(self.counts) if r != q and row[e]]
            if any(self.loads[r] - minus < top for minus, r in found):
                self.closed[q] = [other for other in self.closed[q] if other != e]
                self.missing[q] = {**self.missing[q], e: sorted(found)}
                return True
        return False

    def step(self) -> bool:
        """One more copy that the longest rank sends; False: none helps."""
        loads = self.loads
        top = shortest = max(loads)
        q = loads.index(top)
        best: _Lent | None = None
        for e, missing in self.missing[q].items():
            for minus, r in missing:
                if top + minus >= shortest:
                    break
                longer = max(top + minus, loads[r] - minus)
                if longer < shortest:
                    shortest, best = longer, (-minus, e, r)
        if best is None:
            return False
        rows, e, r = best
        self.lend(q, r, e, rows)
        return True

    def lend(self, q: int, r: int, e: int, rows: int) -> None:
        """Rank r computes its own rows of an expert of q that may be copied."""
        left = self.missing[q][e].copy()
        left.remove((-rows, r))
        self.missing[q] = {**self.missing[q], e: left}
        self.copies.append((rows, e, r))
        self.loads[q] -= rows
        self.loads[r] += rows

    def worthwhile(self, price: float) -> tuple[float, list[_Lent]]:
        """J, and the copies, less those without which J is no larger: few rows first."""
        loads = self.loads.copy()
        copies = sorted(self.copies)
        ends = [0] * len(loads)
        for _, e, r in copies:
            ends[self.owners[e]] += 1
            ends[r] += 1
        again = True
        while again:
            top, most, kept = max(loads), max(ends), []
            for copy in copies:
                rows, e, r = copy
                q = self.owners[e]
                longer = loads[q] + rows
                if longer > top:
                    # one copy fewer takes at most one price off
                    fewer = most if longer > top + price else _most_without(ends, q, r)
                    if longer + price * fewer > top + price * most:
                        kept.append(copy)
                        continue
                    top, most = longer, fewer
                loads[q] = longer
                loads[r] -= rows
                ends[q] -= 1
                ends[r] -= 1
            again = len(kept) < len(copies)
            copies = kept
        return max(loads) + price * max(ends), copies


def place_greedy(loads: Sequence[float], ranks: int) -> list[int]:
    """Owners, E / R experts each: the largest first, to the rank with the least so far that has room.

    Raises:
        ValueError: a load under 0, or ranks that do not divide the experts.
    """
    _check_loads(loads)
    _check_slots(len(loads), ranks, "experts")
    return _packed(loads, ranks)


def place_eplb(loads: Sequence[float], ranks: int, replicas: int) -> list[list[int]]:
    """The experts in each rank's slots, replicas / R each: the idea of DeepSeek's EPLB.

    Each expert has one replica; the next is always of the expert with the most rows for each of its own. They
    are placed as in :func:`place_greedy`. Two of one expert may meet on a rank, as they may with DeepSeek's.

    Args:
        replicas: of all experts together.

    Raises:
        ValueError: a load under 0, fewer replicas than experts, or ranks that do not divide the replicas.
    """
    _check_loads(loads)
    _check_slots(replicas, ranks, "replicas")
    if not loads or replicas < len(loads):
        raise ValueError(f"replicas = {replicas} of {len(loads)} experts: each needs one")
    copied = list(range(len(loads)))
    share = list(loads)
    each = [1] * len(loads)
    for _ in range(replicas - len(loads)):
        e = share.index(max(share))
        copied.append(e)
        each[e] += 1
        share[e] = loads[e] / each[e]
    slots: list[list[int]] = [[] for _ in range(ranks)]
    for e, rank in zip(copied, _packed([share[e] for e in copied], ranks), strict=True):
        slots[rank].append(e)
    return [sorted(experts) for experts in slots]


def slot_loads(loads: Sequence[float], slots: Sequence[Sequence[int]]) -> list[float]:
    """`[R]`: rows on each rank, where the replicas of an expert have as many each."""
    each = [0] * len(loads)
    for experts in slots:
        for e in experts:
            each[e] += 1
    return [sum(loads[e] / each[e] for e in experts) for experts in slots]


def plan_migration(
    loads: Sequence[float], owners: Sequence[int], ranks: int, threshold: float
) -> list[int] | None:
    """New owners, as many experts on each rank as before; None where the gain is below the threshold.

    Two experts change places as long as the ranks are less even than with :func:`place_greedy`: each time the
    two that even out most, one of them from the longest rank or from the shortest.

    Args:
        loads: `[E]`, rows of each expert, over many micro-batches.
        owners: `[E]`.
        threshold: by which the standard deviation of the ranks' loads, over their mean, must drop.

    Raises:
        ValueError: a load or the threshold under 0, ranks that do not divide the experts, or owners that are
            not one rank for each expert.
    """
    _check_owners(owners, len(loads), ranks)
    if not threshold >= 0:
        raise ValueError(f"threshold must be 0 or more, got {threshold!r}")
    enough = _variation(_sums(loads, place_greedy(loads, ranks), ranks))
    placed = list(owners)
    of_ranks = _sums(loads, placed, ranks)
    before = _variation(of_ranks)
    while _variation(of_ranks) > enough and (swap := _best_swap(loads, placed, of_ranks)):
        a, b = swap
        placed[a], placed[b] = placed[b], placed[a]
        of_ranks = _sums(loads, placed, ranks)
    moved = placed != list(owners)
    return placed if moved and before - _variation(of_ranks) >= threshold else None


def moving_average(
    before: Sequence[float] | None, now: Sequence[float], keep: float = 0.9
) -> list[float]:
    """keep before + (1 - keep) now; now where there is nothing before.

    Raises:
        ValueError: different lengths, or keep outside 0 to 1.
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"keep must be from 0 to 1, got {keep!r}")
    if before is None:
        return [float(new) for new in now]
    if len(before) != len(now):
        raise ValueError(f"{len(before)} loads before and {len(now)} now")
    return [keep * old + (1 - keep) * new for old, new in zip(before, now, strict=True)]


def _best_swap(
    loads: Sequence[float], owners: Sequence[int], of_ranks: Sequence[float]
) -> tuple[int, int] | None:
    """The experts; None: no two of them make the ranks more even."""
    ends = (of_ranks.index(max(of_ranks)), of_ranks.index(min(of_ranks)))
    found, best = None, -1e-12 * sum(of_ranks) ** 2  # beyond rounding
    for a in [e for e, rank in enumerate(owners) if rank in ends]:
        for b, rank in enumerate(owners):
            less = loads[a] - loads[b]
            # half of what the sum of squares changes by
            change = less * (less - of_ranks[owners[a]] + of_ranks[rank])
            if rank != owners[a] and change < best:
                found, best = (a, b), change
    return found


def _most_without(ends: Sequence[int], q: int, r: int) -> int:
    """The most copies at a rank, with one fewer at two of them."""
    return max(n - (at in (q, r)) for at, n in enumerate(ends))


def _packed(loads: Sequence[float], ranks: int) -> list[int]:
    """A rank for each, as many on each rank."""
    placed, of_ranks = [0] * len(loads), [0.0] * ranks
    room = [len(loads) // ranks] * ranks
    for at in sorted(range(len(loads)), key=lambda at: -loads[at]):
        rank = min((q for q in range(ranks) if room[q]), key=of_ranks.__getitem__)
        placed[at] = rank
        of_ranks[rank] += loads[at]
        room[rank] -= 1
    return placed


def _totals(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _sums(loads: Sequence[_Number], owners: Sequence[int], ranks: int) -> list[_Number]:
    """Of the experts of each rank."""
    found: list[_Number] = [0] * ranks
    for load, owner in zip(loads, owners, strict=True):
        found[owner] += load
    return found


def _variation(loads: Sequence[float]) -> float:
    """Standard deviation over mean; 0 where there are no rows at all."""
    mean = math.fsum(loads) / len(loads)
    if not mean:
        return 0.0
    return math.sqrt(math.fsum((load - mean) ** 2 for load in loads) / len(loads)) / mean


def _check_counts(counts: Sequence[Sequence[int]], owners: Sequence[int]) -> None:
    if not counts:
        raise ValueError(f"counts of no ranks: {counts!r}")
    for r, row in enumerate(counts):
        if len(row) != len(counts[0]):
            raise ValueError(f"counts of {len(counts[0])} experts on rank 0, of {len(row)} on {r}")
        if min(row, default=0) < 0:
            raise ValueError(f"counts must be 0 or more, got {min(row)} on rank {r}")
    _check_owners(owners, len(counts[0]), len(counts))


def _check_owners(owners: Sequence[int], experts: int, ranks: int) -> None:
    if len(owners) != experts:
        raise ValueError(f"{len(owners)} owners of {experts} experts")
    for e, owner in enumerate(owners):
        if not 0 <= owner < ranks:
            raise ValueError(f"owner of expert {e} is rank {owner}, of {ranks} ranks")


def _check_loads(loads: Sequence[float]) -> None:
    for e, load in enumerate(loads):
        if not (math.isfinite(load) and load >= 0):
            raise ValueError(f"load of expert {e} must be finite and not negative, got {load!r}")


def _check_slots(slots: int, ranks: int, what: str) -> None:
    if ranks < 1 or slots % ranks:
        raise ValueError(f"{slots} {what} on {ranks} ranks: each needs as many")
