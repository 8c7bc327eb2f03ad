"""Attention of some queries over some keys of sequences, as its kernel takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.ops.attention import (
    QUERIES_DRAWN,
    SEED_AND_PLACES,
    attention,
    attention_gradients,
    attention_gradients_ref,
    attention_ref,
    largest_scores,
)

__all__ = ["Attention", "Part", "join_offset", "offset_gradient", "place_of_chunk"]


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
    """`[H]` fp32, raised to the largest score of each head in every part that is computed; not of packs."""

    def of_heads(self, heads: range) -> Attention:
        """The same where queries have these heads alone."""
        own = slice(heads.start, heads.stop)
        offset, largest = (None if t is None else t[own] for t in (self.offset, self.largest))
        return dataclasses.replace(self, first_head=heads.start, offset=offset, largest=largest)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        """`[Q, B, H, E]` or `[T, H, E]`, with gradients: `part` has all keys that the queries see."""
        if self.offset is None:
            return self._forward(q, k, v, part)[0]
        out: Tensor = _WithOffset.apply(q, k, v, self.offset, self, part)
        return out

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

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        if self.largest is not None:
            mask: dict[str, Any] = {"causal": part.causal, "window": part.window}
            found = largest_scores(q, k, softmax_scale=self.softmax_scale, **mask)
            torch.maximum(self.largest, found, out=self.largest)
        return (attention if self.kernel else attention_ref)(q, k, v, **self._options(part))

    def _options(self, part: Part) -> dict[str, Any]:
        options: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "causal": part.causal,
            "window": part.window,
            "cu_seqlens_q": part.cu_seqlens_q,
            "cu_seqlens_k": part.cu_seqlens_k,
        }
        if self.dropout and self.seed is not None:
            places = (0, self.first_head, part.first_query, part.first_key)
            options |= {"dropout": self.dropout, "seed": seed_at(self.seed, places)}
        return options


class _WithOffset(torch.autograd.Function):
    """`Attention.__call__` with an offset."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, offset: Tensor, attention: Attention, part: Part
    ) -> Tensor:
        out, lse = join_offset(*attention.forward(q, k, v, part), offset)
        ctx.save_for_backward(q, k, v, out, lse, offset)
        ctx.how = attention, part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, out, lse, offset = ctx.saved_tensors
        attention, part = ctx.how
        of_qkv = attention.gradients(grads[0], *qkv, out, lse, part)
        of_offset = None
        if ctx.needs_input_grad[3]:
            of_offset = offset_gradient(grads[0], out, lse, offset)
        return (*of_qkv, of_offset, None, None)


def join_offset(out: Tensor, lse: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp of all keys -> of these and the offset, from which all gradients follow."""
    offset = offset.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - offset)
    return (out * _of_rows(share)).to(out.dtype), torch.logaddexp(lse, offset)


def offset_gradient(dout: Tensor, out: Tensor, lse: Tensor, offset: Tensor) -> Tensor:
    """`[H]`, from `out` and `lse` with the offset in them: a value of 0 has the gradient -dout out."""
    prob = torch.exp(offset.to(lse.dtype)[:, None] - lse)
    of_rows = (dout.to(lse.dtype) * out).sum(-1, keepdim=True) * _of_rows(prob)
    return -of_rows.flatten(0, -3).sum(0).view(-1).to(offset.dtype)


def _of_rows(x: Tensor) -> Tensor:
    """`[B, H, Q]` -> `[Q, B, H, 1]`, `[H, T]` -> `[T, H, 1]`."""
    return x.movedim(-1, 0).unsqueeze(-1)


def seed_at(seed: Tensor, places: Sequence[int | Tensor]) -> Tensor:
    """`[SEED_AND_PLACES]`, or `[sequences, SEED_AND_PLACES]` if a place is a tensor."""
    columns = [torch.as_tensor(place, device=seed.device) for place in places]
    columns = list(torch.broadcast_tensors(seed.reshape(()), *columns))
    assert len(columns) == SEED_AND_PLACES
    return torch.stack(columns, dim=-1).to(torch.int64)
