"""A sum of the residual stream and the norm that reads it, computed together though they are called apart.

A layer adds its result to the residual stream in one place; a norm reads the sum in another, often in the
next layer. A `ResidualSum` stands for one such place and learns from the first pass which norm reads its
sums. From then on it computes the norm with the sum (`accel.ops.add_rms_norm`), and the norm finds its result
there: of five passes over the stream one is saved, and of six in the backward two. Every result has the
very bits of the sum and `accel.ops.rms_norm` one after the other.

A norm takes what it finds only if its input still is that sum: unchanged, and a result of the same node of
autograd's graph, which it no longer is where it comes out of another function, as out of the checkpoint of a
whole layer; and if nobody has asked for the sum's gradient, of which the norm's part would be missing. Where
a norm's input is a copy, as a module gets it while it has backward hooks, it finds nothing. A sum whose norm
nobody took learns anew, and is left alone once that has happened a few times running.

The two are computed apart, and nothing is learnt, within `torch.compile`, where a tensor carries no notes;
and where hooks take what autograd saves: `torch.utils.checkpoint` without reentry must save the same
tensors when it computes again, whatever has been learnt since, and though the note of its input was read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accel.ops import add_rms_norm
from accel.ops._saving import hooks_take_saved

__all__ = ["GATHERED_LATE", "Norm", "ResidualSum", "norm_of"]

MISSES = 4
"""So many norms in a row that nobody took are enough."""
GATHERED_LATE = "accel_gathered_late"
"""Set on a weight that is written while layers before its own run."""
_NOTE = "accel_residual_sum"
"""The attribute of a sum by which its norm finds it; gone once it is read."""


class Norm(NamedTuple):
    """What tells one RMSNorm from another."""

    weight: Tensor
    eps: float
    zero_centered: bool

    def is_same(self, other: Norm) -> bool:
        return self.weight is other.weight and self[1:] == other[1:]


class _Note(NamedTuple):
    """What a sum carries to its norm."""

    of: ResidualSum
    normed: Tensor | None
    """With it; None: the norm is not known yet."""
    version: int
    """The sum's, as autograd counts changes in place."""

    def holds(self, total: Tensor) -> bool:
        """Whether `normed` is the norm of `total`, with a gradient that goes where that of `total` goes, and
        need not go through `total` itself."""
        return (
            self.normed is not None
            and self.normed.grad_fn is total.grad_fn
            and self.version == total._version
            and not (total._backward_hooks or total.retains_grad)
        )


class ResidualSum:
    """One place where something is added to the residual stream."""

    def __init__(self) -> None:
        self.norm: Norm | None = None
        """The one that read the last sum; None: not known yet."""
        self.alone = False
        """Whether nothing is computed with the sum any more, because nobody took it, time and again."""
        self._unread, self._misses = False, 0

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor | None:
        """`residual + (x + bias)`, and its norm; None where the sum is to be computed alone.

        Args:
            x, residual: `[..., N]`.
            bias: `[N]`.
        """
        if _is_apart():
            return None
        if self._unread:
            self._unread, self.norm, self._misses = False, None, self._misses + 1
            self.alone = self._misses == MISSES
        norm = self.norm
        if norm is None or not _is_whole(norm.weight) or not _fits(x, bias, residual):
            return None
        normed, total = add_rms_norm(
            x, residual, norm.weight, norm.eps, bias=bias, zero_centered=norm.zero_centered
        )
        self._unread = True
        setattr(total, _NOTE, _Note(self, normed, total._version))
        return total

    def watch(self, total: Tensor, x: Tensor) -> Tensor:
        """A sum with `x` that was computed alone, of which it is to be learnt who reads it."""
        if x.requires_grad and not self.alone and not _is_apart():
            setattr(total, _NOTE, _Note(self, None, total._version))
        return total

    def read(self, total: Tensor, note: _Note, norm: Norm) -> Tensor | None:
        """The norm of `total`, if it is the one that was computed with it."""
        if note.normed is not None and not note.holds(total):
            return None  # nobody took it
        known, self.norm, self._unread = self.norm, norm, False
        if known is None or not known.is_same(norm):
            return None
        self._misses = 0 if note.normed is not None else self._misses
        return note.normed


def norm_of(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor | None:
    """The norm that was computed when x was; None if it was not."""
    if torch.compiler.is_compiling():
        return None
    note: _Note | None = vars(x).pop(_NOTE, None)
    if note is None or hooks_take_saved():
        return None
    return note.of.read(x, note, Norm(weight, eps, zero_centered))


def _is_apart() -> bool:
    return torch.compiler.is_compiling() or hooks_take_saved()


def _is_whole(weight: Tensor) -> bool:
    """Others' weights, FSDP's and those that are gathered beside the forward pass, are there, or no shards,
    only while their own module runs."""
    is_sharded = any(hasattr(weight, a) for a in ("__fsdp_param__", "_local_tensor", GATHERED_LATE))
    return not is_sharded and weight.untyped_storage().size() > 0


def _fits(x: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    """Whether the two are added as they are, and where gradients are wanted; elsewhere the sum may be in x's
    own memory. `x` tells that: Megatron adds with gradients on even where the layer is computed without."""
    like = x.dtype == residual.dtype and x.shape == residual.shape and x.device == residual.device
    like = like and x.requires_grad
    return like and (bias is None or (bias.dtype == x.dtype and bias.shape == x.shape[-1:]))
