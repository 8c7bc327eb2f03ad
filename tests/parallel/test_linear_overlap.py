"""Pieces, plans, and the prediction of an overlapped product's time. The products themselves, on several
ranks: `tests/distributed/test_parallel_linear.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.parallel.linear_overlap import Overlap, Times, _in_order, current, predict, switch_on
from accel.parallel.overlapped_linear import FORMS, Form, Kind, Plan, pieces_of

KINDS: tuple[Kind, ...] = ("gather", "reduce_scatter", "all_reduce")


def sizes_of(rows: int, kind: Kind, plan: Plan) -> list[int]:
    return [piece.stop - piece.start for piece in pieces_of(rows, kind, plan)]


@given(st.integers(0, 300), st.integers(1, 400), st.sampled_from(KINDS), st.sampled_from(FORMS))
def test_pieces_cover_every_row_once(rows: int, chunks: int, kind: Kind, form: Form) -> None:
    pieces = pieces_of(rows, kind, Plan(chunks, form))
    assert [row for piece in pieces for row in range(rows)[piece]] == list(range(rows))
    assert len(pieces) == min(rows, chunks)
    assert all(piece.stop > piece.start for piece in pieces)
    if kind == "all_reduce" and pieces:
        sizes = sizes_of(rows, kind, Plan(chunks, form))
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("form", FORMS)
def test_pieces_that_nothing_hides_are_small(form: Form) -> None:
    assert sizes_of(110, "gather", Plan(4, form)) == [40, 40, 20, 10]
    assert sizes_of(30, "gather", Plan(2, form)) == [20, 10]
    assert sizes_of(30, "gather", Plan(1, form)) == [30]
    reduced = [10, 20, 40, 40] if form == "ring" else [27, 28, 27, 28]
    assert sizes_of(110, "reduce_scatter", Plan(4, form)) == reduced
    assert sizes_of(10, "gather", Plan(4, form)) == [2, 3, 2, 3], "too few rows"


@pytest.mark.parametrize("chunks", [0, -1])
def test_fewer_than_one_chunk_is_an_error_that_names_it(chunks: int) -> None:
    with pytest.raises(ValueError, match=f"{chunks} chunks: give 1 or more"):
        Plan(chunks)


def test_an_unknown_form_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="form 'star': use ring, collective or symmetric"):
        Plan(2, "star")  # type: ignore[arg-type]


def linear_times(rows: int, product: float, transfer: float) -> Times:
    """No cost but that of the rows: seconds of all of a rank's."""
    sizes = {-(-rows // chunks) for chunks in range(1, rows + 1)}
    per_row = transfer / rows
    return Times(
        rows,
        {size: product * size / rows for size in sizes},
        {"ring": (per_row, transfer), "collective": (per_row, transfer)},
    )


CHUNKS = st.sampled_from([1, 2, 3, 4, 6, 12, 24])
SECONDS = st.floats(1e-3, 1e3)


@given(CHUNKS, SECONDS, SECONDS)
def test_two_ranks_of_a_ring_wait_for_a_piece_at_most(
    chunks: int, product: float, transfer: float
) -> None:
    times = linear_times(24, product, transfer)
    plan = Plan(chunks)
    # the own rows take `product`, those of the other rank as long; from one piece on nothing waits
    pieces = pieces_of(24, "gather", plan)
    waits = max(transfer * p.stop / 24 + product * (24 - p.start) / 24 for p in pieces)
    assert predict("gather", 2, plan, times) == pytest.approx(max(2 * product, waits))
    pieces = pieces_of(24, "reduce_scatter", plan)
    waits = max(product * p.stop / 24 + transfer * (24 - p.start) / 24 for p in pieces)
    assert predict("reduce_scatter", 2, plan, times) == pytest.approx(max(2 * product, waits))


@given(CHUNKS, st.sampled_from(FORMS), SECONDS, SECONDS, SECONDS, SECONDS)
def test_a_backward_pass_reduces_beside_the_weights_gradient(
    chunks: int, form: Form, product: float, transfer: float, gather: float, weights: float
) -> None:
    """From one piece on, behind the gather, while the rest of the product and the weight gradient run."""
    alone = linear_times(24, product, transfer)
    times = replace(alone, gather=gather, beside=weights)
    plan = Plan(chunks, form)
    computed = max(2 * product, gather) + weights
    pieces = pieces_of(24, "reduce_scatter", plan)
    both = 1 if form == "ring" else 2
    leaves = [(both * product * p.stop / 24, transfer * (24 - p.start) / 24) for p in pieces]
    link = max(max(begins, gather * (i == 0)) + rest for i, (begins, rest) in enumerate(leaves))
    assert predict("reduce_scatter", 2, plan, times) == pytest.approx(max(computed, link))
    assert predict("reduce_scatter", 2, plan, times) >= predict("reduce_scatter", 2, plan, alone)


@given(CHUNKS, st.sampled_from(FORMS), SECONDS, SECONDS, SECONDS)
def test_a_gather_multiplies_twice_where_it_sums_weight_gradients(
    chunks: int, form: Form, product: float, transfer: float, weights: float
) -> None:
    """As a product that takes as long as both."""
    times = replace(linear_times(24, product, transfer), beside=2 * weights)
    plan = Plan(chunks, form)
    both = predict("gather", 2, plan, linear_times(24, product + weights, transfer))
    assert predict("gather", 2, plan, times) == pytest.approx(both)
    assert _in_order("gather", 2, times) == pytest.approx(2 * (product + weights) + transfer)


def test_small_pieces_hide_more() -> None:
    """Where transfers take as long as all products. Four equal pieces would leave a quarter of a rank's."""
    times = linear_times(44, 1.0, 2.0)
    kinds: tuple[Kind, ...] = ("gather", "reduce_scatter")
    for kind in kinds:
        assert predict(kind, 2, Plan(4), times) == pytest.approx(2 + 4 / 44)


def test_a_product_between_measured_ones_is_linear() -> None:
    times = Times(8, {2: 1.0, 4: 5.0, 8: 6.0}, {})
    assert [times.multiply(rows) for rows in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 3.0, 5.0, 5.5, 6.0]


@given(CHUNKS, SECONDS, SECONDS, st.integers(2, 8))
def test_collectives_hide_all_but_a_chunk_of_the_lesser(
    chunks: int, product: float, transfer: float, ranks: int
) -> None:
    times = linear_times(24, product, transfer)
    plan = Plan(chunks, "collective")
    whole = ranks * product
    expected = max(whole, transfer) + min(whole, transfer) / chunks
    assert predict("reduce_scatter", ranks, plan, times) == pytest.approx(expected)
    alone = max(product, transfer) + min(product, transfer) / chunks
    assert predict("all_reduce", ranks, plan, times) == pytest.approx(alone)
    pieces = pieces_of(24, "gather", plan)
    waits = max(transfer * p.stop + (ranks - 1) * product * (24 - p.start) for p in pieces) / 24
    assert predict("gather", ranks, plan, times) == pytest.approx(max(whole, waits))


@given(st.sampled_from(KINDS[:2]), CHUNKS, SECONDS, SECONDS, st.integers(2, 8))
def test_a_ring_is_never_below_its_bounds(
    kind: Kind, chunks: int, product: float, transfer: float, ranks: int
) -> None:
    found = predict(kind, ranks, Plan(chunks), linear_times(24, product, transfer))
    busy, link = ranks * product, (ranks - 1) * transfer
    assert max(busy, link) <= found * (1 + 1e-9)
    assert found <= (busy + link) * (1 + 1e-9)


def test_a_transfer_between_one_row_and_all_is_linear() -> None:
    times = Times(11, {}, {"ring": (1.0, 2.0)})
    assert [times.transfer("ring", rows) for rows in (1, 6, 11)] == [1.0, 1.5, 2.0]
    assert Times(1, {}, {"ring": (1.0, 1.0)}).transfer("ring", 1) == 1.0


def test_one_chunk_is_none_and_more_are_for_every_product() -> None:
    x, w = torch.ones(4, 3), torch.ones(3, 2)
    group: torch.distributed.ProcessGroup = None  # type: ignore[assignment]  # not asked
    assert Overlap(1).plan("gather", x, w, group) is None
    assert Overlap(3, "collective").plan("all_reduce", x, w, group) == Plan(3, "collective")


def test_layers_ask_nobody_unless_it_is_switched_on() -> None:
    assert current() is None
    overlap = Overlap(2)
    off = switch_on(overlap)
    assert current() is overlap
    off()
    assert current() is None
