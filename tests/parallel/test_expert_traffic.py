"""Who computes which rows: each once, whatever the counts, copies and slices; and both ends of every message
agree."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.parallel.experts.plan import Copy
from accel.parallel.experts.traffic import Traffic


@st.composite
def traffics(draw: st.DrawFn) -> list[Traffic]:
    """Of each rank."""
    ranks, each = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    experts = ranks * each
    rows = st.lists(st.integers(0, 6), min_size=experts, max_size=experts)
    counts = draw(st.lists(rows, min_size=ranks, max_size=ranks))
    every = [Copy(e, r) for e in range(experts) for r in range(ranks) if r != e // each]
    copies = frozenset(draw(st.lists(st.sampled_from(every)))) if every else frozenset()
    slices = draw(st.integers(1, 6))
    return [Traffic(counts, rank, copies, slices) for rank in range(ranks)]


@settings(max_examples=200, deadline=None)
@given(traffics())
def test_each_row_is_computed_once(of_ranks: list[Traffic]) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for traffic in of_ranks:
        pieces = [traffic.apart(), *traffic.guests()]
        pieces += traffic.pieces
        for piece in pieces:
            assert (
                piece.rows == sum(block.rows for block in piece.blocks) == int(piece.counts().sum())
            )
            assert list(piece.blocks) == sorted(piece.blocks)
            for block in piece.blocks:
                seen[block.source, block.expert] += block.rows
    counts = of_ranks[0].counts
    expected = {(r, e): n for r, row in enumerate(counts) for e, n in enumerate(row) if n}
    assert seen == expected


@settings(max_examples=200, deadline=None)
@given(traffics())
def test_both_ends_of_a_message_agree(of_ranks: list[Traffic]) -> None:
    for sender in of_ranks:
        for receiver in (of_ranks[rank] for rank in sender.peers):
            for index in range(sender.slices):
                leaves = [rows for rows, rank in sender.leaving[index] if rank == receiver.rank]
                comes = [
                    (block, here)
                    for block, here in receiver.pieces[index].places
                    if block.source == sender.rank
                ]
                assert leaves == [sender.rows(block.expert) for block, _ in comes]
                assert [r.stop - r.start for r in leaves] == [block.rows for block, _ in comes]
                arriving = receiver.arriving[index]
                assert [where for where, r in arriving if r == sender.rank] == [w for _, w in comes]
                assert all(where.stop - where.start == block.rows for block, where in comes)
            lent = [copy.expert for copy in sender.lent() if copy.rank == receiver.rank]
            guests = [piece.experts[0] for piece in receiver.guests()]
            assert lent == [e for e in guests if receiver.owner(e) == sender.rank]


@settings(max_examples=100, deadline=None)
@given(traffics())
def test_own_rows_of_the_last_slice_lie_together(of_ranks: list[Traffic]) -> None:
    for traffic in of_ranks:
        for e in range(len(traffic.mine)):
            assert traffic.rows(e) == slice(sum(traffic.mine[:e]), sum(traffic.mine[: e + 1]))
        stay = sum(where.stop - where.start for of in traffic.staying for _, where in of)
        own = [b.rows for p in traffic.pieces for b in p.blocks if b.source == traffic.rank]
        assert stay == sum(own)
        last = traffic.slice_of(traffic.rank, traffic.slices - 1)
        blocks = traffic.apart().blocks
        assert [block.expert for block in blocks] == [e for e in last if traffic.mine[e]]
        at = traffic.rows(last.start).start
        for block in blocks:
            assert traffic.rows(block.expert) == slice(at, at + block.rows)
            at += block.rows


@pytest.mark.parametrize(
    ("experts", "sizes"),
    [
        (8, [8]),
        (9, [4, 5]),
        (8, [2, 4, 2]),
        (8, [1, 3, 3, 1]),
        (8, [1, 2, 2, 2, 1]),
        (16, [2, 4, 4, 4, 2]),
        (5, [1, 1, 2, 1]),
        (4, [1, 1, 1, 1]),
        (2, [0, 1, 0, 1]),
    ],
)
def test_the_first_and_the_last_slice_are_small(experts: int, sizes: list[int]) -> None:
    traffic = Traffic([[1] * 2 * experts] * 2, 1, slices=len(sizes))
    slices = [traffic.slice_of(1, index) for index in range(len(sizes))]
    assert [len(of_slice) for of_slice in slices] == sizes
    assert [expert for of_slice in slices for expert in of_slice] == list(traffic.owned(1))


def test_places_of_blocks_follow_each_other() -> None:
    traffic = Traffic([[1, 2], [3, 0]], 0, slices=1)
    piece = traffic.pieces[0]
    assert [(block.source, where) for block, where in piece.places] == [(1, slice(0, 3))]
    assert torch.equal(piece.counts(), torch.tensor([3]))


def test_experts_that_the_ranks_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 experts on 2 ranks"):
        Traffic([[1, 2, 3], [1, 2, 3]], 0)
