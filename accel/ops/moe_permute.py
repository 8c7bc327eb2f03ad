"""Tokens to their experts and back: one row of the result for each (token, expert) pair.

    moe_row_map      m[p] = e T + t    for the pairs of routing_map [T, E], expert by expert and, within
                                       one, token by token; -1 for a padding row
    moe_permute      y[p] = x[t]                        w[p] = probs[t, e]         0 for padding
                     dx[t] = sum of dy[p]               dprobs[t, e] = dw[p]
    moe_unpermute    out[t] = sum of w[p] y[p]          over the rows p of t; w = 1 without probs
                     dy[p] = w[p] dout[t]               dw[p] = sum of dout[t] y[p]

Letters     T  tokens;   E  experts;   P  rows, T times top-k where nothing is dropped;   N  columns
Row map     [P] int64 and all that the ops need to know: row p is token m[p] % T, for expert m[p] // T.
            Plain token indices, as Megatron's unfused `permute` returns them, are the map of one expert.
Dtypes      x, y: float32, bfloat16 or float16. probs: any float, returned as it came.
            Permuting moves bits. Sums are fp32, in the order of the rows, rounded once.
Saved       the map; y and probs where unpermute has probs.
Moved       permute T N + P N elements: a token is read once for all its rows; unpermute as much, in
            the other direction. Each is the gradient of the other.
Order       of every sum: the rows of a token ascending. The number of threads changes no bit.
Limits      `unsupported_reason`. Results are contiguous. A second derivative raises. The values of a map
            are checked on the CPU only: a GPU would have to be waited for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._dispatch import log_fallback, missing_kernel, refuse_derivative, unsupported_dtype

__all__ = [
    "moe_permute",
    "moe_permute_ref",
    "moe_row_map",
    "moe_unpermute",
    "moe_unpermute_ref",
    "unsupported_reason",
]

_MOST_PADDING = 2**62
"""Rows that all experts together may be padded with, so that int64 holds where they begin."""


def moe_permute_ref(
    x: Tensor, row_map: Tensor, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The definition of correct, on any device. Same contract as `moe_permute`."""
    y = F.pad(x, (0, 0, 0, 1)).index_select(0, tokens_of_rows(row_map, x.shape[0]))
    return y, None if probs is None else weights_of_rows(probs, row_map)


def moe_unpermute_ref(
    y: Tensor, row_map: Tensor, num_tokens: int, probs: Tensor | None = None
) -> Tensor:
    """The definition of correct, on any device. Same contract as `moe_unpermute`."""
    weighted = y if probs is None else y * weights_of_rows(probs, row_map)[:, None]
    out = weighted.new_zeros(num_tokens + 1, y.shape[1])
    return out.index_add(0, tokens_of_rows(row_map, num_tokens), weighted)[:num_tokens].to(y.dtype)


def tokens_of_rows(row_map: Tensor, num_tokens: int) -> Tensor:
    """[P]: the token of each row; for padding one beyond the last."""
    return torch.where(row_map < 0, num_tokens, row_map % max(num_tokens, 1))


def weights_of_rows(probs: Tensor, row_map: Tensor) -> Tensor:
    """[P]: the probability of each row, of probs [T, E] or [P]; 0 for padding."""
    if probs.ndim == 1:
        return probs
    place = torch.where(row_map < 0, probs.numel(), row_map)
    return F.pad(probs.T.reshape(-1), (0, 1)).index_select(0, place)


def unsupported_reason(rows: Tensor, probs: Tensor | None = None) -> str | None:
    """Why the references compute for valid inputs; None if the kernels do."""
    if reason := unsupported_dtype(rows.dtype):
        return reason
    if probs is not None and probs.dtype == torch.float64:
        return "probs of dtype torch.float64 (the kernels compute in float32)"
    return missing_kernel("accel::moe_permute_fwd", rows.device.type)


torch.library.define(
    "accel::moe_row_map",
    "(Tensor routing_map, SymInt num_rows, SymInt capacity, SymInt align) -> Tensor",
)
torch.library.define(
    "accel::moe_permute_fwd", "(Tensor x, Tensor row_map, Tensor? probs) -> (Tensor y, Tensor w)"
)
torch.library.define(
    "accel::moe_permute_bwd",
    "(Tensor dy, Tensor dw, Tensor row_map, SymInt num_tokens, SymInt num_experts,"
    " ScalarType probs_dtype) -> (Tensor dx, Tensor dprobs)",
)
torch.library.define(
    "accel::moe_unpermute_fwd",
    "(Tensor y, Tensor row_map, SymInt num_tokens, Tensor? probs) -> Tensor",
)
torch.library.define("accel::moe_unpermute_bwd", "(Tensor dout, Tensor row_map) -> Tensor")
torch.library.define(
    "accel::moe_unpermute_probs_bwd",
    "(Tensor dout, Tensor y, Tensor row_map, Tensor probs) -> (Tensor dy, Tensor dprobs)",
)
_ops = torch.ops.accel


@torch.library.register_fake("accel::moe_row_map")
def _row_map_fake(routing_map: Tensor, num_rows: int, capacity: int, align: int) -> Tensor:
    return routing_map.new_empty(num_rows, dtype=torch.int64)


@torch.library.register_fake("accel::moe_permute_fwd")
def _permute_fake(x: Tensor, row_map: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    w = x.new_empty(0) if probs is None else probs.new_empty(row_map.shape)
    return x.new_empty(row_map.shape[0], x.shape[1]), w


@torch.library.register_fake("accel::moe_permute_bwd")
def _permute_backward_fake(
    dy: Tensor,
    dw: Tensor,
    row_map: Tensor,
    num_tokens: int,
    num_experts: int,
    probs_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    shape = (num_tokens, num_experts) if num_experts else (0,)
    return dy.new_empty(num_tokens, dy.shape[1]), dy.new_empty(shape, dtype=probs_dtype)


@torch.library.register_fake("accel::moe_unpermute_fwd")
def _unpermute_fake(y: Tensor, row_map: Tensor, num_tokens: int, probs: Tensor | None) -> Tensor:
    return y.new_empty(num_tokens, y.shape[1])


@torch.library.register_fake("accel::moe_unpermute_bwd")
def _unpermute_backward_fake(dout: Tensor, row_map: Tensor) -> Tensor:
    return dout.new_empty(row_map.shape[0], dout.shape[1])


@torch.library.register_fake("accel::moe_unpermute_probs_bwd")
def _unpermute_probs_backward_fake(
    dout: Tensor, y: Tensor, row_map: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), probs.new_empty(probs.shape)


def _save_permute(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, row_map, probs = inputs
    ctx.num_tokens = x.shape[0]
    ctx.num_experts = 0 if probs is None else probs.shape[1]
    ctx.probs_dtype = x.dtype if probs is None else probs.dtype
    if probs is None:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(row_map)


def _permute_gradients(ctx: Any, dy: Tensor, dw: Tensor) -> tuple[Tensor | None, ...]:
    (row_map,) = ctx.saved_tensors
    dx, dprobs = _ops.moe_permute_bwd(
        dy, dw, row_map, ctx.num_tokens, ctx.num_experts, ctx.probs_dtype
    )
    return dx, None, dprobs if ctx.num_experts else None


def _save_unpermute(ctx: Any, inputs: tuple, output: Tensor) -> None:
    y, row_map, _, probs = inputs
    ctx.save_for_backward(row_map, *([] if probs is None else [y, probs]))


def _unpermute_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    row_map, *weighted = ctx.saved_tensors
    if not weighted:
        return _ops.moe_unpermute_bwd(dout, row_map), None, None, None
    y, probs = weighted
    dy, dprobs = _ops.moe_unpermute_probs_bwd(dout, y, row_map, probs)
    return dy, None, None, dprobs


torch.library.register_autograd(
    "accel::moe_permute_fwd", _permute_gradients, setup_context=_save_permute
)
torch.library.register_autograd(
    "accel::moe_unpermute_fwd", _unpermute_gradients, setup_context=_save_unpermute
)
for _name in ("moe_permute_bwd", "moe_unpermute_bwd", "moe_unpermute_probs_bwd"):
    refuse_derivative(f"accel::{_name}")


def _check_rows(op: str, name: str, rows: Tensor, row_map: Tensor) -> None:
    if rows.ndim != 2 or not rows.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be floating of shape [rows, N], got {rows.dtype} {list(rows.shape)}"
        )
    if row_map.ndim != 1 or row_map.dtype != torch.int64:
        raise ValueError(
            f"{op}: row_map must be torch.int64 of shape [P], got {row_map.dtype} "
            f"{list(row_map.shape)}"
        )
    if row_map.device != rows.device:
        raise ValueError(
            f"{op}: row_map must be on {rows.device} like {name}, got {row_map.device}"
        )


def _check_probs(
    op: str, probs: Tensor | None, like: Tensor, shapes: Callable[[], str], fits: bool
) -> None:
    if probs is None:
        return
    if not probs.is_floating_point() or not fits:
        raise ValueError(
            f"{op}: probs must be floating of shape {shapes()}, got {probs.dtype} {list(probs.shape)}"
        )
    if probs.device != like.device:
        raise ValueError(f"{op}: probs must be on {like.device}, got {probs.device}")


def moe_row_map(
    routing_map: Tensor,
    num_out_tokens: int | None = None,
    *,
    drop_and_pad: bool = False,
    align: int = 1,
) -> Tensor:
    """The row map of a routing map, in the order of Megatron's `permute`.

    Args:
        routing_map: `[T, E]` bool (or anything that `.bool()` makes one): token goes to expert.
        num_out_tokens: the number of rows P; None counts the pairs. Pairs beyond it are dropped, rows
            beyond the pairs are padding.
        drop_and_pad: every expert gets `num_out_tokens // E` rows (at most T): its first tokens, then,
            where these are fewer, the first tokens that are not its own.
        align: without `drop_and_pad`, every expert's rows are padded to a multiple of this; E times it
            is at most 2^62 (GPUs count rows in 32 bits and take less).

    Returns:
        `[P]` int64.

    Raises:
        ValueError: a shape or a number that makes no sense.
    """
    if routing_map.ndim != 2:
        raise ValueError(
            f"moe_row_map: routing_map must have shape [T, E], got {list(routing_map.shape)}"
        )
    if align < 1 or (num_out_tokens is not None and num_out_tokens < 0):
        raise ValueError(
            "moe_row_map: align must be 1 or more and num_out_tokens not negative, "
            f"got {align} and {num_out_tokens}"
        )
    routing_map = routing_map.bool()
    num_tokens, num_experts = routing_map.shape
    most = _MOST_PADDING // max(num_experts, 1)
    if align > most:
        raise ValueError(
            f"moe_row_map: align must be at most {most} for {num_experts} experts, got {align}"
        )
    capacity = -1
    if drop_and_pad:
        if num_out_tokens is None or num_experts == 0:
            raise ValueError("moe_row_map: drop_and_pad needs num_out_tokens and an expert")
        capacity = min(num_out_tokens // num_experts, num_tokens)
        num_out_tokens = capacity * num_experts
    elif num_out_tokens is None:
        counts = routing_map.sum(0)
        num_out_tokens = int(((counts + align - 1) // align * align).sum())
    if missing := missing_kernel("accel::moe_row_map", routing_map.device.type):
        log_fallback("moe_row_map", missing)
        return _row_map_ref(routing_map, num_out_tokens, capacity, align)
    return _ops.moe_row_map(routing_map, num_out_tokens, capacity, align)


def _row_map_ref(routing_map: Tensor, num_rows: int, capacity: int, align: int) -> Tensor:
    """What `accel::moe_row_map` computes; the definition of correct."""
    num_tokens, num_experts = routing_map.shape
    routed = routing_map.T
    if capacity >= 0:
        order = routed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :capacity]
        experts = torch.arange(num_experts, device=order.device)[:, None]
        return (order + experts * num_tokens).reshape(-1)
    counts = routed.sum(1)
    starts = ((counts + align - 1) // align * align).cumsum(0)
    places = routed.reshape(-1).nonzero()[:, 0]
    experts = places.div(max(num_tokens, 1), rounding_mode="floor")
    shift = F.pad(starts - counts.cumsum(0), (1, 0))[:-1]
    rows = torch.arange(len(places), device=places.device) + shift[experts]
    row_map = places.new_full((num_rows,), -1)
    row_map[rows[rows < num_rows]] = places[rows < num_rows]
    return row_map


def moe_permute(
    x: Tensor, row_map: Tensor, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """A copy of its token in every row, and the probability that goes with it.

    Args:
        x: `[T, N]`, any floating dtype.
        row_map: `[P]` int64 from `moe_row_map`, or token indices `0..T-1`; -1 makes a row of zeros.
        probs: `[T, E]`, any floating dtype; its gradient flows back from the second result.

    Returns:
        `[P, N]` like x, and `[P]` like probs (None without probs).

    Raises:
        ValueError: an input of the wrong shape, dtype or device; on the CPU, a row that names no
            token.

    Where `unsupported_reason` has something to say, that is logged once and `moe_permute_ref` computes.
    """
    _check_rows("moe_permute", "x", x, row_map)
    if probs is not None:
        fits = probs.ndim == 2 and probs.shape[0] == x.shape[0]
        _check_probs("moe_permute", probs, x, lambda: f"[{x.shape[0]}, E]", fits)
    if reason := unsupported_reason(x, probs):
        log_fallback("moe_permute", reason)
        return moe_permute_ref(x, row_map, probs)
    y, w = _ops.moe_permute_fwd(x, row_map, probs)
    return y, None if probs is None else w


def moe_unpermute(
    y: Tensor, row_map: Tensor, num_tokens: int, probs: Tensor | None = None
) -> Tensor:
    """The sum of each token's rows, weighted by their probabilities.

    Args:
        y: `[P, N]`, any floating dtype.
        row_map: `[P]` int64, as for `moe_permute`.
        num_tokens: T.
        probs: `[T, E]`, or `[P]` with one for each row; None weighs every row with 1.

    Returns:
        `[T, N]` like y; 0 for a token without rows.

    Raises:
        ValueError: an input of the wrong shape, dtype or device; on the CPU, a row that names no
            token.

    Where `unsupported_reason` has something to say, that is logged once and `moe_unpermute_ref`
    computes.
    """
    _check_rows("moe_unpermute", "y", y, row_map)
    if y.shape[0] != row_map.shape[0]:
        raise ValueError(
            f"moe_unpermute: y must have {row_map.shape[0]} rows like row_map, got {list(y.shape)}"
        )
    if probs is not None:
        fits = probs.shape == row_map.shape or (probs.ndim == 2 and probs.shape[0] == num_tokens)
        _check_probs(
            "moe_unpermute", probs, y, lambda: f"[{num_tokens}, E] or [{row_map.shape[0]}]", fits
        )
    if reason := unsupported_reason(y, probs):
        log_fallback("moe_unpermute", reason)
        return moe_unpermute_ref(y, row_map, num_tokens, probs)
    return _ops.moe_unpermute_fwd(y, row_map, num_tokens, probs)
