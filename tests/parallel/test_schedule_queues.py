"""Which postings of receives a device gets through, by a model of its streams and queues."""

from __future__ import annotations

import re

import pytest
import torch

from accel.parallel.schedule import Schedule, with_transfers
from accel.parallel.schedule.names import INTERLEAVED, NAMED, named
from accel.parallel.schedule.queues import gets_through, posting
from accel.parallel.schedule.runtime import ON_HOST, Posting
from accel.patches._pipeline import Wanted

LATE, AT_ITS_TURN, EARLY = Posting(1, early=False), Posting(0, early=False), Posting(1, early=True)
NAMES = [INTERLEAVED, "1f1b", *NAMED]


def made(name: str, p: int, m: int = 0) -> Schedule:
    chunks = {INTERLEAVED: 2, "1f1b": 1}.get(name) or NAMED[name].chunks
    schedule = named(INTERLEAVED if name == "1f1b" else name, p, chunks, m or 2 * p)
    return with_transfers(schedule) if schedule.compute_only else schedule


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gets_through_one_queue(name: str, p: int) -> None:
    schedule = made(name, p)
    assert posting(schedule, sized=False, one_queue=True, first=False) == LATE
    assert not gets_through(schedule, ON_HOST), "a second receive is in the way of the passes"
    assert gets_through(schedule, ON_HOST, one_queue=False)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_that_are_loaded_wait_for_no_receive_of_later_values(name: str, p: int) -> None:
    """But in two schedules, where no posting is free of it."""
    schedule = made(name, p)
    for one_queue in (True, False):
        assert not gets_through(schedule, EARLY, one_queue=one_queue, loading=True)
    first = posting(schedule, sized=False, one_queue=False, first=True)
    safe = any(gets_through(schedule, first, one_queue=q, loading=True) for q in (True, False))
    assert safe or (name, p) == ("dualpipev", 4)
    expected = {"v-half": AT_ITS_TURN, "v-min": AT_ITS_TURN}
    assert first == expected.get(name, LATE)


def test_sizes_that_the_host_reads_are_one_more_message() -> None:
    for name in ("zb-h1", "1f1b"):
        assert posting(made(name, 4), sized=True, one_queue=True, first=True) == LATE
    assert posting(made(INTERLEAVED, 4), sized=True, one_queue=True, first=False) == EARLY
    for name, p in (("dualpipev", 3), (INTERLEAVED, 2)):
        schedule = made(name, p)
        with pytest.raises(ValueError, match=re.escape("would wait for each other on a device")):
            posting(schedule, sized=True, one_queue=True, first=False)
        assert posting(schedule, sized=True, one_queue=False, first=False) == LATE


def test_a_circle_of_two_ranks_is_found() -> None:
    """Each would receive before it sends, on its only queue."""
    schedule = made("1f1b", 2, 4)
    assert gets_through(schedule, EARLY)
    assert not gets_through(schedule, EARLY, loading=True)
    assert not gets_through(schedule, Posting(4, early=True))


def test_the_first_step_of_a_device_has_a_posting_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    wanted, schedule, gpu = Wanted(), made("v-min", 4), torch.device("cuda", 0)
    assert wanted.posting(schedule, torch.device("cpu"), sized=False) == ON_HOST
    steps = [wanted.posting(schedule, gpu, sized=False) for _ in range(3)]
    assert steps == [AT_ITS_TURN, LATE, LATE]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(
        ValueError, match=r"leave out CUDA_DEVICE_MAX_CONNECTIONS=1 .* take another"
    ):
        wanted.posting(made("dualpipev", 2), gpu, sized=True)
