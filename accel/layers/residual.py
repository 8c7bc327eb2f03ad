"""A sum of the residual stream and the norm that reads it, computed together though they are called apart.

A layer adds its result to the residual stream in one place; a norm reads the sum in another, often in the
next layer. A `ResidualSum` stands for one such place and learns from the first pass which norm reads its
sums. From then on it computes the norm with the sum (`accel.ops.add_rms_norm`), and the norm finds its result
there: of five passes over the stream one is saved, and of six in the backward two. Every result has the
very bits of the sum and `accel.ops.rms_norm` one after the other.

A norm whose input is a copy, as where a layer is computed again in the backward pass, does not find it: a sum
whose norm nobody took is left alone from then on.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from accel.ops import add_rms_norm

__all__ = ["Norm", "ResidualSum", "norm_of"]

_NOTE = "accel_residual_sum"
"""The attribute of a sum by which its norm finds it; gone once it is read."""


class Norm(NamedTuple):
    """Of RMSNorm: what tells one from another."""

    weight: Tensor
    eps: float
    zero_centered: bool

    def is_same(self, other: Norm) -> bool:
        return self.weight is other.weight and self[1:] == other[1:]


class ResidualSum:
    """One place where something is added to the residual stream."""

    def __init__(self) -> None:
        self.norm: Norm | None = None
        """The one that read the last sum; None: not known yet."""
        self.alone = False
        """Whether nothing is computed with the sum any more, because nobody took it."""
        self._unread = False

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor | None:
        """`residual + (x + bias)`, and its norm; None where the sum is to be computed alone.

        Args:
            x, residual: `[..., N]`.
            bias: `[N]`.
        """
        if self._unread:
            self.alone, self._unread, self.norm = True, False, None
        norm = self.norm
        if norm is None or not _fits(x, bias, residual):
            return None
        normed, total = add_rms_norm(
            x, residual, norm.weight, norm.eps, bias=bias, zero_centered=norm.zero_centered
        )
        self._unread = True
        setattr(total, _NOTE, (self, normed))
        return total

    def watch(self, total: Tensor) -> Tensor:
        """A sum that was computed alone, of which it is to be learnt who reads it."""
        if total.requires_grad and not self.alone:
            setattr(total, _NOTE, (self, None))
        return total

    def read(self, normed: Tensor | None, norm: Norm) -> Tensor | None:
        """The norm of the last sum, if it is the one that was computed with it."""
        found = normed if self.norm is not None and self.norm.is_same(norm) else None
        self.norm, self._unread = norm, False
        return found


def norm_of(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor | None:
    """The norm that was computed when x was; None if it was not."""
    note = vars(x).pop(_NOTE, None)
    if note is None:
        return None
    of, normed = note
    found: Tensor | None = of.read(normed, Norm(weight, eps, zero_centered))
    return found


def _fits(x: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    """Whether the two are added as they are, in training; elsewhere the sum may be in x's own memory."""
    like = x.dtype == residual.dtype and x.shape == residual.shape and x.device == residual.device
    if not (
        x.requires_grad or residual.requires_grad
    ):  # Megatron adds with gradients on even in evaluation
        return False
    return like and (bias is None or (bias.dtype == x.dtype and bias.shape == x.shape[-1:]))
