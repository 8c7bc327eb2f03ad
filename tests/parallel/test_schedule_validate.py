"""Schedules as data, and what is wrong with broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.parallel.schedule import (
    Action,
    Deadlock,
    Kind,
    Message,
    Placement,
    Schedule,
    Times,
    dualpipe_v,
    forward_only,
    interleaved,
    one_f_one_b,
    simulate,
    v_half,
    validate,
    with_transfers,
    zb_h1,
    zb_v,
)

F, B = Kind.FORWARD, Kind.BACKWARD
B_IN, W = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
SF, RF, SB, RB = (
    Kind.SEND_FORWARD,
    Kind.RECEIVE_FORWARD,
    Kind.SEND_BACKWARD,
    Kind.RECEIVE_BACKWARD,
)

BUILT = {
    "1f1b": one_f_one_b(3, 4),
    "interleaved": interleaved(2, 3, 4, extra_warmup=1),
    "zb_h1": zb_h1(3, 5),
    "zb_v": zb_v(2, 4),
    "v_half": v_half(3, 4),
    "dualpipe_v": dualpipe_v(2, 5),
    "forward": forward_only(3, 2, 3),
}


@pytest.mark.parametrize("name", BUILT)
def test_json_and_back(name: str) -> None:
    for schedule in (BUILT[name], with_transfers(BUILT[name])):
        again = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
        assert again == schedule
        assert again.to_dict() == schedule.to_dict()


def test_placements() -> None:
    loop = Schedule(3, 2, 1, Placement.LOOP, ((), (), ()))
    turned = Schedule(3, 3, 1, Placement.V, ((), (), ()))
    assert [[loop.stage(r, c) for c in (0, 1)] for r in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [[turned.stage(r, c) for c in range(3)] for r in range(3)] == [
        [0, 5, 6],
        [1, 4, 7],
        [2, 3, 8],
    ]
    for schedule in (loop, turned):
        for stage in range(schedule.num_stages):
            assert schedule.stage(*schedule.owner(stage)) == stage
    assert loop.needs(0, Action(F, 0, 0)) is None
    assert loop.needs(0, Action(F, 0, 1)) == Message(True, 0, 2)
    assert loop.ends(Message(True, 0, 2)) == (2, 0)
    assert turned.ends(Message(True, 0, 2)) == (2, 2)
    assert turned.ends(Message(False, 0, 4)) == (1, 2)
    assert turned.makes(0, Action(B, 0, 0)) is None


GOOD = one_f_one_b(2, 2).to_dict()
BAD_DATA = [
    ({"ranks": 3}, "ranks must be a list, got 3"),
    ({"ranks": [[], 3]}, "rank 1: its actions must be a list, got 3"),
    ({"ranks": [[], [["forward", 0, 0], ["forwad", 1, 0]]]}, "rank 1, position 1: .*'forwad'"),
    ({"ranks": [[["forward", 0]], []]}, r"rank 0, position 0: .* got \['forward', 0\]"),
    ({"ranks": [[["forward", 2, 0]], []]}, "rank 0, position 0: micro_batch .* 0 to 1, got 2"),
    ({"ranks": [[["forward", "1", 0]], []]}, "rank 0, position 0: micro_batch .* got '1'"),
    ({"ranks": [[["forward", True, 0]], []]}, "rank 0, position 0: micro_batch .* got True"),
    ({"ranks": [[["forward", 0, -1]], []]}, "rank 0, position 0: chunk .* 0 to 0, got -1"),
    ({"ranks": [[[["forward"], 0, 0]], []]}, r"rank 0, position 0: kind .* got \['forward'\]"),
    ({"ranks": [[]]}, "2 ranks, but the actions of 1"),
    ({"num_chunks": 0}, "num_chunks must be .* got 0"),
    ({"num_micro_batches": 2.0}, "num_micro_batches must be .* got 2.0"),
    ({"placement": "w"}, "placement must be one of loop, v, got 'w'"),
    ({"more": 1}, "has the keys .*'more'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_DATA)
def test_bad_data(change: dict, message: str) -> None:
    assert Schedule.from_dict(GOOD) == one_f_one_b(2, 2)
    with pytest.raises(ValueError, match=message):
        Schedule.from_dict({**GOOD, **change})


def edited(schedule: Schedule, rank: int, edit: Callable[[list[Action]], object]) -> Schedule:
    own = list(schedule.ranks[rank])
    edit(own)
    return replace(
        schedule, ranks=(*schedule.ranks[:rank], tuple(own), *schedule.ranks[rank + 1 :])
    )


def swap(first: Action, second: Action) -> Callable[[list[Action]], None]:
    def edit(own: list[Action]) -> None:
        at, to = own.index(first), own.index(second)
        own[at], own[to] = second, first

    return edit


def drop(action: Action) -> Callable[[list[Action]], None]:
    return lambda own: own.remove(action)


def add(action: Action) -> Callable[[list[Action]], None]:
    return lambda own: own.append(action)


FULL = with_transfers(one_f_one_b(2, 3))
BROKEN = [
    (
        "missing forward",
        FULL,
        0,
        drop(Action(F, 2, 0)),
        r"rank 0, forward\(micro-batch 2, chunk 0\): is missing",
    ),
    (
        "missing backward",
        FULL,
        1,
        drop(Action(B, 1, 0)),
        r"rank 1, backward\(micro-batch 1.*is missing",
    ),
    (
        "missing weight",
        zb_h1(2, 3),
        1,
        drop(Action(W, 1, 0)),
        r"rank 1, backward_weight\(micro-batch 1.*is missing, backward_input",
    ),
    (
        "missing input",
        zb_h1(2, 3),
        1,
        drop(Action(B_IN, 1, 0)),
        r"rank 1, backward_input\(micro-batch 1.*is missing, backward_weight",
    ),
    (
        "two ways",
        FULL,
        0,
        add(Action(B_IN, 1, 0)),
        r"rank 0, backward_input\(micro-batch 1.*is there beside backward\(",
    ),
    ("twice", FULL, 0, add(Action(B, 1, 0)), r"rank 0, backward\(micro-batch 1.*is there 2 times"),
    (
        "missing receive",
        FULL,
        1,
        drop(Action(RF, 1, 0)),
        r"rank 0, send_forward\(micro-batch 1.*rank 1 has no receive",
    ),
    (
        "missing send",
        FULL,
        1,
        drop(Action(SB, 2, 0)),
        r"rank 0, receive_backward\(micro-batch 2.*rank 1 has no send",
    ),
    (
        "order of receives",
        FULL,
        0,
        swap(Action(RB, 0, 0), Action(RB, 1, 0)),
        r"rank 0, receive_backward\(micro-batch 1.*rank 1 sends send_backward\(micro-batch 0",
    ),
    (
        "order of sends",
        FULL,
        0,
        swap(Action(SF, 0, 0), Action(SF, 1, 0)),
        r"rank 1, receive_forward\(micro-batch 0.*rank 0 sends send_forward\(micro-batch 1",
    ),
    (
        "send before",
        FULL,
        0,
        swap(Action(F, 0, 0), Action(SF, 0, 0)),
        r"rank 0, send_forward\(micro-batch 0.*must come behind what it sends",
    ),
    (
        "receive behind",
        FULL,
        1,
        swap(Action(RF, 0, 0), Action(F, 0, 0)),
        r"rank 1, forward\(micro-batch 0.*which is received from rank 0",
    ),
    (
        "backward first",
        FULL,
        1,
        swap(Action(F, 1, 0), Action(B, 1, 0)),
        r"rank 1, backward\(micro-batch 1.*must come behind forward\(micro-batch 1",
    ),
    (
        "weight first",
        zb_h1(2, 3),
        1,
        swap(Action(B_IN, 2, 0), Action(W, 2, 0)),
        r"rank 1, backward_weight\(micro-batch 2.*must come behind backward_input",
    ),
    (
        "turn",
        zb_v(2, 3),
        1,
        swap(Action(F, 0, 0), Action(F, 0, 1)),
        r"rank 1, forward\(micro-batch 0, chunk 1\): .* which is computed",
    ),
    (
        "beyond the ends",
        FULL,
        0,
        add(Action(RF, 0, 0)),
        r"rank 0, receive_forward\(micro-batch 0.*beyond the model's ends",
    ),
    (
        "within a rank",
        with_transfers(zb_v(2, 3)),
        1,
        add(Action(SF, 0, 0)),
        r"rank 1, send_forward\(micro-batch 0, chunk 0\): is a transfer within one rank",
    ),
]


@pytest.mark.parametrize(
    ("schedule", "rank", "edit", "message"),
    [case[1:] for case in BROKEN],
    ids=[case[0].replace(" ", "-") for case in BROKEN],
)
def test_broken_by_hand(
    schedule: Schedule, rank: int, edit: Callable[[list[Action]], object], message: str
) -> None:
    validate(schedule)
    broken = edited(schedule, rank, edit)
    with pytest.raises(ValueError, match=message):
        validate(broken)
    with pytest.raises(ValueError, match=message):
        simulate(broken, Times(1, 2, 1))


def test_missing_both_ends() -> None:
    broken = edited(FULL, 0, drop(Action(SF, 1, 0)))
    broken = edited(broken, 1, drop(Action(RF, 1, 0)))
    message = r"rank 1, forward\(micro-batch 1, chunk 0\): .* is received from rank 0"
    with pytest.raises(ValueError, match=message):
        validate(broken)


def test_deadlock() -> None:
    """Rank 0 wants a gradient before it makes the forward that rank 1 wants before it."""
    schedule = one_f_one_b(2, 2)
    own = (Action(F, 0, 0), Action(B, 0, 0), Action(F, 1, 0), Action(B, 1, 0))
    late = (Action(F, 0, 0), Action(F, 1, 0), Action(B, 0, 0), Action(B, 1, 0))
    validate(replace(schedule, ranks=(own, own)))
    message = (
        r"rank 0, receive_backward\(micro-batch 0, chunk 0\): waits for rank 1; "
        r"rank 1, receive_forward\(micro-batch 1, chunk 0\): waits for rank 0: deadlock"
    )
    with pytest.raises(Deadlock, match=message):
        validate(replace(schedule, ranks=(own, late)))
    with pytest.raises(ValueError, match=message):
        simulate(replace(schedule, ranks=(own, late)), Times(1, 2, 1))


def test_buffering() -> None:
    """Both ranks send and then receive: well with buffers, and not where sends wait in their turn."""
    ring = interleaved(4, 2, 8)
    for right in (one_f_one_b(4, 8), with_transfers(ring, paired=True)):
        simulate(right, Times(1, 2, 1), overlap=False)
    validate(ring)
    with pytest.raises(Deadlock, match=r"rank 0, send_.*waits for rank"):
        simulate(ring, Times(1, 2, 1), overlap=False)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(BUILT)), st.data())
def test_any_action_that_is_lost_is_missed(name: str, data: st.DataObject) -> None:
    schedule = with_transfers(BUILT[name])
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    action = data.draw(st.sampled_from(schedule.ranks[rank]))
    with pytest.raises(ValueError, match=r"^rank \d, \w+\(micro-batch \d, chunk \d\): \w+"):
        validate(edited(schedule, rank, drop(action)))
