"""All tokens of some heads on each rank, instead of some tokens of all heads, by one all-to-all each way.

Heads are shared as evenly as they can be. A rank gets those heads of keys and values that its heads of
queries read, so a head that several ranks read goes to each of them; where a rank's heads of queries do not
read its heads of keys equally often, these are repeated on that rank, not on the way.

Source: Ulysses, Jacobs et al. 2023 (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HeadShares", "gather_tokens", "scatter_tokens"]


@dataclass(frozen=True)
class HeadShares:
    """Which heads each rank gets."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    """Of keys and of values."""
    group: int
    """Heads of queries for each head of keys."""

    @staticmethod
    def of(num_heads: int, num_groups: int, num_ranks: int) -> HeadShares:
        """Raises ValueError for fewer heads than ranks."""
        if num_heads < num_ranks:
            raise ValueError(
                f"context parallelism with an all-to-all of heads: {num_heads} heads on each rank for "
                f"{num_ranks} ranks leave some without any; use --cp-comm-type p2p, or a degree of at most "
                f"{num_heads}"
            )
        group = num_heads // num_groups
        ends = [rank * num_heads // num_ranks for rank in range(num_ranks + 1)]
        queries = tuple(range(*bounds) for bounds in pairwise(ends))
        keys = tuple(range(heads[0] // group, heads[-1] // group + 1) for heads in queries)
        return HeadShares(queries, keys, group)

    def repeat(self, x: Tensor, rank: int) -> Tensor:
        """`[..., heads of keys, D]` of this rank, repeated if its heads of queries read them unequally."""
        first = self.keys[rank][0]
        read = [head // self.group - first for head in self.queries[rank]]
        count, heads = len(read), len(self.keys[rank])
        if count % heads == 0 and read == [i // (count // heads) for i in range(count)]:
            return x
        return x.index_select(-2, torch.tensor(read, device=x.device))


def gather_tokens(x: Tensor, heads: Sequence[range], group: dist.ProcessGroup) -> Tensor:
    """`[S, ..., H, D]` -> `[all tokens, ..., own heads, D]`: the ranks' tokens one after the other.

    Args:
        heads: what each rank gets; ranges may overlap, whose gradients add up.
    """
    result: Tensor = _GatherTokens.apply(x, heads, group)
    return result


def scatter_tokens(x: Tensor, heads: Sequence[range], group: dist.ProcessGroup) -> Tensor:
    """The way back: `[all tokens, ..., own heads, D]` -> `[S, ..., H, D]`, for ranges that do not overlap."""
    if x.shape[0] % group.size():
        raise ValueError(f"{x.shape[0]} tokens are no multiple of the {group.size()} ranks")
    result: Tensor = _ScatterTokens.apply(x, heads, group)
    return result


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Sequence[range], group: dist.ProcessGroup) -> Tensor:
        ctx.how = heads, group, x.shape[-2]
        return _to_heads(x, heads, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _to_tokens(grads[0], *ctx.how), None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Sequence[range], group: dist.ProcessGroup) -> Tensor:
        ctx.how = heads, group
        return _to_tokens(x, heads, group, max(h.stop for h in heads))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _to_heads(grads[0], *ctx.how), None, None


def _to_heads(x: Tensor, heads: Sequence[range], group: dist.ProcessGroup) -> Tensor:
    tokens, *between, _, width = x.shape
    leaving = [x[..., h.start : h.stop, :].reshape(-1) for h in heads]
    out = x.new_empty((group.size() * tokens, *between, len(heads[group.rank()]), width))
    sizes = [t.numel() for t in leaving]
    coming = [out.numel() // group.size()] * group.size()
    dist.all_to_all_single(out.view(-1), torch.cat(leaving), coming, sizes, group)
    return out


def _to_tokens(
    x: Tensor, heads: Sequence[range], group: dist.ProcessGroup, num_heads: int
) -> Tensor:
    between, width = x.shape[1:-2], x.shape[-1]
    tokens = x.shape[0] // group.size()
    shapes = [(tokens, *between, len(h), width) for h in heads]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    leaving = [x.numel() // group.size()] * group.size()
    coming = x.new_empty(sum(sizes))
    dist.all_to_all_single(coming, x.reshape(-1), sizes, leaving, group)
    shared = sum(len(h) for h in heads) > num_heads
    out = (x.new_zeros if shared else x.new_empty)((tokens, *between, num_heads, width))
    for h, part, shape in zip(heads, coming.split(sizes), shapes, strict=True):
        if shared:
            out[..., h.start : h.stop, :] += part.view(shape)
        else:
            out[..., h.start : h.stop, :] = part.view(shape)
    return out
