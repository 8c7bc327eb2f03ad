"""Rotary position embedding on Ascend: see `accel/ops/rope.py` for the formulas.

`npu_rotary_mul` and `npu_rotary_mul_backward` turn `[S, B, heads, R]` by cos and sin of
`[S, 1 or B, 1, R]` in the dtype of what is turned ("interleave": `[S, 1, 1, R]`). A part of a head is
cut out and joined again; DeepSeek's layout is a permutation before (back: after) the turn by halves.
Sizes that their documentation does not name take plain PyTorch in fp32.
"""

import torch
from torch import Tensor

from accel._npu.kept import KEPT, host_list
from accel.ops.rope import packed_rows

__all__ = ["KERNELS", "rope"]

WIDEST = 896
"""R is below."""
MOST = 1000
"""B and heads are below; of "interleave", their product."""


def rope(
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    rotary_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    inverse: bool,
) -> list[Tensor]:
    """`accel::rope`."""
    if cu_seqlens is not None:
        how = cp_size, cp_rank, len(xs[0]), len(cos)
        row_of_token = KEPT.get(
            cu_seqlens,
            find=lambda: packed_rows(host_list(cu_seqlens), *how).to(cos.device),
            about=("rows", *how, cos.device),
        )
        cos, sin = cos.index_select(0, row_of_token), sin.index_select(0, row_of_token)
    if any(x.shape[0] > len(cos) for x in xs):
        raise ValueError(
            f"rope: {xs[0].shape[0]} positions need more than {len(cos)} rows of angles"
        )
    layouts = interleaved_in, interleaved_out
    return [_turned(x, cos, sin, rotary_dim, *layouts, inverse) for x in xs]


def _turned(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    width: int,
    interleaved_in: bool,
    interleaved_out: bool,
    inverse: bool,
) -> Tensor:
    if x.numel() == 0 or width == 0:
        return x.clone(memory_format=torch.contiguous_format)
    turning, rest = x[..., :width], x[..., width:]
    interleaved = interleaved_in and interleaved_out
    if interleaved_in and not interleaved:
        turning = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    num_rows = x.shape[0]
    if _taken(turning, cos, interleaved):
        r1, r2 = (_table(t, num_rows, width, x.dtype, interleaved) for t in (cos, sin))
        mode = "interleave" if interleaved else "half"
        turning = turning.contiguous()
        if inverse:  # of what was turned only the dtype is used, since r1 and r2 get no gradient
            back = torch.ops.npu.npu_rotary_mul_backward
            y = back(turning, turning, r1, r2, rotary_mode=mode)[0]
        else:
            y = torch.ops.npu.npu_rotary_mul(turning, r1, r2, rotary_mode=mode)
    else:
        c, s = (_wide_table(t, num_rows, width, interleaved) for t in (cos, sin))
        wide = turning.float()
        if inverse:
            y = wide * c - _partner(wide * s, interleaved)
        else:
            y = wide * c + _partner(wide, interleaved) * s
        y = y.to(x.dtype)
    if interleaved_out and not interleaved:
        y = y.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y.contiguous()


def _taken(x: Tensor, cos: Tensor, interleaved: bool) -> bool:
    _, batch, heads, width = x.shape
    if width >= WIDEST:
        return False
    if interleaved:
        return cos.shape[1] == 1 and batch * heads < MOST
    return batch < MOST and heads < MOST


def _table(
    table: Tensor, num_rows: int, width: int, dtype: torch.dtype, interleaved: bool
) -> Tensor:
    """cos or sin as torch-npu wants it: `[S, 1 or B, 1, R]` in the dtype of what is turned."""
    found: Tensor = KEPT.get(
        table,
        find=lambda: _wide_table(table, num_rows, width, interleaved).to(dtype).contiguous(),
        about=("table", num_rows, width, dtype, interleaved),
    )
    return found


def _wide_table(table: Tensor, num_rows: int, width: int, interleaved: bool) -> Tensor:
    """The same in fp32. The tables hold all first members of pairs, then all second ones, if they differ."""
    rows = table[:num_rows]
    twins = rows.shape[-1] * 2 == width
    first, second = (rows, rows) if twins else rows.chunk(2, dim=-1)
    whole = (
        torch.stack((first, second), -1).flatten(-2)
        if interleaved
        else torch.cat((first, second), -1)
    )
    return whole.unsqueeze(2)


def _partner(x: Tensor, interleaved: bool) -> Tensor:
    """-x2 where x1 is, and x1 where x2 is."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


KERNELS = {"accel::rope": rope}
