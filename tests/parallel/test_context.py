"""Who attends to whom in a ring, without ranks: everything once, and the same work for all."""

from __future__ import annotations

import itertools

import pytest
import torch

from accel.parallel.context import Attention, ContextGroups, context_attention, documents_of
from accel.parallel.context.heads import HeadShares
from accel.parallel.context.ring import Half, Ring, blocks_of, moved, ring_order
from accel.parallel.context.zigzag import chunks, owners, token_order, whole_sequence

CHUNK = 3
ALONE = ContextGroups(heads=None, keys=None, ring=True)
"""One rank, which says of a mask what several do."""


def places(rank: int, half: Half, ranks: int) -> list[int]:
    """Tokens of the whole sequence."""
    numbers = {"first": [rank], "second": [2 * ranks - 1 - rank]}
    found = numbers.get(half, [rank, 2 * ranks - 1 - rank])
    return [number * CHUNK + i for number in found for i in range(CHUNK)]


def seen(rank: int, owner: int, ranks: int, causal: bool) -> list[tuple[int, int]]:
    """(query, key), as often as it is computed; a causal block is one chunk on the diagonal."""
    pairs = []
    for block in blocks_of(rank, owner, causal):
        queries, keys = places(rank, block.queries, ranks), places(owner, block.keys, ranks)
        for q, k in itertools.product(queries, keys):
            if not block.causal or k <= q:
                pairs.append((q, k))
    return pairs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_key_that_is_seen_is_seen_once_and_all_ranks_work_the_same(
    ranks: int, causal: bool
) -> None:
    work = []
    everything = []
    for rank in range(ranks):
        found = [pair for owner in range(ranks) for pair in seen(rank, owner, ranks, causal)]
        work.append(len(found))
        everything += found
    tokens = range(2 * ranks * CHUNK)
    assert sorted(everything) == [(q, k) for q in tokens for k in tokens if not causal or k <= q]
    assert max(work) <= 1.02 * min(work)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_each_step_of_a_causal_ring_is_the_same_work(ranks: int) -> None:
    """So that nobody waits for who computes longer."""
    for step in range(1, ranks):
        work = {len(seen(rank, (rank - step) % ranks, ranks, True)) for rank in range(ranks)}
        assert len(work) == 1


@pytest.mark.parametrize(("ranks", "window"), [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 4)])
def test_both_rings_pass_every_owner_once(ranks: int, window: int) -> None:
    order = ring_order(ranks, window)
    for rank in range(ranks):
        owners_met = [moved(rank, (-a, -b), ranks, window) for a, b in order]
        assert owners_met[0] == rank
        assert sorted(owners_met) == list(range(ranks))
        for step in order:  # who has my block at a step, and whose block I have
            assert (
                moved(moved(rank, step, ranks, window), (-step[0], -step[1]), ranks, window) == rank
            )


@pytest.mark.parametrize("window", [0, 3, 8])
def test_window_that_does_not_divide_the_ranks(window: int) -> None:
    with pytest.raises(
        ValueError, match=f"window of {window} ranks .* ring of 4; use one of 1, 2, 4"
    ):
        Ring(window=window).check(4)


def test_chunks_and_owners_of_a_pack() -> None:
    starts = torch.tensor([0, 4, 12])
    assert chunks(starts, 12, 2).tolist() == [0, 1, 2, 3, 0, 0, 1, 1, 2, 2, 3, 3]
    assert owners(starts, 12, 2).tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0]
    with pytest.raises(
        ValueError, match=r"\[4, 8\] tokens for 12.*multiple of 6 \(nearest: \[6, 6\]\)"
    ):
        owners(starts, 12, 3)


def test_tokens_are_put_in_order_once_for_all_layers() -> None:
    starts = torch.tensor([0, 8, 24])
    assert token_order(starts, 24, 2) is token_order(starts, 24, 2)
    whole = whole_sequence(24, starts.device)
    assert whole_sequence(24, starts.device) is whole
    assert token_order(whole, 24, 3)[0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    starts[1] = 16
    assert token_order(starts, 24, 2)[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 22, 23]


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "keys"),
    [
        (8, 8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (8, 1, 4, [(0, 1)] * 4),
        (6, 3, 4, [(0, 1), (0, 2), (1, 2), (2, 3)]),
    ],
)
def test_heads_of_keys_go_where_they_are_read(
    heads: int, groups: int, ranks: int, keys: list[tuple[int, int]]
) -> None:
    shares = HeadShares.of(heads, groups, ranks)
    assert [head for queries in shares.queries for head in queries] == list(range(heads))
    assert [(held.start, held.stop) for held in shares.keys] == keys
    for rank, held in enumerate(shares.keys):
        of_rank = torch.arange(held.start, held.stop).view(-1, 1)
        repeated = shares.repeat(of_rank, rank).view(-1)
        queries = shares.queries[rank]
        read = repeated.repeat_interleave(len(queries) // len(repeated))
        assert read.tolist() == [head // (heads // groups) for head in queries]


def hidden_before(first_keys: list[int]) -> torch.Tensor:
    """`[1, 1, tokens, tokens]`: the causal mask that also hides what is before each token's first key."""
    keys = torch.arange(len(first_keys))
    return ((keys < torch.tensor(first_keys)[:, None]) | (keys > keys[:, None]))[None, None]


@pytest.mark.parametrize("first_keys", [[0, 1, 1, 3, 3, 3, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_documents_are_read_off_a_mask(first_keys: list[int]) -> None:
    found = documents_of(hidden_before(first_keys), ALONE, causal=True)
    assert found is not None
    assert found.tolist() == [first_keys]


@pytest.mark.parametrize(
    "first_keys",
    [
        [0, 0, 0, 1, 2, 3, 4, 5],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 2, 2, 2, 3, 4, 5],
        [0, 0, 2, 2, 0, 0, 0, 0],
    ],
    ids=["window", "window at its last query", "window in documents", "back to the first document"],
)
def test_a_mask_of_windows_is_not_taken_for_one_of_documents(first_keys: list[int]) -> None:
    message = "an attention mask of its own.* sliding window give --window-size.*parallel-size 1"
    with pytest.raises(ValueError, match=message):
        documents_of(hidden_before(first_keys), ALONE, causal=True)


def test_a_mask_is_read_anew_for_another_kind_of_layer() -> None:
    mask = hidden_before([0] * 8)
    assert documents_of(mask, ALONE, causal=True) is None
    with pytest.raises(ValueError, match="split sequences may hide nothing"):
        documents_of(mask, ALONE, causal=False)


def test_a_mask_of_one_row_is_that_of_every_row() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(8, 3, 2, 4, generator=generator) for _ in range(4))

    def results(rows: int) -> list[torch.Tensor]:
        mask = hidden_before([0, 0, 0, 3, 3, 5, 5, 5]).repeat(rows, 1, 1, 1)
        first = documents_of(mask, ALONE, causal=True)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = context_attention(
            Attention(0.5, kernel=False), *inputs, ALONE, causal=True, documents=first
        )
        return [out, *torch.autograd.grad(out, inputs, dout)]

    for one, each in zip(results(1), results(3), strict=True):
        assert torch.equal(one, each)
    with pytest.raises(ValueError, match="a mask of 2 rows for a micro-batch of 3"):
        results(2)
