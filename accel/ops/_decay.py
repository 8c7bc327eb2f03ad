"""How much of a token is left at another one of its chunk, and the gradient of that: shared by recurrences.

With s the running sum of the logarithms of the tokens' decays, exp(s[i] - s[j]) of token j is left at i. The
sum is fp64, but on NPUs: behind a token that forgets nearly all s is large, and what lies between the tokens
behind it a small difference of large numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Decays", "chunks_of", "gradient_of_logs"]


def chunks_of(num_tokens: int, chunk_size: int) -> list[slice]:
    return [
        slice(first, min(first + chunk_size, num_tokens))
        for first in range(0, num_tokens, chunk_size)
    ]


class Decays(NamedTuple):
    """Of one chunk of Q tokens, in the dtype of the logarithms; `...` are a batch and its heads."""

    between: Tensor
    """exp(s[i] - s[j]) for j <= i of one segment, else 0. [..., Q, Q]"""
    from_state: Tensor
    """exp(s[i]), 0 where the state before the chunk is of another segment. [..., Q]"""
    to_state: Tensor
    """exp(s[Q] - s[j]), 0 where a token's segment ends before the chunk does. [..., Q]"""
    keep: Tensor
    """exp(s[Q]), 0 where no token of the segment before is left at the end. [...]"""

    @classmethod
    def of(cls, logs: Tensor, segments: Tensor | None, rows: slice) -> "Decays":
        """
        Args:
            logs: `[B, ..., Q]`, of the tokens in `rows`.
            segments: `[B, S]` of whole sequences, or None.
        """
        exact = torch.float64
        if logs.device.type == "npu":
            exact = logs.dtype
        s = logs.cumsum(-1, dtype=exact)
        num_tokens = s.shape[-1]
        hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=s.device).triu(1)
        from_state, to_state, keep = s.exp(), (s[..., -1:] - s).exp(), s[..., -1].exp()
        if segments is not None:
            ids, before = segments[:, rows], segments[:, max(rows.start - 1, 0)]
            ids = ids.view(len(ids), *[1] * (s.ndim - 2), num_tokens)
            before = before.view(*ids.shape[:-1], 1)
            hidden = hidden | (ids.unsqueeze(-1) != ids.unsqueeze(-2))
            from_state = from_state * (ids == before)
            to_state = to_state * (ids == ids[..., -1:])
            keep = keep * (ids[..., -1] == before[..., 0])
        between = (s.unsqueeze(-1) - s.unsqueeze(-2)).to(logs.dtype)
        between = between.masked_fill_(hidden, -torch.inf).exp_()
        return cls(between, *(t.to(logs.dtype) for t in (from_state, to_state, keep)))


def gradient_of_logs(pairs: Tensor, reads: Tensor, leaves: Tensor, kept: Tensor) -> Tensor:
    """The gradient of the logarithms, `[..., Q]`.

    That of i is summed over the pairs of tokens on both sides of it, of which those with nothing left add
    none: as a running sum of rows less columns of `pairs`, it would be a small difference of large numbers.

    Args:
        pairs: `[..., Q, Q]`, exp(s[i] - s[j]) times its gradient.
        reads, leaves: `[..., Q]`, the same of exp(s[i]) and of exp(s[Q] - s[j]).
        kept: `[...]`, the same of exp(s[Q]).
    """
    from_before = torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=pairs.device).triu_(1)
    dlogs = (pairs @ from_before).tril_().sum(-2)
    dlogs += reads.flip(-1).cumsum(-1).flip(-1)
    dlogs[..., 1:] += leaves.cumsum(-1)[..., :-1]
    return dlogs.add_(kept.unsqueeze(-1))
