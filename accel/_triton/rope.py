"""Rotary position embedding in Triton: see `accel/ops/rope.py` for the formulas.

A program has the cosines and sines of its tokens in registers and rotates all heads of up to two
tensors, queries and keys, by them: everything is read once, and one launch does both. Interleaved
pairs are loaded as they lie and taken apart in registers. The host never reads `cu_seqlens`: a token
finds its sequence by binary search on the device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2, num_processors

TILE = 4096
"""Elements that a program takes at a time: 32 in each thread of 4 warps, where cosines and sines of 8
pairs serve the heads of two rows."""
ELEMENTS_PER_WARP = 1024
MOST_TOKENS = 2**31 - TILE
"""Numbers of tokens have 32 bits, those behind the last one in a program too."""
PROGRAMS_PER_PROCESSOR = 4
"""Fewer tokens to a program, down to one, until there are so many: enough loads under way."""


@triton.jit
def _row_of_token(
    token_T, cu_seqlens, num_sequences, num_rows, cp_rank, num_steps, CP_SIZE: tl.constexpr
):
    """[BLOCK_T] the tables' row for each token of packed sequences; -1 where `cu_seqlens` have none.

    A context-parallel rank holds chunks `cp_rank` and `2 cp_size - 1 - cp_rank` of the `2 cp_size` of
    each sequence. Positions start anew in every sequence, unless the tables have a row for each token.
    """
    origin = tl.load(cu_seqlens).to(tl.int64)
    total = tl.load(cu_seqlens + num_sequences).to(tl.int64)
    # The last sequence that starts at the token or before; empty ones share their start with the next.
    sequence = token_T * 0
    beyond = sequence + num_sequences
    for _ in range(num_steps):
        middle = (sequence + beyond) // 2
        here = tl.load(cu_seqlens + middle).to(tl.int64) - origin <= token_T * CP_SIZE
        searching = beyond - sequence > 1
        sequence = tl.where(searching & here, middle, sequence)
        beyond = tl.where(searching & (here == 0), middle, beyond)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    at = token_T - (start - origin) // CP_SIZE
    found = (at >= 0) & (at * CP_SIZE < length)
    if CP_SIZE == 1:
        row = at
    else:
        chunk = length // (2 * CP_SIZE)
        second = (2 * CP_SIZE - 2 - cp_rank) * chunk + at
        row = tl.where(at < chunk, cp_rank * chunk + at, second)
        found &= chunk * (2 * CP_SIZE) == length
    row += tl.where(total == num_rows, start, 0)
    found &= (row >= 0) & (row < num_rows)
    return tl.where(found, row, -1)


@triton.jit
def _rotate_heads(
    x, y, x_at_T, token_T, valid_T, stride_H, cos_1, sin_1, cos_2, sin_2,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_KEPT: tl.constexpr,
):  # fmt: skip
    """All heads of the tokens of one tensor; cosines and sines are [BLOCK_T, 1, BLOCK_J]."""
    pairs = tl.arange(0, BLOCK_J)[None, None, :]
    columns = tl.arange(0, 2 * BLOCK_J)[None, None, :]
    for first in range(0, HEADS, BLOCK_H):
        heads = (first + tl.arange(0, BLOCK_H))[None, :, None]
        valid = valid_T[:, None, None] & (heads < HEADS)
        from_head = x + x_at_T[:, None, None] + heads.to(tl.int64) * stride_H
        to_head = y + token_T[:, None, None] * (HEADS * DIM) + heads * DIM
        if INTERLEAVED_IN:
            both = tl.load(from_head + columns, mask=valid & (columns < 2 * HALF), other=0.0)
            x_1, x_2 = tl.split(tl.reshape(both, (BLOCK_T, BLOCK_H, BLOCK_J, 2)))
        else:
            x_1 = tl.load(from_head + pairs, mask=valid & (pairs < HALF), other=0.0)
            x_2 = tl.load(from_head + HALF + pairs, mask=valid & (pairs < HALF), other=0.0)
        x_1, x_2 = x_1.to(tl.float32), x_2.to(tl.float32)
        # Fused by hand, so that the compiler cannot do it one way here and the other way there.
        if INVERSE:
            y_1 = tl.fma(x_1, cos_1, x_2 * sin_2)
            y_2 = tl.fma(x_2, cos_2, -(x_1 * sin_1))
        else:
            y_1 = tl.fma(x_1, cos_1, -(x_2 * sin_1))
            y_2 = tl.fma(x_2, cos_2, x_1 * sin_2)
        y_1, y_2 = y_1.to(y.dtype.element_ty), y_2.to(y.dtype.element_ty)
        if INTERLEAVED_OUT:
            both = tl.reshape(tl.join(y_1, y_2), (BLOCK_T, BLOCK_H, 2 * BLOCK_J))
            tl.store(to_head + columns, both, mask=valid & (columns < 2 * HALF))
        else:
            tl.store(to_head + pairs, y_1, mask=valid & (pairs < HALF))
            tl.store(to_head + HALF + pairs, y_2, mask=valid & (pairs < HALF))
        if DIM > 2 * HALF:
            kept = 2 * HALF + tl.arange(0, BLOCK_KEPT)[None, None, :]
            values = tl.load(from_head + kept, mask=valid & (kept < DIM))
            tl.store(to_head + kept, values, mask=valid & (kept < DIM))


@triton.jit
def _rotate(
    a, a_out, stride_aS, stride_aB, stride_aH, b, b_out, stride_bS, stride_bB, stride_bH,
    cos, sin, stride_row, stride_batch, num_rows, num_tokens, num_batch,
    cu_seqlens, num_sequences, cp_rank, num_steps, CP_SIZE: tl.constexpr,
    HEADS_A: tl.constexpr, DIM_A: tl.constexpr, HEADS_B: tl.constexpr, DIM_B: tl.constexpr,
    HALF: tl.constexpr, ONE_ANGLE: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HA: tl.constexpr, BLOCK_HB: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_KEPT_A: tl.constexpr, BLOCK_KEPT_B: tl.constexpr,
):  # fmt: skip
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid_T = token_T < num_tokens
    # Divided in 32 bits, which cost a fifth of 64: `_check` sees to it that they do.
    position_T = (token_T // num_batch).to(tl.int64)
    batch_T = (token_T % num_batch).to(tl.int64)
    token_T = token_T.to(tl.int64)
    if cu_seqlens is None:
        row_T = position_T
    else:
        row_T = _row_of_token(
            position_T, cu_seqlens, num_sequences, num_rows, cp_rank, num_steps, CP_SIZE
        )
    pairs = tl.arange(0, BLOCK_J)
    at = (row_T * stride_row + batch_T * stride_batch)[:, None] + pairs[None, :]
    # NaN for positions that are not: nobody may take them for numbers.
    mask = (valid_T & (row_T >= 0))[:, None] & (pairs < HALF)[None, :]
    cos_1 = tl.load(cos + at, mask=mask, other=float("nan"))[:, None, :]
    sin_1 = tl.load(sin + at, mask=mask, other=float("nan"))[:, None, :]
    if ONE_ANGLE:
        cos_2, sin_2 = cos_1, sin_1
    else:
        cos_2 = tl.load(cos + at + HALF, mask=mask, other=float("nan"))[:, None, :]
        sin_2 = tl.load(sin + at + HALF, mask=mask, other=float("nan"))[:, None, :]
    _rotate_heads(
        a, a_out, position_T * stride_aS + batch_T * stride_aB, token_T, valid_T, stride_aH,
        cos_1, sin_1, cos_2, sin_2, HEADS_A, DIM_A, HALF,
        INTERLEAVED_IN, INTERLEAVED_OUT, INVERSE, BLOCK_T, BLOCK_HA, BLOCK_J, BLOCK_KEPT_A,
    )  # fmt: skip
    if b is not None:
        _rotate_heads(
            b, b_out, position_T * stride_bS + batch_T * stride_bB, token_T, valid_T, stride_bH,
            cos_1, sin_1, cos_2, sin_2, HEADS_B, DIM_B, HALF,
            INTERLEAVED_IN, INTERLEAVED_OUT, INVERSE, BLOCK_T, BLOCK_HB, BLOCK_J, BLOCK_KEPT_B,
        )  # fmt: skip


def _check(
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    rotary_dim: int,
) -> None:
    """What would let the kernel read past a buffer; `accel.ops.rope` says the rest better."""
    if not xs or any(x.ndim != 4 or x.shape[:2] != xs[0].shape[:2] for x in xs):
        raise ValueError(
            f"rope: q and k must be [S, B, heads, head_dim], got {[list(x.shape) for x in xs]}"
        )
    if xs[0].shape[0] * xs[0].shape[1] > MOST_TOKENS:
        raise ValueError(
            f"rope in Triton takes up to {MOST_TOKENS} tokens, got {xs[0].shape[0]} x {xs[0].shape[1]}"
        )
    if rotary_dim < 0 or rotary_dim % 2 or any(rotary_dim > x.shape[3] for x in xs):
        raise ValueError(
            "rope: the rotary dimension must be even and at most the head's, got "
            f"{rotary_dim} for {[list(x.shape) for x in xs]}"
        )
    fits = (
        cos.ndim == 3
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype == torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.shape[1] in (1, xs[0].shape[1])
        and rotary_dim in (cos.shape[2], 2 * cos.shape[2])
    )
    if not fits:
        raise ValueError(
            "rope: cos and sin must be contiguous fp32 [rows, 1 or B, rotary_dim "
            f"({rotary_dim}) or half of it], got {cos.dtype} {list(cos.shape)} and {sin.dtype} "
            f"{list(sin.shape)} for x {list(xs[0].shape)}"
        )
    if cu_seqlens is None and cos.shape[0] < xs[0].shape[0]:
        raise ValueError(
            f"rope: freqs must have a row for each of {xs[0].shape[0]} positions, "
            f"got {cos.shape[0]}"
        )
    if cu_seqlens is not None and (
        cu_seqlens.ndim != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or not cu_seqlens.numel()
    ):
        raise ValueError(
            f"rope: cu_seqlens must be int32 or int64 [sequences + 1], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"rope: cp_rank must be in [0, cp_size), got {cp_rank} of {cp_size}")


def _heads_at_a_time(num_heads: int, width: int) -> int:
    """So many that a tile is full, or half as many where fewer of them would be beyond the last."""
    most = min(next_power_of_2(num_heads), max(1, TILE // width))
    return min((most, max(1, most // 2)), key=lambda size: ceil_div(num_heads, size) * size)


def _width(dim: int, half: int) -> int:
    """What a head takes of a tile."""
    return max(2 * next_power_of_2(half), next_power_of_2(dim - 2 * half))


def _blocks(xs: list[Tensor], half: int, num_tokens: int) -> dict[str, Any]:
    """Heads and tokens at a time, for one tensor or two."""
    widths = [_width(x.shape[3], half) for x in xs]
    heads = [_heads_at_a_time(x.shape[2], width) for x, width in zip(xs, widths, strict=True)]
    per_token = max(h * width for h, width in zip(heads, widths, strict=True))
    block_t = max(1, TILE // per_token)
    enough = PROGRAMS_PER_PROCESSOR * num_processors(xs[0].device)
    while block_t > 1 and ceil_div(num_tokens, block_t) < enough:
        block_t //= 2
    kept = [next_power_of_2(x.shape[3] - 2 * half) for x in xs]
    return {
        "BLOCK_T": block_t,
        "BLOCK_HA": heads[0],
        "BLOCK_HB": heads[-1],
        "BLOCK_J": next_power_of_2(half),
        "BLOCK_KEPT_A": kept[0],
        "BLOCK_KEPT_B": kept[-1],
        "num_warps": min(4, max(1, block_t * per_token // ELEMENTS_PER_WARP)),
    }


def _launch_two(
    xs: list[Tensor],
    ys: list[Tensor],
    tables: tuple[Tensor, Tensor],
    packing: tuple[Tensor | None, int, int],
    rotary_dim: int,
    layout: dict[str, bool],
) -> None:
    """One tensor or two, none of them empty, all with a dense last dimension."""
    a, b = xs[0], xs[1] if len(xs) > 1 else None
    cos, sin = tables
    cu_seqlens, cp_size, cp_rank = packing
    num_sequences = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    num_rows, batch_of_tables, width = cos.shape
    half = rotary_dim // 2
    num_positions, num_batch = a.shape[:2]
    num_tokens = num_positions * num_batch
    blocks = _blocks(xs, half, num_tokens)
    launch(
        _rotate, (ceil_div(num_tokens, blocks["BLOCK_T"]),),
        a, ys[0], *a.stride()[:3],
        b, None if b is None else ys[1], *(b if b is not None else a).stride()[:3],
        cos, sin, batch_of_tables * width, 0 if batch_of_tables == 1 else width,
        num_rows, num_tokens, num_batch,
        cu_seqlens, num_sequences, cp_rank, num_sequences.bit_length(), CP_SIZE=cp_size,
        HEADS_A=a.shape[2], DIM_A=a.shape[3],
        HEADS_B=0 if b is None else b.shape[2], DIM_B=0 if b is None else b.shape[3],
        HALF=half, ONE_ANGLE=width == half, **layout, **blocks,
    )  # fmt: skip


def forward(
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
    """`accel::rope`. Tokens outside of `cu_seqlens`, and positions beyond the tables, come out as NaN."""
    _check(xs, cos, sin, cu_seqlens, cp_size, cp_rank, rotary_dim)
    ys = [x.new_empty(x.shape) for x in xs]
    if rotary_dim == 0:
        return [y.copy_(x) for x, y in zip(xs, ys, strict=True)]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(xs[0].device).contiguous()
        if cu_seqlens.numel() == 1:  # no sequence: no token has a position
            return [y.fill_(float("nan")) for y in ys]
    # Empty ones have no elements to read, whatever their strides.
    some = [(x if x.stride(3) == 1 else x.contiguous(), y) for x, y in zip(xs, ys, strict=True)]
    some = [(x, y) for x, y in some if x.numel()]
    layout = {
        "INTERLEAVED_IN": interleaved_in,
        "INTERLEAVED_OUT": interleaved_out,
        "INVERSE": inverse,
    }
    for i in range(0, len(some), 2):
        two, out = (list(tensors) for tensors in zip(*some[i : i + 2], strict=True))
        _launch_two(two, out, (cos, sin), (cu_seqlens, cp_size, cp_rank), rotary_dim, layout)
    return ys


KERNELS = {"accel::rope": forward}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Llama's q and k as slices of a fused qkv, packed or not; MLA's; GPT-J's part of a head."""

    def tables(width: int, num_rows: int = 8192) -> tuple[Tensor, Tensor]:
        table = torch.empty(num_rows, 1, width, device="meta")
        return table, table

    def qkv(*heads_and_dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """[8192, 1, heads, dim] slices, so that strides are not those of a dense tensor."""
        per_token = sum(heads * dim for heads, dim in heads_and_dims)
        fused = torch.empty(8192, 1, 2 * per_token, dtype=dtype, device="meta")
        xs, at = [], 0
        for heads, dim in heads_and_dims:
            xs.append(fused[..., at : at + heads * dim].unflatten(-1, (heads, dim)))
            at += heads * dim
        return xs

    whole = (None, 1, 0)
    packed = (torch.empty(9, dtype=torch.int32, device="meta"), 2, 1)
    llama = qkv((32, 128), (8, 128))
    yield "llama", forward, (llama, *tables(64), *whole, 128, False, False, False)
    yield "llama backward", forward, (llama, *tables(128), *whole, 128, False, False, True)
    yield "llama packed, cp", forward, (llama, *tables(128), *packed, 128, False, False, False)
    fp32 = qkv((32, 128), (8, 128), dtype=torch.float32)
    yield "llama fp32", forward, (fp32, *tables(128), *whole, 128, False, False, False)
    yield "interleaved", forward, (llama, *tables(128), *whole, 128, True, True, False)
    mla = qkv((128, 64), (1, 64))
    yield "mla", forward, (mla, *tables(64), *whole, 64, True, False, False)
    yield "mla backward", forward, (mla, *tables(64), *whole, 64, False, True, True)
    yield "mla k", forward, (mla[1:], *tables(64), *whole, 64, True, False, False)
    yield (
        "half a head",
        forward,
        (qkv((40, 96), (8, 96)), *tables(48), *whole, 48, False, False, False),
    )
