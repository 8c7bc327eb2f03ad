"""Attention over the gathered keys and values of all ranks; the backward reduce-scatters their gradients.

Each of a rank's two chunks of queries sees the keys up to its own end, which a window and documents may
shorten.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.parallel.collectives import gather_rows, reduce_scatter_rows
from accel.parallel.context.documents import attention_in_documents
from accel.parallel.context.parts import Attention, Part, place_of_chunk
from accel.parallel.context.zigzag import chunks, token_order, whole_sequence

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
    order = token_order(starts, q.shape[0] * ranks, ranks)
    in_order = torch.argsort(order.view(-1))
    k, v = (_GatheredTokens.apply(t, group).index_select(0, in_order) for t in (k, v))
    of_token = chunks(starts, k.shape[0], ranks)
    chunk = starts // (2 * ranks)  # of each sequence, added up
    length: int | Tensor = chunk.diff() if packed else int(chunk[-1])
    outs, places = [], []
    for number in (rank, 2 * ranks - 1 - rank):
        queries = (of_token[order[rank]] == number).nonzero().view(-1)
        end = number + 1 if causal else 2 * ranks
        keys = (of_token < end).nonzero().view(-1)
        part = Part(causal, window, first_query=place_of_chunk(number, length))
        if packed:
            part = part._replace(cu_seqlens_q=chunk, cu_seqlens_k=chunk * end)
        if documents is not None:
            chunk_q, begin = q.index_select(0, queries), number * int(chunk[-1])
            outs.append(attention_in_documents(attention, chunk_q, k, v, documents, begin, window))
            places.append(queries)
            continue
        seen = k.index_select(0, keys), v.index_select(0, keys)
        outs.append(attention(q.index_select(0, queries), *seen, part))
        places.append(queries)
    return torch.cat(outs).index_select(0, torch.argsort(torch.cat(places)))


class _GatheredTokens(torch.autograd.Function):
    """[S, ...] of every rank, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_rows(grads[0], ctx.group)[0], None
