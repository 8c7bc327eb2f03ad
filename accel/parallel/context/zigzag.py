"""Who holds which tokens of sequences that are split over a context-parallel group.

Every sequence is cut into 2 N equal chunks for N ranks, and rank r holds the chunks r and 2 N - 1 - r:
Megatron's split. Below a causal mask a chunk's work grows with its place, and the two of a rank always add
up to the same.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from accel.ops._capture import is_capturing
from accel.ops.findings import Findings

__all__ = ["chunks", "halves", "keep_for_graphs", "owners", "token_order", "whole_sequence"]

_ORDERS, _CHUNKS = Findings(), Findings()
_WHOLE: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The starts of one sequence, which nobody writes to."""
_CAPTURED: list[object] = []
"""What CUDA graphs read at each replay."""


@functools.lru_cache(8)
def whole_sequence(num_tokens: int, device: torch.device) -> Tensor:
    """`[2]`: the starts of one sequence, the same tensor each time: what follows from it is found once."""
    with torch.inference_mode(False):
        starts = torch.tensor([0, num_tokens], device=device)
    _WHOLE[starts] = num_tokens
    return starts


def owners(starts: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    """`[num_tokens]`: which rank holds each token.

    Args:
        starts: `[sequences + 1]`, where each sequence starts, from 0, and where the last one ends.

    Raises:
        ValueError: a sequence that is no multiple of 2 N, or sequences that do not cover the tokens.
    """
    of_token = chunks(starts, num_tokens, num_ranks)
    return torch.minimum(of_token, 2 * num_ranks - 1 - of_token)


def chunks(starts: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    """`[num_tokens]`: which of the 2 N chunks of its sequence each token is in. Contract: :func:`owners`."""
    found: Tensor = _CHUNKS.get(
        starts,
        find=lambda: _chunks(starts, num_tokens, num_ranks),
        about=(num_tokens, num_ranks),
    )
    return found


def _chunks(starts: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    lengths = starts.diff()
    if (lengths % (2 * num_ranks)).any() or int(starts[-1]) != num_tokens:
        nearest = (lengths / (2 * num_ranks)).round().clamp(min=1).long() * 2 * num_ranks
        raise ValueError(
            f"context parallelism over {num_ranks} ranks: sequences of {lengths.tolist()} tokens for "
            f"{num_tokens} in all; each must be a multiple of {2 * num_ranks} (nearest: "
            f"{nearest.tolist()}), and they must cover them"
        )
    tokens = torch.arange(num_tokens, device=starts.device)
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    return (tokens - starts[sequence]) // (lengths // (2 * num_ranks))[sequence]


def token_order(starts: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    """`[N, num_tokens / N]`: the tokens that each rank holds, in its order. Contract: :func:`owners`."""

    def find() -> Tensor:
        order = torch.argsort(owners(starts, num_tokens, num_ranks), stable=True)
        return order.view(num_ranks, -1)

    found: Tensor = _ORDERS.get(starts, find=find, about=(num_tokens, num_ranks))
    keep_for_graphs(starts, found)
    return found


def keep_for_graphs(starts: Tensor, found: object) -> None:
    """What was found of these starts lives as long as the CUDA graph that is being captured, if one is.

    Raises:
        ValueError: it is captured, and the starts are a pack's.
    """
    if is_capturing(starts.device):
        if starts not in _WHOLE:
            raise ValueError(
                "context parallelism: a CUDA graph would hold the order of the tokens of this pack for all: "
                "capture what is beside the attention of packed sequences"
            )
        _CAPTURED.append(found)


def halves(starts: Tensor | None, num_tokens: int) -> tuple[Tensor | slice, Tensor | slice]:
    """Where a rank's own tokens of the first and of the second of its two chunks are.

    Args:
        starts: where the rank's part of each sequence starts; None for one sequence.
        num_tokens: of the rank.
    """
    if starts is None:
        return slice(num_tokens // 2), slice(num_tokens // 2, num_tokens)
    tokens = torch.arange(num_tokens, device=starts.device)
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    first = tokens - starts[sequence] < (starts.diff() // 2)[sequence]
    return first.nonzero().view(-1), (~first).nonzero().view(-1)
