"""Schedules by name: each is right for any size, and equal to those that others run."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel.parallel.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    Times,
    dualpipe_v,
    forward_only,
    in_flight,
    interleaved,
    one_f_one_b,
    simulate,
    v_half,
    v_min,
    validate,
    with_transfers,
    zb_h1,
    zb_v,
)

Build = Callable[[int, int], Schedule]

ranks = st.integers(1, 6)


def groups(p: int, m: int) -> list[int]:
    """Sizes that Megatron takes: it wants p or more in each group, and p or more or none in what is left."""
    return [g for g in range(p, m + 1) if m % g == 0 or m % g >= p]


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """p, v, m, group size, extra warm-up."""
    p, v = draw(ranks), draw(st.integers(2, 4))
    m = draw(st.integers(p, 4 * p))
    return p, v, m, draw(st.sampled_from(groups(p, m))), draw(st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([one_f_one_b, zb_h1, zb_v, v_half, v_min, dualpipe_v]),
    ranks,
    st.integers(1, 20),
)
def test_every_size_is_right(build: Build, p: int, m: int) -> None:
    assume(build is not dualpipe_v or m >= 2 * p)
    schedule = build(p, m)
    most = {
        one_f_one_b: [min(m, p - r) for r in range(p)],
        zb_h1: p,
        zb_v: 2 * p,
        v_half: 2 * (p // 2 + 1),
        v_min: 2 * ((p + 1) // 3 + 1),
        dualpipe_v: 2 * p + 1,
    }[build]
    held, bounds = in_flight(schedule), most if isinstance(most, list) else [most] * p
    assert all(has <= bound for has, bound in zip(held, bounds, strict=True))
    assert (schedule.num_ranks, schedule.num_micro_batches) == (p, m)
    if m >= 2 * p and build is not one_f_one_b and build is not v_min:
        assert max(held) == most
    for paired in (False, True):
        validate(with_transfers(schedule, paired=paired))


@settings(max_examples=60, deadline=None)
@given(interleavings())
def test_interleaved_is_right(case: tuple[int, int, int, int, int]) -> None:
    p, v, m, g, k = case
    schedule = interleaved(p, v, m, g, k)
    warmup = [min(m * v, 2 * (p - r - 1) + (v - 1) * g + k) for r in range(p)]
    assert in_flight(schedule) == [min(m * v, each + 1) for each in warmup]
    validate(schedule)
    if g == p:  # right where sends wait, too
        simulate(with_transfers(schedule, paired=True), Times(1, 2, 1), overlap=False)
    validate(forward_only(p, v, m, g))


@settings(max_examples=60, deadline=None)
@given(ranks, st.integers(1, 12))
def test_forward_only_is_right(p: int, m: int) -> None:
    validate(forward_only(p, 1, m))
    schedule = forward_only(p, 2, m, placement=Placement.V)
    assert schedule.forward_only
    validate(schedule)


def megatron_order(p: int, v: int, m: int, g: int, rank: int, extra: bool) -> list[tuple]:
    """(kind, micro-batch, chunk) as Megatron's own functions have them."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    group = SimpleNamespace(size=lambda: p, rank=lambda: rank)
    total, _, warmup, remaining = schedules.get_pp_rank_microbatches(
        m,
        v,
        g,
        overlap_moe_expert_parallel_comm=extra,
        p2p_communicator=SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=v if v > 1 else None
        ),
    )
    assert total == warmup + remaining
    table = schedules.get_schedule_table(m, v, g)
    order = convert_schedule_table_to_order(warmup, v, table)
    # the order has chunks only: positive for a forward; the table has their micro-batches, and the backwards'
    micro_batches = [i for i, _ in table]
    forwards, backwards = iter(micro_batches), iter(micro_batches)
    return [
        (Kind.FORWARD, next(forwards), each - 1)
        if each > 0
        else (Kind.BACKWARD, next(backwards), -each - 1)
        for each in order
    ]


@settings(max_examples=60, deadline=None)
@given(interleavings())
def test_interleaved_is_megatrons(case: tuple[int, int, int, int, int]) -> None:
    p, v, m, g, k = case
    assume(p > 1)
    k = min(k, 1)  # Megatron's own is for the all-to-all of experts
    schedule = interleaved(p, v, m, g, k)
    for rank, actions in enumerate(schedule.ranks):
        ours = [(a.kind, a.micro_batch, a.chunk) for a in actions]
        assert ours == megatron_order(p, v, m, g, rank, extra=k == 1)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 3), (4, 8)])
def test_one_f_one_b_is_megatrons(p: int, m: int) -> None:
    for rank, actions in enumerate(one_f_one_b(p, m).ranks):
        ours = [(a.kind, a.micro_batch, a.chunk) for a in actions]
        assert ours == megatron_order(p, 1, m, m, rank, extra=False)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 9), (8, 32)])
def test_dualpipe_v_is_torchs(p: int, m: int) -> None:
    """Each of its overlapped actions is a forward and a backward of ours."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    theirs = ScheduleDualPipeV.__new__(ScheduleDualPipeV)
    theirs.pp_group_size, theirs._n_microbatches, theirs.num_stages = p, m, 2 * p
    kinds = {
        "FORWARD": Kind.FORWARD,
        "FULL_BACKWARD": Kind.BACKWARD,
        "BACKWARD_INPUT": Kind.BACKWARD_INPUT,
        "BACKWARD_WEIGHT": Kind.BACKWARD_WEIGHT,
    }
    schedule = dualpipe_v(p, m)
    for rank, actions in enumerate(schedule.ranks):
        expected = [
            Action(
                kinds[each.computation_type.name],
                each.microbatch_index,
                int(each.stage_index != rank),
            )
            for action in theirs._calculate_single_rank_operations(rank)
            if action is not None
            for each in (action.sub_actions or [action])
        ]
        assert list(actions) == expected, rank


@settings(max_examples=60, deadline=None)
@given(interleavings())
def test_extra_warmup_takes_a_forward_and_a_backward_apart(
    case: tuple[int, int, int, int, int],
) -> None:
    p, v, m, g, k = case

    def same(extra: int) -> list[int]:
        """Ranks on which some step of the steady state is of one micro-batch."""
        total = m * v
        found = []
        for rank, actions in enumerate(interleaved(p, v, m, g, extra).ranks):
            warmup = min(total, 2 * (p - rank - 1) + (v - 1) * g + extra)
            steps = actions[warmup : warmup + 2 * (total - warmup)]
            pairs = list(zip(steps[::2], steps[1::2], strict=True))
            assert all((f.kind, b.kind) == (Kind.FORWARD, Kind.BACKWARD) for f, b in pairs)
            if any(f.micro_batch == b.micro_batch for f, b in pairs):
                found.append(rank)
        return found

    assert same(0) == [p - 1]
    assert same(max(k, 1)) == []


def test_interleaved_in_full() -> None:
    """Two ranks, written by hand: Megatron's, and with one more forward."""

    def text(schedule: Schedule, rank: int) -> str:
        return " ".join(f"{a.kind[0]}{a.micro_batch}{a.chunk}" for a in schedule.ranks[rank])

    stock, ours = interleaved(2, 2, 2), interleaved(2, 2, 2, extra_warmup=1)
    assert text(stock, 0) == "f00 f10 f01 f11 b01 b11 b00 b10"
    assert text(stock, 1) == "f00 f10 f01 b01 f11 b11 b00 b10"
    assert text(ours, 1) == "f00 f10 f01 f11 b01 b11 b00 b10"
    assert text(dualpipe_v(1, 2), 0) == "f00 f01 f10 b01 f11 b00 b11 b10 b10"


BAD = [
    (lambda: one_f_one_b(0, 4), "p must be .* got 0"),
    (lambda: zb_h1(2, 0), "m must be .* got 0"),
    (lambda: zb_v(-1, 2), "p must be .* got -1"),
    (lambda: v_half(2, 1.5), "m must be .* got 1.5"),
    (lambda: forward_only(2, 0, 2), "v must be .* got 0"),
    (lambda: forward_only(2, 3, 2, placement=Placement.V), "v = 3.* a V has 2 chunks"),
    (lambda: interleaved(2, 1, 2), "v = 1: .* one_f_one_b"),
    (lambda: interleaved(2, 2, 2, extra_warmup=-1), "extra_warmup .* got -1"),
    (lambda: interleaved(4, 2, 3), "p = 4, m = 3, group_size = 4: .* m of 4 or more would work"),
    (
        lambda: interleaved(2, 2, 5),
        "p = 2, m = 5, group_size = 2: .* group_size of 3, 5 would work",
    ),
    (lambda: interleaved(2, 2, 4, 1), "group_size = 1: .* group_size of 2, 4 would work"),
    (lambda: interleaved(2, 2, 4, 2.0), "group_size = 2.0: "),
    (lambda: dualpipe_v(4, 7), "p = 4, m = 7: .* m of 2 p = 8 or more"),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_bad_sizes(build: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_transfers_are_in_one_order() -> None:
    """Two ranks in a loop: each sends outputs and gradients to the other, and takes them in another order."""
    schedule = with_transfers(interleaved(2, 2, 4))
    orders: dict[tuple[int, str], list[str]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind.computes:
                continue
            what, way = str(action.kind).split("_")
            stage = schedule.stage(rank, action.chunk)
            if what == "receive":
                stage += -1 if way == "forward" else 1
            source = rank if what == "send" else 1 - rank
            orders.setdefault((source, what), []).append(f"{way} {action.micro_batch} {stage}")
    assert set(orders) == {(rank, what) for rank in (0, 1) for what in ("send", "receive")}
    for source in (0, 1):
        assert orders[source, "send"] == orders[source, "receive"]
        assert {re.sub(r" .*", "", each) for each in orders[source, "send"]} == {
            "forward",
            "backward",
        }
    with pytest.raises(ValueError, match="has transfers already"):
        with_transfers(schedule)
