"""Attention over sequences that are split over a context-parallel group.

Every sequence is cut into 2 N equal chunks for N ranks, and rank r holds the chunks r and 2 N - 1 - r:
Megatron's split, under which all ranks have the same work below a causal mask. Two ways lead from there to
attention over whole sequences, alone or the one inside the other:

    keys    every rank gathers the keys and values, and each of its two chunks of queries sees the keys up to
            its own end; the backward reduce-scatters their gradients. Any number of heads.
    heads   an all-to-all gives every rank all tokens of a part of the heads, and a second one brings the
            result back (Ulysses: Jacobs et al. 2023, arXiv:2309.14509). Heads of queries divisible by the
            ranks; heads of keys that the ranks do not divide are repeated first.
    both    heads within groups of neighbouring ranks, keys across: what the neighbours hold together are the
            chunks that they would hold as one rank.

Letters     S  tokens of this rank, B  batch, H  heads of queries, G  heads of keys and values, D  width;
            T  tokens of this rank's part of a pack of sequences, which are cut one by one
Memory      keys: K and V of the whole sequences on each rank while a layer computes; heads: of its heads.
Dropout     every chunk of queries and every part of the heads draws with a number of its own.
Limits      causal (with a window to the left, if any) or no mask at all; each sequence, padding counted
            in, a multiple of 2 N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accel.parallel.collectives import gather_rows, reduce_scatter_rows

__all__ = ["COMM_TYPES", "ContextGroups", "context_attention", "owners"]

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Transformer Engine's names. `p2p`, a ring there, gathers the keys here too."""


class Attend(Protocol):
    """Attention on one rank. `part` differs between calls that must drop different keys."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any], *, part: int
    ) -> Tensor: ...


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that share the sequences: which of them exchange heads, which gather keys."""

    heads: dist.ProcessGroup | None
    keys: dist.ProcessGroup | None

    @staticmethod
    def of(
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup], comm_type: str
    ) -> ContextGroups | None:
        """Of Transformer Engine's arguments; None if there is but one rank.

        Args:
            group: of all ranks; for `a2a+p2p` the group that exchanges heads, of neighbours, and the one
                across.

        Raises:
            ValueError: an unknown `comm_type`, or groups that do not go with it.
        """
        if comm_type not in COMM_TYPES:
            raise ValueError(f"cp_comm_type={comm_type!r}: use one of {', '.join(COMM_TYPES)}")
        groups = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        if len(groups) != (2 if comm_type == "a2a+p2p" else 1):
            raise ValueError(
                f"cp_comm_type={comm_type!r} with {len(groups)} context-parallel groups: 'a2a+p2p' takes "
                "two (--hierarchical-context-parallel-sizes), the others one"
            )
        by_heads = groups[0] if comm_type.startswith("a2a") else None
        by_keys = None if comm_type == "a2a" else groups[-1]
        found = ContextGroups(_unless_alone(by_heads), _unless_alone(by_keys))
        return None if found.size == 1 else found

    @property
    def size(self) -> int:
        return _size(self.heads) * _size(self.keys)


def _unless_alone(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return None if group is None or group.size() == 1 else group


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def context_attention(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ContextGroups,
    *,
    causal: bool,
    window: tuple[int, int] | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries over the whole sequences.

    Args:
        attend: on one rank, with the options `causal`, `window`, `cu_seqlens_q`, `cu_seqlens_k` in `how`;
            a causal mask is aligned with the last key.
        q: `[S, B, H, D]`, or `[T, H, D]` with `starts`.
        k, v: the same with G heads; v may have a width of its own.
        window: keys to the left and right of its own that a query sees, -1 for all.
        starts: `[sequences + 1]`, where the sequences of the whole pack start, padding counted in.

    Returns:
        What `attend` returns for this rank's queries, with its heads last: `[S, B, H * width]` or
        `[T, H * width]`.

    Raises:
        ValueError: a mask that a split sequence cannot have, or sizes that the ranks do not divide.
    """
    window = None if window == (-1, -1) else window
    if window is not None and not (causal and window[1] <= 0):
        raise ValueError(
            f"context parallelism: a window of {window} without a causal mask; only a causal mask may "
            "have a window, to the left"
        )
    packed = starts is not None
    if starts is None:
        starts = torch.tensor([0, q.shape[0] * groups.size], device=q.device)
    if groups.heads is not None:
        _check_heads(q.shape[-2], groups.heads.size())
        order = _token_order(starts, q.shape[0] * groups.size, groups.size)
        neighbours = order.view(_size(groups.keys), -1)[_rank(groups.keys)]
        sorted_here = torch.argsort(neighbours)
        k, v = (_repeat_heads(t, q.shape[-2], groups.heads.size()) for t in (k, v))
        q, k, v = (
            _HeadsForTokens.apply(t, groups.heads).index_select(0, sorted_here) for t in (q, k, v)
        )

    def attend_part(
        q: Tensor, k: Tensor, v: Tensor, held: Fraction, seen: Fraction, part: int
    ) -> Tensor:
        """`held`, `seen`: the share of each sequence that q and k, v are."""
        how: dict[str, Any] = {"causal": causal, "window": window}
        if packed:
            how["cu_seqlens_q"] = starts * held.numerator // held.denominator
            how["cu_seqlens_k"] = starts * seen.numerator // seen.denominator
        return attend(q, k, v, how, part=part + 2 * _size(groups.keys) * _rank(groups.heads))

    if groups.keys is None:
        out = attend_part(q, k, v, Fraction(1), Fraction(1), 0)
    else:
        out = _over_gathered_keys(attend_part, q, k, v, groups.keys, causal, starts)
    if groups.heads is not None:
        out = out.index_select(0, torch.argsort(sorted_here))
        out = _TokensForHeads.apply(out, groups.heads)
    return out


def _over_gathered_keys(
    attend: Callable[[Tensor, Tensor, Tensor, Fraction, Fraction, int], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    starts: Tensor,
) -> Tensor:
    num_ranks, rank = group.size(), group.rank()
    order = _token_order(starts, q.shape[0] * num_ranks, num_ranks)
    in_order = torch.argsort(order.view(-1))
    k, v = (_GatheredTokens.apply(t, group).index_select(0, in_order) for t in (k, v))
    if not causal:
        return attend(q, k, v, Fraction(1, num_ranks), Fraction(1), rank)
    chunks = _chunks(starts, k.shape[0], num_ranks)
    outs, places = [], []
    for chunk in (rank, 2 * num_ranks - 1 - rank):
        queries = (chunks[order[rank]] == chunk).nonzero().view(-1)
        keys = (chunks <= chunk).nonzero().view(-1)
        chunk_q, seen_k, seen_v = (
            t.index_select(0, kept) for t, kept in ((q, queries), (k, keys), (v, keys))
        )
        held, seen = Fraction(1, 2 * num_ranks), Fraction(chunk + 1, 2 * num_ranks)
        outs.append(attend(chunk_q, seen_k, seen_v, held, seen, chunk))
        places.append(queries)
    return torch.cat(outs).index_select(0, torch.argsort(torch.cat(places)))


def owners(starts: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    """`[num_tokens]`: which rank holds each token. Contract: :func:`context_attention`."""
    chunks = _chunks(starts, num_tokens, num_ranks)
    return torch.minimum(chunks, 2 * num_ranks - 1 - chunks)


def _chunks(starts: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    """`[num_tokens]`: which of the 2 N chunks of its sequence each token is in."""
    lengths = starts.diff()
    if (lengths % (2 * num_ranks)).any() or int(starts[-1]) != num_tokens:
        raise ValueError(
            f"context parallelism over {num_ranks} ranks: sequences of {lengths.tolist()} tokens for "
            f"{num_tokens} in all; each must be a multiple of {2 * num_ranks}, and they must cover them"
        )
    tokens = torch.arange(num_tokens, device=starts.device)
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    return (tokens - starts[sequence]) // (lengths // (2 * num_ranks))[sequence]


def _token_order(starts: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    """`[num_ranks, num_tokens / num_ranks]`: the tokens that each rank holds, in its order."""
    return torch.argsort(owners(starts, num_tokens, num_ranks), stable=True).view(num_ranks, -1)


def _check_heads(num_heads: int, num_ranks: int) -> None:
    if num_heads % num_ranks:
        raise ValueError(
            f"context parallelism with an all-to-all of heads: {num_heads} heads on each rank are no "
            f"multiple of the {num_ranks} ranks that share them; use --cp-comm-type p2p"
        )


def _repeat_heads(x: Tensor, num_heads: int, num_ranks: int) -> Tensor:
    """Heads of keys or values, repeated until the ranks divide them."""
    groups = x.shape[-2]
    if groups % num_ranks == 0:
        return x
    wanted = num_ranks if num_ranks % groups == 0 else num_heads
    return x.repeat_interleave(wanted // groups, dim=-2)


class _GatheredTokens(torch.autograd.Function):
    """[S, ...] of every rank, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_rows(grads[0], ctx.group)[0], None


class _HeadsForTokens(torch.autograd.Function):
    """[S, ..., H, D] -> [ranks * S, ..., H / ranks, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _heads_for_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _tokens_for_heads(grads[0], ctx.group), None


class _TokensForHeads(torch.autograd.Function):
    """[ranks * S, ..., width] of a part of the heads -> [S, ..., ranks * width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _tokens_for_heads(x.unsqueeze(-2), group).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].unflatten(-1, (ctx.group.size(), -1))
        return _heads_for_tokens(dy, ctx.group).flatten(-2), None


def _heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = x.unflatten(-2, (group.size(), -1)).movedim(-3, 0).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out.flatten(0, 1)


def _tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = x.unflatten(0, (group.size(), -1)).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out.movedim(0, -3).flatten(-3, -2)
