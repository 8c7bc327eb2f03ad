"""Sequences that are cut without regard to the documents in them, which begin and end anywhere.

Megatron's `--reset-attention-mask`: a token sees those before it in its own document. What comes in is a mask
of this rank's queries and all keys; what the ways of sharing take is each token's first key.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from accel.ops.findings import Findings
from accel.parallel.context.groups import ContextGroups
from accel.parallel.context.parts import Attention, Part
from accel.parallel.context.zigzag import token_order, whole_sequence

__all__ = ["attention_in_documents", "documents_of"]

_ROWS_AT_ONCE = 256
"""A mask is read in slices of so many queries, so that no second mask is made."""

_FIRST_KEYS = Findings()
"""Of masks: all layers get the same one."""


def documents_of(mask: Tensor, groups: ContextGroups, *, causal: bool) -> Tensor | None:
    """`[B, whole sequence]` int64: the first key that each token sees; None if that is 0 everywhere.

    All ranks call it together: each knows its own queries' rows.

    Args:
        mask: `[B, 1, S, whole sequence]` or broadcastable in B, True is hidden.

    Raises:
        ValueError: on all ranks, a mask that hides more than later tokens and other documents (a window).
    """
    first: Tensor | None = _FIRST_KEYS.get(
        mask, find=lambda: _read(mask, groups, causal), about=causal
    )
    return first


def _read(mask: Tensor, groups: ContextGroups, causal: bool) -> Tensor | None:
    num_keys = mask.shape[-1]
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] * groups.size != num_keys:
        raise ValueError(
            f"context parallelism: a mask of shape {list(mask.shape)}; {groups.size} ranks need [B, 1, "
            "tokens of a rank, tokens of all]"
        )
    bounds = whole_sequence(num_keys, mask.device)
    order = token_order(bounds, num_keys, groups.size)
    first = _first_keys(mask[:, 0], order[groups.rank], causal)
    in_order = torch.argsort(order.view(-1))
    whole = _gather(first, groups)  # [ranks, B, S]
    whole = whole.movedim(0, 1).flatten(1).index_select(1, in_order)
    if (whole < 0).any() or not _are_documents(whole):
        allowed = "later tokens and other documents" if causal else "nothing"
        raise ValueError(
            f"context parallelism: an attention mask of its own; split sequences may hide {allowed}. For a "
            "sliding window give --window-size instead, for any other mask --context-parallel-size 1"
        )
    return whole if whole.any() else None


def _are_documents(first: Tensor) -> bool:
    """Whether a token's first key is itself or that of the token before; in a window it moves along."""
    places = torch.arange(1, first.shape[1], device=first.device)
    after = first[:, 1:]
    return bool(((after == places) | (after == first[:, :-1])).all())


def _first_keys(hidden: Tensor, places: Tensor, causal: bool) -> Tensor:
    """`[B, S]`: of each query; -1 where the row is no such mask."""
    keys = torch.arange(hidden.shape[-1], device=hidden.device)
    found = []
    for at in range(0, len(places), _ROWS_AT_ONCE):
        rows, place = hidden[:, at : at + _ROWS_AT_ONCE], places[at : at + _ROWS_AT_ONCE, None]
        first = rows.to(torch.uint8).argmin(dim=-1, keepdim=True)
        expected = keys < first
        if causal:
            expected = expected | (keys > place)
        fits = (rows == expected).all(dim=-1) & ((first[..., 0] == 0) | causal)
        found.append(torch.where(fits, first[..., 0], -1))
    return torch.cat(found, dim=1)


def _gather(x: Tensor, groups: ContextGroups) -> Tensor:
    """`[ranks, ...]` of all, in the order of the ranks that hold neighbouring chunks."""
    whole = x.unsqueeze(0)
    for group in (groups.heads, groups.keys):
        if group is not None:
            parts = [torch.empty_like(whole) for _ in range(group.size())]
            dist.all_gather(parts, whole.contiguous(), group=group)
            whole = torch.cat(parts)
    return whole


def attention_in_documents(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_keys: Tensor,
    begin: int,
    window: tuple[int, int] | None,
) -> Tensor:
    """Causal attention of the queries from `begin` on over the keys of their documents.

    Args:
        q: `[Q, B, H, D]`, neighbours in the sequence; k, v: `[K, B, G, ...]`, the keys from the first on.
        first_keys: `[B, whole sequence]`.

    Returns:
        `[Q, B, H, E]`.

    Raises:
        ValueError: dropout, which would drop otherwise than on one rank.
    """
    if attention.dropout:
        raise ValueError(
            "context parallelism with --reset-attention-mask and attention dropout: use "
            "--attention-dropout 0"
        )
    end = begin + q.shape[0]
    lengths_q, lengths_k, keys, values = [0], [0], [], []
    for row, first in enumerate(first_keys):
        places = torch.arange(begin, end, device=first.device)
        starts = places[(first[begin:end] == places) & (places > begin)].tolist()
        oldest = int(first[begin])
        cuts = [begin, *starts, end]
        lengths_q += [b - a for a, b in pairwise(cuts)]
        cuts[0] = oldest
        lengths_k += [b - a for a, b in pairwise(cuts)]
        keys.append(k[oldest:end, row])
        values.append(v[oldest:end, row])
    cu_q, cu_k = (
        torch.tensor(lengths, device=q.device).cumsum(0) for lengths in (lengths_q, lengths_k)
    )
    packed = q.transpose(0, 1).flatten(0, 1)
    out = attention(packed, torch.cat(keys), torch.cat(values), Part(True, window, cu_q, cu_k))
    return out.unflatten(0, (q.shape[1], q.shape[0])).transpose(0, 1)
