"""Attention over the gathered keys and values of all ranks; the backward reduce-scatters their gradients.

Each of a rank's two chunks of queries sees the keys up to its own end, which a window and documents may
shorten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel.ops.findings import Findings
from accel.parallel.collectives import gather_rows, reduce_scatter_rows
from accel.parallel.context.documents import attention_in_documents
from accel.parallel.context.parts import Attention, Part, place_of_chunk
from accel.parallel.context.zigzag import (
    chunks,
    keep_for_graphs,
    token_order,
    whole_sequence,
)

__all__ = ["attention_to_gathered"]


def attention_to_gathered(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    window: tuple[int, int] | None = None,
    starts: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """`[S, B, H, E]` or `[T, H, E]`. Contract: `accel.parallel.context.ring.ring_attention`.

    Args:
        documents: `[B, whole sequence]`, the first key that each token sees; causal and without `starts`.
    """
    ranks, rank = group.size(), group.rank()
    packed = starts is not None
    if starts is None:
        starts = whole_sequence(q.shape[0] * ranks, q.device)
    places = _places(starts, q.shape[0] * ranks, ranks, rank, causal=causal)
    k, v = (_GatheredTokens.apply(t, group).index_select(0, places.in_order) for t in (k, v))
    length = places.chunk.diff() if packed else q.shape[0] // 2
    outs = []
    for number, queries, keys in places.chunks:
        own = q.index_select(0, queries)
        if documents is not None:
            begin = number * (q.shape[0] // 2)
            outs.append(attention_in_documents(attention, own, k, v, documents, begin, window))
            continue
        part = Part(causal, window, first_query=place_of_chunk(number, length))
        if packed:
            end = number + 1 if causal else 2 * ranks
            part = part._replace(cu_seqlens_q=places.chunk, cu_seqlens_k=places.chunk * end)
        seen = k.index_select(0, keys), v.index_select(0, keys)
        outs.append(attention(own, *seen, part))
    return torch.cat(outs).index_select(0, places.back)


class _Places(NamedTuple):
    """Where tokens are, for one rank."""

    in_order: Tensor
    """Of all tokens, in what was gathered."""
    chunk: Tensor
    """Starts of one chunk of each sequence behind the other."""
    chunks: tuple[tuple[int, Tensor, Tensor], ...]
    """The rank's two: number, its queries among the rank's tokens, the keys that it sees among all."""
    back: Tensor
    """Of the rank's tokens, in both chunks' outputs."""


_PLACES = Findings()


def _places(starts: Tensor, num_tokens: int, ranks: int, rank: int, *, causal: bool) -> _Places:
    """Found once for all layers: on a GPU the host waits for each of the lists."""
    order = token_order(starts, num_tokens, ranks)

    def find() -> _Places:
        of_token = chunks(starts, num_tokens, ranks)
        own = []
        for number in (rank, 2 * ranks - 1 - rank):
            queries = (of_token[order[rank]] == number).nonzero().view(-1)
            keys = (of_token < (number + 1 if causal else 2 * ranks)).nonzero().view(-1)
            own.append((number, queries, keys))
        back = torch.argsort(torch.cat([queries for _, queries, _ in own]))
        in_order = torch.argsort(order.view(-1))
        return _Places(in_order, starts // (2 * ranks), tuple(own), back)

    found: _Places = _PLACES.get(starts, find=find, about=(num_tokens, ranks, rank, causal))
    keep_for_graphs(starts, found)
    return found


class _GatheredTokens(torch.autograd.Function):
    """[S, ...] of every rank, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_rows(grads[0], ctx.group)[0], None
