r"""The short convolution of a state-space layer: each channel by itself, along the tokens, then SiLU.

    p[t] = bias + sum over k < K of w[k] x[t - k]         y = SiLU(p), or p
    dx[t] = sum over k of w[k] dp[t + k]                  dp = dy SiLU'(p)
    dw[k] = sum over t of dp[t] x[t - k]                  dbias = sum over t of dp[t]

Letters     B  batch;   S  tokens of a sequence;   C  channels;   K  taps: w[k] is column K - 1 - k of weight
Edges       What is before the first token of a sequence, or of a segment, is 0.
Dtypes      Any float; y and dx have that of x. Sums are fp32 (fp64 of float64 x), rounded once.
Saved       x, weight and bias: p is computed again.
Order       Fixed by the shapes; the number of threads changes no bit.
Memory      fp32 copies of `TOKENS` tokens at a time.
Kernels     PyTorch's elementwise ones; run on the CPU so far.

Replaces ``causal_conv1d.causal_conv1d_fn`` and ``causal_conv1d_update`` of Dao-AILab/causal-conv1d; the
tokens of a sequence are rows here, as the linear layer before it gives them.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._dispatch import refuse_derivative
from accel.ops._recurrence import check_segments, used_slots

__all__ = ["causal_conv1d", "causal_conv1d_ref", "causal_conv1d_step"]

TOKENS = 256
"""So many at a time: 256 tokens of 4096 channels are 4 MiB of fp32."""


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """The definition of correct: torch's convolution of each segment. Same contract as `causal_conv1d`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    taps, bias = weight[:, None].to(wide), None if bias is None else bias.to(wide)
    rows = []
    for sequence, ids in zip(x.to(wide), _segments_or_one(x, segments), strict=True):
        sizes = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
        parts = [F.pad(part.T, (weight.shape[1] - 1, 0)) for part in sequence.split(sizes)]
        out = [F.conv1d(part[None], taps, bias, groups=x.shape[2])[0].T for part in parts]
        rows.append(torch.cat(out) if out else sequence)
    y = torch.stack(rows) if rows else x.to(wide)
    return (F.silu(y) if silu else y).to(x.dtype)


def _segments_or_one(x: Tensor, segments: Tensor | None) -> Tensor:
    return x.new_zeros(x.shape[:2], dtype=torch.int32) if segments is None else segments


class _Window(NamedTuple):
    """Some tokens with what their taps see."""

    x: Tensor
    """[B, K - 1 + tokens, C], fp32; zeros before the first token."""
    segments: Tensor | None
    """[B, K - 1 + tokens]"""

    @classmethod
    def of(
        cls, x: Tensor, segments: Tensor | None, num_taps: int, first: int, stop: int
    ) -> "_Window":
        start = max(first - num_taps + 1, 0)
        missing = num_taps - 1 - (first - start)
        rows = x[:, start:stop].to(torch.promote_types(x.dtype, torch.float32))
        if segments is not None:
            segments = F.pad(segments[:, start:stop], (missing, 0))
        return cls(F.pad(rows, (0, 0, missing, 0)), segments)

    def tap(self, k: int, num_taps: int) -> Tensor:
        """x[t - k] of each token t, 0 where that is of another segment."""
        num_tokens = self.x.shape[1] - num_taps + 1
        begin = num_taps - 1 - k
        seen = self.x[:, begin : begin + num_tokens]
        if self.segments is None or k == 0:
            return seen
        theirs = self.segments[:, begin : begin + num_tokens]
        return seen.masked_fill((theirs != self.segments[:, num_taps - 1 :]).unsqueeze(-1), 0)

    def sums(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """p of each token, in fp32."""
        num_taps = weight.shape[1]
        p = self.tap(0, num_taps) * weight[:, -1]
        for k in range(1, num_taps):
            p.addcmul_(self.tap(k, num_taps), weight[:, num_taps - 1 - k])
        return p if bias is None else p.add_(bias)


torch.library.define(
    "accel::causal_conv1d_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? segments, bool silu) -> Tensor",
)
torch.library.define(
    "accel::causal_conv1d_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? segments, bool silu)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
)


@torch.library.register_fake("accel::causal_conv1d_fwd")
def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.impl("accel::causal_conv1d_fwd", "CompositeExplicitAutograd")
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> Tensor:
    y = x.new_empty(x.shape)
    taps, shift = _wide(x, weight, bias)
    for first in range(0, x.shape[1], TOKENS):
        rows = slice(first, min(first + TOKENS, x.shape[1]))
        p = _Window.of(x, segments, weight.shape[1], rows.start, rows.stop).sums(taps, shift)
        y[:, rows] = F.silu(p, inplace=True) if silu else p
    return y


@torch.library.register_fake("accel::causal_conv1d_bwd")
def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


@torch.library.impl("accel::causal_conv1d_bwd", "CompositeExplicitAutograd")
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_taps = x.shape[1], weight.shape[1]
    taps, shift = _wide(x, weight, bias)
    dx = x.new_empty(x.shape)
    dtaps, dshift = taps.new_zeros(taps.shape), taps.new_zeros(len(taps))
    for first in range(0, num_tokens, TOKENS):
        stop = min(first + TOKENS, num_tokens)
        beyond = min(stop + num_taps - 1, num_tokens)  # tokens that see those of this piece
        window = _Window.of(x, segments, num_taps, first, beyond)
        dp = dy[:, first:beyond].to(taps.dtype)
        if silu:
            dp = torch.ops.aten.silu_backward(dp, window.sums(taps, shift))
        own = dp[:, : stop - first]
        dshift += own.sum((0, 1))
        total = torch.zeros_like(own)
        for k in range(num_taps):
            column = num_taps - 1 - k
            dtaps[:, column] += (own * window.tap(k, num_taps)[:, : stop - first]).sum((0, 1))
            later = dp[:, k:][:, : stop - first]
            if segments is not None and k:
                ours, theirs = segments[:, first:stop], segments[:, first + k : stop + k]
                later = later.masked_fill((ours[:, : theirs.shape[1]] != theirs).unsqueeze(-1), 0)
            total[:, : later.shape[1]].addcmul_(later, taps[:, column])
        dx[:, first:stop] = total
    dbias = weight.new_empty(0) if bias is None else dshift.to(bias.dtype)
    return dx, dtaps.to(weight.dtype), dbias


refuse_derivative("accel::causal_conv1d_bwd")


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: Tensor | None,
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, segments)
        ctx.silu = silu
        return torch.ops.accel.causal_conv1d_fwd(x, weight, bias, segments, silu)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, segments = ctx.saved_tensors
        grads = torch.ops.accel.causal_conv1d_bwd(dy, x, weight, bias, segments, ctx.silu)
        dx, dweight, dbias = grads
        return dx, dweight, None if bias is None else dbias, None, None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """Convolve each channel with its own taps, which see a token and those before it.

    Args:
        x: `[B, S, C]`, any floating dtype and strides.
        weight: `[C, K]`, K >= 1; the last column is the token's own.
        bias: `[C]`.
        segments: `[B, S]`, integers: a token sees none of another segment. Those of one segment follow each
            other.
        silu: apply SiLU.

    Returns:
        `[B, S, C]`, contiguous, in the dtype of x.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_channels("causal_conv1d", x, weight, bias)
    check_segments("causal_conv1d", x, segments)
    return _CausalConv1d.apply(x, weight, bias, segments, silu)


def causal_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    slots: Tensor | None = None,
    states_after: Tensor | None = None,
) -> Tensor:
    """The next tokens of sequences whose last inputs are at hand; no gradients.

    Args:
        x: `[B, S, C]`, S tokens of each sequence.
        state: `[slots, C, W]` with W >= K - 1, the last W inputs, oldest first; updated in place.
        weight, bias, silu: see `causal_conv1d`.
        slots: `[B]`, the row of `state` of each sequence; -1 is padding, whose y is 0. None: as they come.
        states_after: `[slots, S, C, W]`, is given the state after each token.

    Returns:
        `[B, S, C]` in the dtype of x.

    Raises:
        ValueError: as `causal_conv1d`.
    """
    check_channels("causal_conv1d_step", x, weight, bias)
    if state.ndim != 3 or state.shape[1] != x.shape[2] or state.shape[2] < weight.shape[1] - 1:
        raise ValueError(
            f"causal_conv1d_step: state must have shape [slots, {x.shape[2]}, W] with W >= "
            f"{weight.shape[1] - 1}, got {list(state.shape)}"
        )
    with torch.no_grad():
        num_taps, width, num_tokens = weight.shape[1], state.shape[2], x.shape[1]
        used, rows = used_slots(x, slots)
        seen = torch.cat([state[rows], x[used].transpose(1, 2).to(state.dtype)], dim=2)
        window = seen[:, :, width - num_taps + 1 :].transpose(1, 2)
        y = x.new_zeros(x.shape)
        y[used] = causal_conv1d(window, weight, bias, silu=silu)[:, num_taps - 1 :].to(x.dtype)
        if states_after is not None:
            after = seen.unfold(2, width, 1)[:, :, 1:].transpose(1, 2)
            states_after[rows, :num_tokens] = after.to(states_after.dtype)
        state[rows] = seen[:, :, num_tokens:]
    return y


def check_channels(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise what `causal_conv1d` promises."""
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(
            f"{op}: x must be [B, S, C] of a floating dtype, got {list(x.shape)} {x.dtype}"
        )
    if weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(
            f"{op}: weight must have shape [{x.shape[2]}, K] with K >= 1, got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != (x.shape[2],):
        raise ValueError(f"{op}: bias must have shape [{x.shape[2]}], got {list(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, x on {x.device}")
