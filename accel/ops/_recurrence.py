"""What recurrences share: how much of a token is left at another one of its chunk, states, and checks.

With s the running sum of the logarithms of the tokens' decays, exp(s[i] - s[j]) of token j is left at i. The
sum is fp64, but on NPUs: behind a token that forgets nearly all s is large, and what lies between the tokens
behind it a small difference of large numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Decays",
    "check_segments",
    "check_shapes",
    "first_state",
    "gradient_of_logs",
    "used_slots",
]


_NOTHING_LEFT = -1e4
"""The logarithm of a decay that is 0 in every dtype."""


class Decays(NamedTuple):
    """The decays within one chunk of Q tokens, in the dtype of the logarithms; `...` are batch and heads."""

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
        s = logs.clamp(min=_NOTHING_LEFT).cumsum(-1, dtype=exact)  # no inf less inf
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


def first_state(x: Tensor, shape: tuple[int, ...], given: Tensor | None) -> Tensor:
    """What was given, or zeros, in fp32 (fp64 where x is float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(shape, dtype=wide) if given is None else given.to(wide)


def used_slots(x: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which sequences of x `[B, ...]` there are, and the row of the state of each."""
    if slots is None:
        every = torch.arange(x.shape[0], device=x.device)
        return every, every
    used = (slots >= 0).nonzero().flatten()
    return used, slots[used].long()


def check_segments(op: str, x: Tensor, segments: Tensor | None) -> None:
    """Raise unless they are integers, one for each token of x `[B, S, ...]`."""
    if segments is None:
        return
    if segments.shape != x.shape[:2] or segments.is_floating_point() or segments.is_complex():
        raise ValueError(
            f"{op}: segments must be integers of shape {list(x.shape[:2])}, got "
            f"{list(segments.shape)} {segments.dtype}"
        )
    if segments.device != x.device:
        raise ValueError(f"{op}: segments are on {segments.device}, x on {x.device}")


def check_shapes(
    op: str,
    device: torch.device,
    allowed: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]],
) -> None:
    """Raise unless each tensor that is there has one of its shapes and is on the device."""
    for name, (tensor, shapes) in allowed.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{op}: {name} must have shape {wanted}, got {list(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the tokens are on {device}")
