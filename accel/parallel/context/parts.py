"""Attention of some queries over some keys of sequences, as its kernel takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.ops.attention import (
    QUERIES_DRAWN,
    SEED_AND_PLACES,
    attention,
    attention_gradients,
    attention_gradients_ref,
    attention_ref,
    largest_scores,
)

__all__ = ["Attention", "Part", "place_of_chunk"]


class Part(NamedTuple):
    """Queries and keys that are neighbours in each sequence, and which keys a query sees."""

    causal: bool = False
    """Aligned with the last key."""
    window: tuple[int, int] | None = None
    cu_seqlens_q: Tensor | None = None
    """For a pack: where the queries of each sequence start."""
    cu_seqlens_k: Tensor | None = None
    first_query: int | Tensor = 0
    """Its place in the sequence; in a pack `[sequences]`."""
    first_key: int | Tensor = 0


def place_of_chunk(number: int, length: int | Tensor) -> int | Tensor:
    """Where the queries of a chunk begin, as dropout counts them: chunks that are no multiple of
    QUERIES_DRAWN begin where they would if all were padded to one, so that no two draw the same bits."""
    return number * (-(-length // QUERIES_DRAWN) * QUERIES_DRAWN)


@dataclass(frozen=True)
class Attention:
    """What one layer's attention is on every part."""

    softmax_scale: float
    dropout: float = 0.0
    seed: Tensor | None = None
    """One int64, the same on all ranks that share the sequences: what is dropped depends on it and on the
    places of head, query and key, not on who computes."""
    kernel: bool = True
    """Whether `accel.ops.attention` computes, or its reference."""
    first_head: int = 0
    offset: Tensor | None = None
    """`[H]`, the score of one more key, of value 0, that every query sees."""
    largest: Tensor | None = None
    """`[H]` fp32, raised to the largest score of each head in every part that is computed."""

    def of_heads(self, heads: range) -> Attention:
        """The same where queries have these heads alone."""
        own = slice(heads.start, heads.stop)
        offset, largest = (None if t is None else t[own] for t in (self.offset, self.largest))
        return dataclasses.replace(self, first_head=heads.start, offset=offset, largest=largest)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        """`[Q, B, H, E]` or `[T, H, E]`, with gradients: `part` has all keys that the queries see."""
        return self._forward(q, k, v, part, offset=self.offset)[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Result and log-sum-exp, `[B, H, Q]` or `[H, T]` fp32, of these keys alone: without gradients, and
        without the offset (`join_offset`)."""
        with torch.no_grad():
            return self._forward(q, k, v, part)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's share of dq, dk and dv, where `out` and `lse` are of all keys."""
        compute = attention_gradients if self.kernel else attention_gradients_ref
        return compute(dout, q, k, v, out, lse, **self._options(part))

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Part, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.largest is not None:
            found = largest_scores(q, k, **self._scores(part))
            torch.maximum(self.largest, found, out=self.largest)
        compute = attention if self.kernel else attention_ref
        return compute(q, k, v, offset=offset, **self._options(part))

    def _scores(self, part: Part) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale,
            "causal": part.causal,
            "window": part.window,
            "cu_seqlens_q": part.cu_seqlens_q,
            "cu_seqlens_k": part.cu_seqlens_k,
        }

    def _options(self, part: Part) -> dict[str, Any]:
        options = self._scores(part)
        if self.dropout and self.seed is not None:
            places = (0, self.first_head, part.first_query, part.first_key)
            options |= {"dropout": self.dropout, "seed": seed_at(self.seed, places)}
        return options


def seed_at(seed: Tensor, places: Sequence[int | Tensor]) -> Tensor:
    """`[SEED_AND_PLACES]`, or `[sequences, SEED_AND_PLACES]` if a place is a tensor."""
    columns = [torch.as_tensor(place, device=seed.device) for place in places]
    columns = list(torch.broadcast_tensors(seed.reshape(()), *columns))
    assert len(columns) == SEED_AND_PLACES
    return torch.stack(columns, dim=-1).to(torch.int64)
