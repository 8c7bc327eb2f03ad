"""Attention on Ascend: see `accel/ops/attention.py` for the formulas.

`npu_fusion_attention` and `npu_fusion_attention_grad`, in layout "SBH", which is Megatron's, and "TND"
for packs. Causal masks and windows go as `sparse_mode` with the one compressed mask of 2048 x 2048
that the op wants: 2 where queries and keys are the same tokens, 3 where the last query is aligned with
the last key, 4 for a window, which is aligned so too.

The op gives the maximum and the sum of each row, eight times each, fp32: lse = maximum + log sum. Its
gradient wants both back, and only ever divides e^(s - maximum) by the sum: lse and 1 serve, those of
a whole attention too, of which these keys are a part (context parallel).

What sees nothing is not handed over: queries without a key, and keys without a query, are cut off (they
are at the start of a sequence, so the alignment stays). Dropout, and sizes beyond what the documentation
names, take the references: the op draws random bits of its own, which are not those of
`dropout_mask_ref`, and its gradient takes no mask.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel._npu.kept import KEPT, host_list
from accel.ops._dispatch import log_fallback
from accel.ops.attention import NO_LIMIT, attention_gradients_ref, attention_ref

__all__ = ["KERNELS", "backward", "forward"]

COMPRESSED = 2048
"""Rows and columns of the mask for sparse_mode 2, 3 and 4."""
WIDEST = 768
MOST_HEADS = 256
MOST_TOKENS = 1 << 20
MOST_SEQUENCES = 1024
"""Of a pack."""
REPEATED = 8
"""Each maximum and sum."""


@functools.lru_cache(maxsize=2)
def _compressed_mask(device: torch.device) -> Tensor:
    """True is hidden: later keys."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


class _Seen(NamedTuple):
    """Which queries and keys of one sequence, or of a pack, see each other, and how."""

    queries: Tensor | slice
    keys: Tensor | slice
    mask: dict[str, Any]
    """Arguments of the ops."""
    empty: bool


def _cut(num_queries: int, num_keys: int, left: int, right: int) -> tuple[int, int]:
    """How many of the first queries see no key, and how many of the first keys no query."""
    blind = 0 if right == NO_LIMIT else max(0, num_queries - num_keys - right)
    blind = num_queries if num_keys == 0 else min(blind, num_queries)
    seeing = num_queries - blind
    unseen = 0 if left == NO_LIMIT else max(0, num_keys - seeing - left)
    return blind, num_keys if seeing == 0 else unseen


def _mask(left: int, right: int, longest: int, same: bool, device: torch.device) -> dict[str, Any]:
    """`same`: as many keys as queries, so that either alignment is the other."""
    left, right = (n if 0 <= n < longest else NO_LIMIT for n in (left, right))
    if left == right == NO_LIMIT:
        return {"sparse_mode": 0}
    mask = {"atten_mask": _compressed_mask(device)}
    if left == NO_LIMIT and right == 0:
        return mask | {"sparse_mode": 2 if same else 3}
    before, after = (longest if n == NO_LIMIT else n for n in (left, right))
    return mask | {"sparse_mode": 4, "pre_tockens": before, "next_tockens": after}


def _seen_of_batch(q: Tensor, k: Tensor, left: int, right: int) -> _Seen:
    num_queries, num_keys = q.shape[0], k.shape[0]
    blind, unseen = _cut(num_queries, num_keys, left, right)
    same = num_queries - blind == num_keys - unseen
    mask = _mask(left, right, max(num_queries, num_keys), same, q.device)
    empty = blind == num_queries or q.shape[1] == 0
    return _Seen(slice(blind, None), slice(unseen, None), mask, empty)


def _seen_of_pack(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, left: int, right: int
) -> _Seen:
    starts = host_list(cu_seqlens_q), host_list(cu_seqlens_k)
    for name, at, rows in (("q", starts[0], len(q)), ("k", starts[1], len(k))):
        if not at or at[0] != 0 or sorted(at) != at or at[-1] > rows:
            raise ValueError(
                f"attention: cu_seqlens_{name} must start at 0, not fall and end at {rows} or before, "
                f"got {at}"
            )
    if len(starts[0]) != len(starts[1]):
        raise ValueError(
            f"attention: {len(starts[0]) - 1} sequences of q, {len(starts[1]) - 1} of k"
        )
    ranges: tuple[list[range], list[range]] = ([], [])
    for begin_q, end_q, begin_k, end_k in zip(
        starts[0], starts[0][1:], starts[1], starts[1][1:], strict=False
    ):
        blind, unseen = _cut(end_q - begin_q, end_k - begin_k, left, right)
        if begin_q + blind < end_q:
            ranges[0].append(range(begin_q + blind, end_q))
            ranges[1].append(range(begin_k + unseen, end_k))
    lengths = [[len(r) for r in side] for side in ranges]
    longest = max((n for side in lengths for n in side), default=0)
    mask = _mask(left, right, longest, lengths[0] == lengths[1], q.device)
    ends = [torch.tensor(side).cumsum(0).tolist() for side in lengths]
    mask |= {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1], "softmax_layout": "TND"}
    queries, keys = _rows(ranges[0], len(q), q.device), _rows(ranges[1], len(k), q.device)
    return _Seen(queries, keys, mask, not ranges[0])


def _rows(ranges: list[range], num_rows: int, device: torch.device) -> Tensor | slice:
    """All of them, as a slice where nothing is left out."""
    if sum(len(r) for r in ranges) == num_rows:
        return slice(None)
    rows = torch.cat([torch.arange(r.start, r.stop) for r in ranges] or [torch.zeros(0).long()])
    return rows.to(device)


def _seen(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *window: int
) -> _Seen:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _seen_of_batch(q, k, *window)
    seen: _Seen = KEPT.get(
        cu_seqlens_q,
        cu_seqlens_k,
        find=lambda: _seen_of_pack(q, k, cu_seqlens_q, cu_seqlens_k, *window),
        about=("seen", len(q), len(k), q.device, *window),
    )
    return seen


def _reason(
    q: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, window: tuple[int, int], dropout: float
) -> str | None:
    """Why torch-npu's op cannot take this, or None."""
    if dropout:
        return "dropout (npu_fusion_attention draws other random bits)"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"heads wider than {WIDEST}"
    if q.shape[-2] > MOST_HEADS:
        return f"more than {MOST_HEADS} heads"
    if max(q.shape[0], v.shape[0]) > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    if cu_seqlens_q is not None and cu_seqlens_q.numel() > MOST_SEQUENCES + 1:
        return f"more than {MOST_SEQUENCES} sequences"
    if cu_seqlens_q is not None and window == (0, 0):
        return "a window of a token's own key in a pack (its gradient refuses that)"
    return None


def _as_wide(t: Tensor, width: int) -> Tensor:
    """Zeros on the right: the op wants rows of q and k to be as wide as those of v, or wider."""
    return F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t


def _handed(t: Tensor, rows: Tensor | slice) -> Tensor:
    """`[S, B, heads D]`, or `[T, heads, D]` of a pack; contiguous."""
    chosen = t[rows] if isinstance(rows, slice) else t.index_select(0, rows)
    return (chosen.flatten(2) if t.ndim == 4 else chosen).contiguous()


def _put(part: Tensor, rows: Tensor | slice, dim: int, whole: Tensor) -> Tensor:
    """The part at its rows, and elsewhere what `whole` is filled with; the part if it is the whole."""
    if part.shape[dim] == whole.shape[dim]:
        return part
    if isinstance(rows, slice):
        whole.narrow(dim, whole.shape[dim] - part.shape[dim], part.shape[dim]).copy_(part)
        return whole
    return whole.index_copy_(dim, rows, part)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int,
    right: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """`accel::attention_fwd`."""
    if reason := _reason(q, v, cu_seqlens_q, (left, right), dropout):
        log_fallback("attention", reason)
        return attention_ref(
            q,
            k,
            v,
            softmax_scale=scale,
            window=(left, right),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dropout=dropout,
            seed=seed,
        )
    seen = _seen(q, k, cu_seqlens_q, cu_seqlens_k, left, right)
    shape = (*q.shape[:-1], v.shape[-1])
    packed = q.ndim == 3
    lse_shape = (*q.shape[1:-1], q.shape[0])
    if seen.empty:
        return q.new_zeros(shape), q.new_full(lse_shape, -torch.inf, dtype=torch.float32)
    width = v.shape[-1]
    out, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
        _handed(_as_wide(q, width), seen.queries),
        _handed(_as_wide(k, width), seen.keys),
        _handed(v, seen.keys),
        q.shape[-2],
        "TND" if packed else "SBH",
        scale=scale,
        **seen.mask,
    )
    lse = maximum[..., 0] + total[..., 0].log()
    lse = lse.t().contiguous() if packed else lse
    out = out.view(-1, *shape[1:])
    if len(out) < len(q):
        out = _put(out, seen.queries, 0, q.new_zeros(shape))
        lse = _put(lse, seen.queries, -1, lse.new_full(lse_shape, -torch.inf))
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int,
    right: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::attention_bwd`."""
    if _reason(q, v, cu_seqlens_q, (left, right), dropout):
        return attention_gradients_ref(
            dout,
            q,
            k,
            v,
            out,
            lse,
            softmax_scale=scale,
            window=(left, right),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dropout=dropout,
            seed=seed,
        )
    seen = _seen(q, k, cu_seqlens_q, cu_seqlens_k, left, right)
    if seen.empty:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    packed = q.ndim == 3
    chosen = lse[..., seen.queries] if isinstance(seen.queries, slice) else lse[:, seen.queries]
    maximum = (chosen.t() if packed else chosen).unsqueeze(-1)
    maximum = maximum.expand(*maximum.shape[:-1], REPEATED).contiguous()
    width = v.shape[-1]
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        _handed(_as_wide(q, width), seen.queries),
        _handed(_as_wide(k, width), seen.keys),
        _handed(v, seen.keys),
        _handed(dout, seen.queries),
        q.shape[-2],
        "TND" if packed else "SBH",
        softmax_max=maximum,
        softmax_sum=torch.ones_like(maximum),
        attention_in=_handed(out, seen.queries),
        scale_value=scale,
        **seen.mask,
    )
    grads = []
    for part, of, rows in ((dq, q, seen.queries), (dk, k, seen.keys), (dv, v, seen.keys)):
        part = part.view(-1, *of.shape[1:-1], max(of.shape[-1], width) if of is not v else width)
        part = part[..., : of.shape[-1]]
        if len(part) < len(of):
            part = _put(part, rows, 0, of.new_zeros(of.shape))
        grads.append(part.contiguous())
    return grads[0], grads[1], grads[2]


KERNELS = {"accel::attention_fwd": forward, "accel::attention_bwd": backward}
