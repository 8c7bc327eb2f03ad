"""Attention over sequences that are split over a context-parallel group.

Every sequence is cut as `accel.parallel.context.zigzag` has it. Three ways lead from there to attention over
whole sequences:

    ring      keys and values go from rank to rank beside the computation: `ring.py`
    keys      every rank gathers the keys and values: `gathered.py`. Any window to the left
    heads     an all-to-all gives every rank all tokens of a part of the heads: `heads.py`

and heads within groups of neighbouring ranks, with one of the others across: what the neighbours hold
together are the chunks that they would hold as one rank.

Letters     S  tokens of this rank, B  batch, H  heads of queries, G  heads of keys and values, D  width of a
            row of q and k, E of v;  T  tokens of this rank's part of a pack, whose sequences are cut each
Memory      ring: two blocks of keys and values; keys: K and V of the whole sequences while a layer computes;
            heads: whole sequences of its heads
Dropout     drops what one rank would with the same seed, where chunks are multiples of 64 tokens: it depends
            on the places of head, query and key
Limits      causal (with a window to the left, if any) or no mask at all; each sequence, padding counted in, a
            multiple of 2 N. A window is served by gathering keys where a ring was asked for
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.log import log_once
from accel.ops.attention import QUERIES_DRAWN
from accel.parallel.context.documents import attention_in_documents
from accel.parallel.context.gathered import attention_to_gathered
from accel.parallel.context.groups import ContextGroups
from accel.parallel.context.heads import HeadShares, gather_tokens, scatter_tokens
from accel.parallel.context.parts import Attention, Part
from accel.parallel.context.ring import Ring, ring_attention
from accel.parallel.context.zigzag import token_order, whole_sequence

__all__ = ["context_attention"]


def context_attention(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ContextGroups,
    *,
    causal: bool,
    window: tuple[int, int] | None = None,
    starts: Tensor | None = None,
    documents: Tensor | None = None,
    ring: Ring | None = None,
) -> Tensor:
    """Attention of this rank's queries over the whole sequences.

    Args:
        q: `[S, B, H, D]`, or `[T, H, D]` with `starts`.
        k: `[S, B, G, D]` or `[T, G, D]`; v: the same with a width of its own.
        window: keys to the left and right of its own that a query sees, -1 for all.
        starts: `[sequences + 1]`, where the sequences of the whole pack start, padding counted in.
        documents: `[B, whole sequence]`, or `[1, ...]` for all rows, the first key that each token sees:
            `documents.documents_of`; with a causal mask and without `starts`.
        ring: how blocks travel, where they do.

    Returns:
        `[S, B, H, E]` or `[T, H, E]`.

    Raises:
        ValueError: a mask that a split sequence cannot have, or sizes that the ranks do not divide.
    """
    window = None if window == (-1, -1) else window
    if window is not None and not (causal and window[1] <= 0):
        raise ValueError(
            f"context parallelism: a window of {window} without a causal mask; only a causal mask may "
            "have a window, to the left"
        )
    if causal and window is not None and window[0] < 0:
        window = None  # the causal mask alone
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"context parallelism: {q.shape[0]} queries of a rank, {k.shape[0]} keys and {v.shape[0]} "
            "values; a split sequence attends to itself, cross attention is for --context-parallel-size 1"
        )
    if documents is not None:
        if documents.shape[0] not in (1, q.shape[1]):
            raise ValueError(
                f"context parallelism: a mask of {documents.shape[0]} rows for a micro-batch of {q.shape[1]}"
                ": give a row for each, or one for all"
            )
        documents = documents.expand(q.shape[1], -1)
    # Also checks the lengths, before anybody waits for anybody.
    num_tokens = q.shape[0] * groups.size
    bounds = whole_sequence(num_tokens, q.device) if starts is None else starts
    order = token_order(bounds, num_tokens, groups.size)
    chunk = bounds.diff() // (2 * groups.ranks_by_keys)
    if attention.dropout and groups.keys is not None and (chunk % QUERIES_DRAWN).any():
        log_once(
            "context parallelism with attention dropout",
            f"chunks that are no multiple of {QUERIES_DRAWN} tokens drop other elements than one rank would, "
            "as many",
        )
    if groups.heads is None:
        return _over_keys(attention, q, k, v, groups, causal, window, starts, documents, ring)
    rank = groups.heads.rank()
    shares = HeadShares.of(q.shape[-2], k.shape[-2], groups.ranks_by_heads)
    across = 0 if groups.keys is None else groups.keys.rank()
    sorted_here = torch.argsort(order.view(groups.ranks_by_keys, -1)[across])
    q, k, v = (
        gather_tokens(t, heads, groups.heads).index_select(0, sorted_here)
        for t, heads in ((q, shares.queries), (k, shares.keys), (v, shares.keys))
    )
    k, v = (shares.repeat(t, rank) for t in (k, v))
    attention = attention.of_heads(shares.queries[rank])
    out = _over_keys(attention, q, k, v, groups, causal, window, starts, documents, ring)
    out = out.index_select(0, torch.argsort(sorted_here))
    return scatter_tokens(out, shares.queries, groups.heads)


def _over_keys(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ContextGroups,
    causal: bool,
    window: tuple[int, int] | None,
    starts: Tensor | None,
    documents: Tensor | None,
    ring: Ring | None,
) -> Tensor:
    if groups.keys is None and documents is not None:
        return attention_in_documents(attention, q, k, v, documents, 0, window)
    if groups.keys is None:
        return attention(q, k, v, Part(causal, window, starts, starts))
    gathers = "documents that begin anywhere" if documents is not None else None
    if window is not None:
        gathers = f"a window of {window}"
    if groups.ring and gathers is None:
        return ring_attention(
            attention, q, k, v, groups.keys, causal=causal, starts=starts, ring=ring
        )
    if groups.ring:
        log_once("context parallelism", f"no ring for {gathers}: keys and values are gathered")
    return attention_to_gathered(
        *(attention, q, k, v, groups.keys),
        causal=causal,
        window=window,
        starts=starts,
        documents=documents,
    )
