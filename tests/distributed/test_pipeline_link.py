"""The link of a pipeline's ranks over gloo: order, sizes, what is kept, and ranks that go away."""

from __future__ import annotations

import gc
import os
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel.parallel.schedule import Kind, validate, with_transfers
from accel.parallel.schedule.link import GroupLink
from accel.parallel.schedule.measured import Found, Measurement
from accel.parallel.schedule.names import INTERLEAVED, NAMED, named
from accel.parallel.schedule.runtime import ON_HOST, Posting, run

from ..parallel.pipeline_stages import WIDTH, TanhStages, gradients_by_hand

CPU = torch.device("cpu")


def rank() -> int:
    return int(os.environ["RANK"])


def linked(shape: tuple[int, ...] = (4, WIDTH), **more: Any) -> GroupLink:
    up = dist.group.WORLD
    assert up is not None
    down = dist.new_group(list(range(dist.get_world_size())))
    return GroupLink(up, down, shape, torch.float32, CPU, **more)


@pytest.mark.parametrize("name", [INTERLEAVED, *NAMED])
@pytest.mark.distributed(world_size=2)
def test_gradients_are_those_of_one_rank(name: str, gloo_group: None) -> None:
    chunks = 2 if name == INTERLEAVED else NAMED[name].chunks
    schedule = with_transfers(named(name, 2, chunks, 6))
    validate(schedule)
    for sized in (False, True):
        stages, link = TanhStages(schedule, rank()), linked(sized=sized)
        run(schedule, rank(), stages, link)
        _, expected = gradients_by_hand(schedule.num_stages, 6)
        for stage, weight in stages.weights.items():
            assert weight.grad is not None
            assert torch.equal(weight.grad, expected[stage])


@pytest.mark.distributed(world_size=2)
def test_values_of_any_size_come_in_their_order(gloo_group: None) -> None:
    link = linked(sized=True)
    sizes = [(3, 1, 2), (5,), (0, 4), (), (1, 2, 3, 4)]
    if rank() == 0:
        for at, size in enumerate(sizes):
            link.send(1, torch.full(size, float(at)))
    else:
        waits = [link.expect(0) for _ in sizes]
        # the last one first: it waits for those before it
        values = [wait() for wait in reversed(waits)][::-1]
        assert [tuple(value.shape) for value in values] == sizes
        assert all(bool((value == at).all()) for at, value in enumerate(values))
    link.finish()


@pytest.mark.distributed(world_size=2)
def test_another_shape_is_one_line(gloo_group: None) -> None:
    link = linked()
    with pytest.raises(ValueError, match=r"shape \[3, 8\], the pipeline sends \[4, 8\]"):
        link.send(1 - rank(), torch.zeros(3, WIDTH))
    link.finish()


@pytest.mark.distributed(world_size=2)
def test_a_value_is_kept_until_it_is_gone_and_no_longer(gloo_group: None) -> None:
    link = linked()
    if rank() == 0:
        values = [torch.full((4, WIDTH), float(i)) for i in range(3)]
        held = [weakref.ref(value) for value in values]
        for value in values:
            link.send(1, value)
        del value, values
        gc.collect()
        assert held[-1]() is not None  # nobody has asked for it yet
        dist.barrier()
        link.finish()
        gc.collect()
        assert [ref() for ref in held] == [None] * 3
    else:
        dist.barrier()
        assert [float(link.expect(0)()[0, 0]) for _ in range(3)] == [0.0, 1.0, 2.0]
        link.finish()


@pytest.mark.distributed(world_size=2)
def test_a_value_that_never_comes_is_an_error_within_the_groups_time(gloo_group: None) -> None:
    brief = timedelta(seconds=10)  # in which the ranks must meet, too
    up, down = (dist.new_group([0, 1], timeout=brief) for _ in range(2))
    link = GroupLink(up, down, (4, WIDTH), torch.float32, CPU)
    link.connect()
    if rank() == 1:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            link.expect(0)()
        link.abandon()
    dist.barrier()


@pytest.mark.distributed(world_size=2)
def test_another_dtype_is_one_line(gloo_group: None) -> None:
    link = linked()
    with pytest.raises(ValueError, match=r"torch\.bfloat16, the pipeline sends torch\.float32"):
        link.send(1 - rank(), torch.zeros(4, WIDTH, dtype=torch.bfloat16))
    link.finish()


class HandClock:
    """Shows what `at` says."""

    def __init__(self, at: list[float]) -> None:
        self.at = at

    def stamp(self) -> float:
        return self.at[0]

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def allocated(self) -> int:
        return int(self.at[0])


@pytest.mark.distributed(world_size=2)
def test_two_steps_are_measured_and_told_once(gloo_group: None) -> None:
    told: list[Found] = []
    clock = HandClock([0.0])
    measurement = Measurement(lambda device: clock, lambda schedule, found: told.append(found))
    schedule = with_transfers(named("zb-v", 2, 2, 5))
    held = []
    for step in range(7):
        stages = TanhStages(schedule, rank())
        held.append(weakref.ref(stages))
        measurement.run(schedule, rank(), stages, linked(), posting=ON_HOST)
        assert len(told) == (step >= 3)
        assert not stages.later
    del stages
    gc.collect()
    assert not any(ref() for ref in held)
    (found,) = told
    found.times.check(4)
    assert found.times.bytes >= 0


@pytest.mark.distributed(world_size=2)
def test_times_are_those_of_the_passes(gloo_group: None) -> None:
    """With a clock that each pass turns on."""
    clock = [0.0]
    told: list[Found] = []
    schedule = with_transfers(named("zb-h1", 2, 1, 4))
    takes = {Kind.FORWARD: 3.0, Kind.BACKWARD_INPUT: 5.0, Kind.BACKWARD_WEIGHT: 2.0}

    class Timed(TanhStages):
        def forward(self, action: Any, *args: Any) -> Any:
            clock[0] += takes[action.kind] * (1 + rank())
            return super().forward(action, *args)

        def backward(self, action: Any, *args: Any) -> Any:
            clock[0] += takes[action.kind]
            return super().backward(action, *args)

        def backward_weight(self, action: Any) -> None:
            clock[0] += takes[action.kind]
            super().backward_weight(action)

    by_hand = HandClock(clock)
    by_hand = HandClock(clock)
    measurement = Measurement(lambda device: by_hand, lambda schedule, found: told.append(found))
    for _ in range(4):
        measurement.run(
            schedule, rank(), Timed(schedule, rank()), linked(), posting=Posting(1, early=False)
        )
    times = told[0].times
    assert (times.forward, times.backward, times.weight) == ([3.0, 6.0], [7.0, 7.0], [2.0, 2.0])
    assert told[0].num_bytes == ((3.0,), (6.0,))
    assert told[0].step > 0
