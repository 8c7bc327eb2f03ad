"""The executor, with ranks that are threads: every schedule gives the gradients of one rank, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from queue import Queue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.parallel.schedule import Event, Schedule, forward_only, validate, with_transfers
from accel.parallel.schedule.names import INTERLEAVED, NAMED, named, named_forward_only
from accel.parallel.schedule.runtime import ON_HOST, Posting, run

from .pipeline_stages import TanhStages, gradients_by_hand

SECONDS = 300
"""Only a hang needs them."""


class Queues:
    """Links between threads; receives take the values in the order in which they were posted.

    The queues are made before the threads: of two that make one at once, one would fill a lost one.
    """

    def __init__(self, num_ranks: int) -> None:
        self.queues: dict[tuple[int, int], Queue[Tensor]] = {
            pair: Queue() for pair in product(range(num_ranks), repeat=2)
        }
        self.came: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.turns: dict[tuple[int, int], int] = defaultdict(int)
        self.posted: dict[int, int] = defaultdict(int)
        """Receives of each rank that are not waited for."""
        self.most: dict[int, int] = defaultdict(int)

    def of(self, rank: int) -> QueueLink:
        return QueueLink(self, rank)


class QueueLink:
    def __init__(self, queues: Queues, rank: int) -> None:
        self.queues, self.rank = queues, rank
        self.finished = self.abandoned = False

    def send(self, target: int, value: Tensor) -> None:
        assert not value.requires_grad
        self.queues.queues[self.rank, target].put(value)

    def expect(self, source: int) -> Callable[[], Tensor]:
        queues, pair = self.queues, (source, self.rank)
        turn = queues.turns[pair]
        queues.turns[pair] += 1
        queues.posted[self.rank] += 1
        queues.most[self.rank] = max(queues.most[self.rank], queues.posted[self.rank])

        def wait() -> Tensor:
            queues.posted[self.rank] -= 1
            while len(queues.came[pair]) <= turn:
                queues.came[pair].append(queues.queues[pair].get(timeout=SECONDS))
            return queues.came[pair][turn]

        return wait

    def finish(self) -> None:
        self.finished = True

    def abandon(self) -> None:
        self.abandoned = True


def trained(schedule: Schedule, posting: Posting = ON_HOST) -> tuple[list[TanhStages], Queues]:
    stages = [TanhStages(schedule, r) for r in range(schedule.num_ranks)]
    queues = Queues(schedule.num_ranks)
    links = [queues.of(r) for r in range(schedule.num_ranks)]
    with ThreadPoolExecutor(schedule.num_ranks) as threads:
        runs = [
            threads.submit(run, schedule, r, stages[r], links[r], posting=posting)
            for r in range(schedule.num_ranks)
        ]
        for each in runs:
            each.result(timeout=SECONDS)
    assert all(link.finished for link in links)
    assert all(queue.empty() for queue in queues.queues.values())
    return stages, queues


def check(schedule: Schedule, posting: Posting = ON_HOST) -> None:
    validate(schedule)
    stages, _ = trained(schedule, posting)
    losses, gradients = gradients_by_hand(schedule.num_stages, schedule.num_micro_batches)
    found = {stage: own.weights[stage].grad for own in stages for stage in own.stages}
    for stage, expected in enumerate(gradients):
        assert torch.equal(found[stage], expected), f"stage {stage}"
    (last,) = (own for own in stages if schedule.num_stages - 1 in own.stages)
    assert [last.losses[i] for i in range(schedule.num_micro_batches)] == losses
    assert not any(own.later for own in stages)


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("name", [INTERLEAVED, "1f1b", *NAMED])
def test_gradients_are_those_of_one_rank(name: str, ahead: int, early: bool) -> None:
    chunks = {INTERLEAVED: 2, "1f1b": 1}.get(name) or NAMED[name].chunks
    asked = INTERLEAVED if name == "1f1b" else name
    schedule = named(asked, 4, chunks, 9 if name != INTERLEAVED else 8)
    check(with_transfers(schedule), Posting(ahead, early))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_of_any_counts(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([INTERLEAVED, *NAMED]))
    p = data.draw(st.integers(1, 4))
    if name == INTERLEAVED:
        v = data.draw(st.integers(2, 3))
        groups = data.draw(st.integers(1, 2))
        size = data.draw(st.integers(p, p + 2))
        extra = data.draw(st.integers(0, 3))
        schedule = named(name, p, v, groups * size, size, extra)
    else:
        schedule = named(name, p, NAMED[name].chunks, data.draw(st.integers(2 * p, 2 * p + 4)))
    posting = Posting(data.draw(st.integers(0, 3)), data.draw(st.booleans()))
    check(with_transfers(schedule), posting)


@pytest.mark.parametrize("name", [INTERLEAVED, "zb-v"])
def test_forwards_alone_hold_nothing(name: str) -> None:
    schedule = with_transfers(named_forward_only(name, 2, 2, 4))
    stages, _ = trained(schedule)
    losses, _ = gradients_by_hand(4, 4)
    assert [loss for own in stages for _, loss in sorted(own.losses.items())] == losses
    assert all(weight.grad is None for own in stages for weight in own.weights.values())


def test_receives_are_posted_ahead_and_no_further() -> None:
    schedule = with_transfers(forward_only(2, 1, 12))
    for ahead, most in ((0, 1), (2, 3)):
        _, queues = trained(schedule, Posting(ahead, early=True))
        assert queues.most[1] == most


def test_each_computation_is_told_with_its_time() -> None:
    schedule = with_transfers(named(INTERLEAVED, 1, 2, 3))
    events: list[Event] = []
    run(schedule, 0, TanhStages(schedule, 0), Queues(1).of(0), record=events.append)
    computed = [event.action for event in events if event.action.kind.computes]
    assert computed == [a for a in schedule.ranks[0] if a.kind.computes]
    assert all(0 < event.start < event.end for event in events)
    assert all(a.start <= b.start for a, b in pairwise(events))


def test_outputs_that_went_away_are_told_once() -> None:
    """Also those for the next chunk of the same rank, where a V turns."""
    schedule = with_transfers(named("zb-v", 2, 2, 4))
    stages, _ = trained(schedule)
    assert [own.sent_ones for own in stages] == [4, 8]


def test_a_stage_that_gives_nothing_is_named() -> None:
    schedule = with_transfers(named(INTERLEAVED, 1, 2, 1))
    stages = TanhStages(schedule, 0)
    stages.backward = lambda *args: None  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=r"rank 0, backward\(micro-batch 0, chunk 1\): gave nothing"
    ):
        run(schedule, 0, stages, Queues(1).of(0))


def test_a_stage_that_fails_ends_the_run() -> None:
    schedule = with_transfers(named(INTERLEAVED, 1, 2, 2))
    stages = TanhStages(schedule, 0)

    def fails(*args: object) -> Tensor:
        raise FloatingPointError("overflow")

    stages.forward = fails  # type: ignore[method-assign]
    link = Queues(1).of(0)
    with pytest.raises(FloatingPointError, match="overflow"):
        run(schedule, 0, stages, link)
    assert (link.finished, link.abandoned) == (False, True)
