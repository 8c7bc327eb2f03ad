"""benchmarks/lab/limited.py: data is intact, and no operation is done before its bytes are through."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel.testing.distributed import under_torchrun
from benchmarks._step_collectives import asked_by, collectives_as, here
from benchmarks.lab.limited import Limit, LimitedWork, limit

RATE = 4e6
COUNT = 100_000
SECONDS = 4 * COUNT / RATE
"""Of COUNT floats."""


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    if not under_torchrun():
        yield
        return
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def mine() -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32) + dist.get_rank()


def seconds_of(operation: Callable[..., LimitedWork | None], *args: Any, **kwargs: Any) -> float:
    """From where it is asked for until it is done."""
    dist.barrier()
    begin = time.monotonic()
    work = operation(*args, **kwargs)
    if work is not None:
        work.wait()
        assert work.is_completed()
    return time.monotonic() - begin


@pytest.mark.distributed(world_size=2)
def test_messages_take_their_time_one_after_another() -> None:
    sends, parts = dist.get_rank() == 0, [torch.empty(COUNT) for _ in range(2)]
    with limit(RATE) as limited:
        assert limited.kind == "rate-limited wrapper"
        dist.barrier()
        begin = time.monotonic()
        works = [
            dist.isend(mine() + number, 1) if sends else dist.irecv(part, 0)
            for number, part in enumerate(parts)
        ]
        for number, work in enumerate(works, start=1):
            work.wait()
            assert time.monotonic() - begin >= number * SECONDS
    if not sends:
        for number, part in enumerate(parts):
            assert torch.equal(part, mine() - 1 + number)


@pytest.mark.distributed(world_size=2)
def test_receiver_knows_when_the_sender_began() -> None:
    """It asks early, and waits as long as the sender is late."""
    late = 3 * SECONDS
    with limit(RATE):
        begin = time.monotonic()
        dist.barrier()  # the sender's sleep begins after it
        if dist.get_rank() == 0:
            time.sleep(late)
            dist.isend(mine(), group_dst=1).wait()
        else:
            dist.irecv(torch.empty(COUNT), group_src=0).wait()
            assert time.monotonic() - begin >= late + SECONDS


@pytest.mark.distributed(world_size=2)
def test_directions_are_links_of_their_own() -> None:
    other, received = 1 - dist.get_rank(), torch.empty(COUNT)
    with limit(RATE / 10):
        begin = time.monotonic()
        dist.barrier()
        ops = [dist.P2POp(dist.isend, mine(), other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert 10 * SECONDS <= time.monotonic() - begin < 20 * SECONDS, (
            "one after the other takes so long"
        )
    assert torch.equal(received, mine() - dist.get_rank() + other)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.distributed(world_size=2)
def test_collectives(async_op: bool) -> None:
    both, half = torch.empty(2 * COUNT), torch.empty(COUNT)
    listed = [torch.empty(COUNT) for _ in range(2)]
    summed, swapped = mine(), torch.empty(COUNT)
    took = functools.partial(seconds_of, async_op=async_op)
    with limit(RATE):
        assert took(dist.all_gather_into_tensor, both, mine()) >= SECONDS
        assert took(dist.all_gather, listed, mine()) >= SECONDS
        assert took(dist.reduce_scatter_tensor, half, both.clone()) >= SECONDS
        assert took(dist.all_reduce, summed) >= SECONDS
        assert took(dist.all_to_all_single, swapped, mine()) >= SECONDS / 2
    numbers, rank = torch.arange(COUNT, dtype=torch.float32), dist.get_rank()
    assert torch.equal(both, torch.cat([numbers, numbers + 1]))
    assert torch.equal(both, torch.cat(listed))
    assert torch.equal(half, 2 * (numbers + rank))
    assert torch.equal(summed, 2 * numbers + 1)
    part = numbers.chunk(2)[rank]
    assert torch.equal(swapped, torch.cat([part, part + 1]))


@pytest.mark.distributed(world_size=2)
def test_last_rank_starts_a_collective() -> None:
    late = 3 * SECONDS
    with limit(RATE):
        begin = time.monotonic()
        dist.barrier()  # the sleep begins after it
        time.sleep(late * dist.get_rank())
        dist.all_reduce(mine())
        assert time.monotonic() - begin >= late + SECONDS


@pytest.mark.distributed(world_size=2)
def test_uneven_all_to_all_counts_what_leaves_the_rank() -> None:
    keeps, leaves = [COUNT, 0], [0, COUNT]
    splits = [np.array(keeps if dist.get_rank() == 0 else leaves)] * 2  # as Megatron gives them
    out = torch.empty(COUNT)
    with limit(RATE / 100):
        dist.all_to_all_single(out, mine(), *splits)  # nothing: would take 10 s
    assert torch.equal(out, mine())


all_gather_of_megatron = dist.all_gather_into_tensor
"""Its modules have some by names of their own."""


@pytest.mark.distributed(world_size=2)
def test_none_that_moves_data_travels_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {name: getattr(dist, name) for name in distributed_c10d.__all__}
    waits = {
        name: function
        for name, function in functions.items()
        if inspect.isfunction(function) and "async_op" in inspect.signature(function).parameters
    }
    del waits["barrier"]
    assert {"all_gather", "all_reduce", "broadcast", "reduce_scatter_tensor"} < set(waits)
    both, counted = torch.empty(2 * COUNT), []
    with limit(1e12) as limited:
        for name, function in waits.items():
            assert getattr(dist, name) is getattr(distributed_c10d, name) is not function
        occupy = limited.occupy
        monkeypatch.setattr(limited, "occupy", lambda link, n: counted.append(n) or occupy(link, n))
        dist.all_gather(list(both.chunk(2)), mine())
        all_gather_of_megatron(both, mine())  # made of another function, and counted once
        dist.all_gather_object([None, None], "tells sizes, then bytes")
        assert counted[:3] == [4 * COUNT, 4 * COUNT, 8]
        assert len(counted) == 4
        for name, given in {
            "broadcast": (both, 0),
            "reduce": (both, 0),
            "all_to_all": ([both], [both]),
            "broadcast_object_list": ([None], 0),
        }.items():
            with pytest.raises(NotImplementedError, match="is not limited; these are: isend"):
                getattr(dist, name)(*given)


@pytest.mark.distributed(world_size=2)
def test_nothing_is_left_patched() -> None:
    names = ("isend", "irecv", "all_reduce", "all_gather_into_tensor", "all_to_all_single")
    before = [getattr(dist, name) for name in names]

    def failing() -> None:
        with limit(RATE):
            assert dist.isend is not before[0]
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert [getattr(dist, name) for name in names] == before
    assert distributed_c10d.isend is dist.isend


@pytest.mark.distributed(world_size=2)
def test_collectives_of_a_step_alone_and_none_of_them() -> None:
    both, half, summed = torch.empty(2 * COUNT), torch.empty(COUNT), mine()

    def step() -> None:
        work = dist.all_gather_into_tensor(both, mine(), async_op=True)
        assert work is not None
        work.wait()
        dist.reduce_scatter_tensor(half, both.clone())
        dist.all_reduce(summed)

    with collectives_as(here) as within:
        within(step)()
        dist.all_reduce(ranks := torch.ones(1))  # not of the step
    assert ranks.item() == 2
    assert torch.equal(both, torch.cat([mine(), mine()]))
    assert torch.equal(half, mine())
    assert torch.equal(summed, mine())
    alone = asked_by(step)
    numbers = torch.arange(COUNT, dtype=torch.float32)
    assert torch.equal(both, torch.cat([numbers, numbers + 1]))
    assert torch.equal(summed, 2 * numbers + 1)
    counted: list[float] = []
    with limit(1e12) as limited, pytest.MonkeyPatch.context() as patch:
        occupy = limited.occupy
        patch.setattr(limited, "occupy", lambda link, n: counted.append(n) or occupy(link, n))
        asked_by(step)()
    alone()
    assert counted == [4 * COUNT] * 6
    assert torch.equal(summed, 4 * numbers + 2), "of zeros"


def test_link_is_free_after_the_last_byte() -> None:
    limited = Limit(1e6)
    begin = time.monotonic()
    first, second = (limited.occupy("link", 1e6).item() for _ in range(2))
    assert first >= begin + 1
    assert second == pytest.approx(first + 1)
    assert limited.occupy("other", 1e6).item() < second
    with pytest.raises(ValueError, match="more than 0"):
        Limit(0)
