"""Softmax of scaled, masked scores in Triton: see `accel/ops/masked_softmax.py` for the formulas.

A tile of rows of up to MAX_BLOCK keys stays in registers, so everything is read once. Longer rows
are read twice in blocks, the second time from a cache: forward, the first pass keeps the largest
score so far and the sum of exponentials relative to it (Milakov and Gimelshein 2018,
arXiv:1805.02867). Keys that causality hides are not read.

The mask is read through its strides, 0 where it broadcasts. Heads are the fastest index of the
grid, so that those that share a mask's rows find them in a cache.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2

__all__ = ["KERNELS", "backward", "compile_cases", "forward"]

MAX_BLOCK = 16384
"""Keys of a row in registers: 32 in each thread of 16 warps."""
MAX_BLOCK_BACKWARD = 8192
"""The same backward, where there are two tensors: with 32 each, one program would fill a processor,
and nothing would be on its way while it adds up its row."""
LONG_ROWS_BLOCK = 8192
"""Keys at a time of longer rows: 16 in each thread of 16 warps, and few reductions of a row."""
TILE = 4096
"""Elements of a tile of several rows: 16 in each thread of 8 warps."""


@triton.jit
def _tile(num_heads, num_queries, num_tiles, BLOCK_Q: tl.constexpr):
    """Of this program: batch and head, queries [BLOCK_Q], and their rows among all of x's."""
    head = tl.program_id(0) % num_heads
    batch = tl.program_id(0) // num_heads // num_tiles
    tile = tl.program_id(0) // num_heads % num_tiles
    queries = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    first_row = (batch.to(tl.int64) * num_heads + head) * num_queries
    return batch, head, queries, first_row + queries


@triton.jit
def _visible(queries, keys, num_queries, num_keys, CAUSAL: tl.constexpr):
    """[BLOCK_Q, BLOCK_K]: inside x, and not hidden by causality."""
    inside = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
    return inside & (keys[None, :] <= queries[:, None]) if CAUSAL else inside


@triton.jit
def _hidden(
    mask_BHQK, batch, head, queries, keys, visible, stride_B, stride_H, stride_Q, stride_K
):  # fmt: skip
    """[BLOCK_Q, BLOCK_K]: what the mask hides."""
    rows = mask_BHQK + batch.to(tl.int64) * stride_B + head.to(tl.int64) * stride_H
    rows += queries[:, None].to(tl.int64) * stride_Q
    return tl.load(rows + keys[None, :].to(tl.int64) * stride_K, mask=visible, other=0) != 0


@triton.jit
def _scores(
    x_RK, mask_BHQK, batch, head, queries, rows, keys, num_queries, num_keys, scale,
    stride_B, stride_H, stride_Q, stride_K, CAUSAL: tl.constexpr,
):  # fmt: skip
    """[BLOCK_Q, BLOCK_K] fp32: scale x, -10000 where the mask hides, -inf where nothing is visible."""
    visible = _visible(queries, keys, num_queries, num_keys, CAUSAL)
    at = rows[:, None] * num_keys + keys[None, :]
    z = tl.load(x_RK + at, mask=visible, other=0.0).to(tl.float32) * scale
    if mask_BHQK is not None:
        hidden = _hidden(
            mask_BHQK, batch, head, queries, keys, visible, stride_B, stride_H, stride_Q, stride_K
        )  # fmt: skip
        z = tl.where(hidden, -10000.0, z)
    return tl.where(visible, z, float("-inf"))


@triton.jit
def _store(out_RK, values, queries, rows, keys, num_queries, num_keys):
    inside = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
    at = rows[:, None] * num_keys + keys[None, :]
    tl.store(out_RK + at, values.to(out_RK.dtype.element_ty), mask=inside)


@triton.jit
def _forward(
    x_RK, mask_BHQK, probs_RK, num_heads, num_queries, num_keys, num_tiles, scale,
    stride_B, stride_H, stride_Q, stride_K,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch, head, queries, rows = _tile(num_heads, num_queries, num_tiles, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    z = _scores(
        x_RK, mask_BHQK, batch, head, queries, rows, keys, num_queries, num_keys, scale,
        stride_B, stride_H, stride_Q, stride_K, CAUSAL,
    )  # fmt: skip
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    probs = e * (1.0 / tl.sum(e, axis=1))[:, None]
    _store(probs_RK, probs, queries, rows, keys, num_queries, num_keys)


@triton.jit
def _forward_long_rows(
    x_RK, mask_BHQK, probs_RK, num_heads, num_queries, num_keys, num_tiles, scale,
    stride_B, stride_H, stride_Q, stride_K,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch, head, queries, rows = _tile(num_heads, num_queries, num_tiles, BLOCK_Q)
    cols = tl.arange(0, BLOCK_K)
    num_visible = tl.minimum(tl.max(queries) + 1, num_keys) if CAUSAL else num_keys
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in range(0, num_visible, BLOCK_K):
        z = _scores(
            x_RK, mask_BHQK, batch, head, queries, rows, start + cols, num_queries, num_keys,
            scale, stride_B, stride_H, stride_Q, stride_K, CAUSAL,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(z, axis=1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf would be NaN too early
        sums = sums * tl.exp(largest - shift)[:, None] + tl.exp(z - shift[:, None])
        largest = larger
    inverse = 1.0 / tl.sum(sums, axis=1)
    for start in range(0, num_visible, BLOCK_K):
        z = _scores(
            x_RK, mask_BHQK, batch, head, queries, rows, start + cols, num_queries, num_keys,
            scale, stride_B, stride_H, stride_Q, stride_K, CAUSAL,
        )  # fmt: skip
        probs = tl.exp(z - largest[:, None]) * inverse[:, None]
        _store(probs_RK, probs, queries, rows, start + cols, num_queries, num_keys)
    if CAUSAL:
        zeros = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        for start in range(tl.cdiv(num_visible, BLOCK_K) * BLOCK_K, num_keys, BLOCK_K):
            _store(probs_RK, zeros, queries, rows, start + cols, num_queries, num_keys)


@triton.jit
def _load(in_RK, rows, keys, num_keys, visible):
    at = rows[:, None] * num_keys + keys[None, :]
    return tl.load(in_RK + at, mask=visible, other=0.0).to(tl.float32)


@triton.jit
def _backward(
    dprobs_RK, probs_RK, mask_BHQK, dx_RK, num_heads, num_queries, num_keys, num_tiles, scale,
    stride_B, stride_H, stride_Q, stride_K,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch, head, queries, rows = _tile(num_heads, num_queries, num_tiles, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    visible = _visible(queries, keys, num_queries, num_keys, CAUSAL)
    probs = _load(probs_RK, rows, keys, num_keys, visible)
    dprobs = _load(dprobs_RK, rows, keys, num_keys, visible)
    dot = tl.sum(probs * dprobs, axis=1)
    dx = probs * (dprobs - dot[:, None]) * scale
    if mask_BHQK is not None:
        hidden = _hidden(
            mask_BHQK, batch, head, queries, keys, visible, stride_B, stride_H, stride_Q, stride_K
        )  # fmt: skip
        dx = tl.where(hidden, 0.0, dx)
    _store(dx_RK, dx, queries, rows, keys, num_queries, num_keys)


@triton.jit
def _backward_long_rows(
    dprobs_RK, probs_RK, mask_BHQK, dx_RK, num_heads, num_queries, num_keys, num_tiles, scale,
    stride_B, stride_H, stride_Q, stride_K,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch, head, queries, rows = _tile(num_heads, num_queries, num_tiles, BLOCK_Q)
    cols = tl.arange(0, BLOCK_K)
    num_visible = tl.minimum(tl.max(queries) + 1, num_keys) if CAUSAL else num_keys
    dots = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in range(0, num_visible, BLOCK_K):
        visible = _visible(queries, start + cols, num_queries, num_keys, CAUSAL)
        probs = _load(probs_RK, rows, start + cols, num_keys, visible)
        dots += probs * _load(dprobs_RK, rows, start + cols, num_keys, visible)
    dot = tl.sum(dots, axis=1)
    for start in range(0, num_keys, BLOCK_K):
        keys = start + cols
        visible = _visible(queries, keys, num_queries, num_keys, CAUSAL)
        probs = _load(probs_RK, rows, keys, num_keys, visible)
        dx = probs * (_load(dprobs_RK, rows, keys, num_keys, visible) - dot[:, None]) * scale
        if mask_BHQK is not None:
            hidden = _hidden(
                mask_BHQK, batch, head, queries, keys, visible,
                stride_B, stride_H, stride_Q, stride_K,
            )  # fmt: skip
            dx = tl.where(hidden, 0.0, dx)
        _store(dx_RK, dx, queries, rows, keys, num_queries, num_keys)


def _blocks(num_queries: int, num_keys: int, max_block: int) -> dict[str, int]:
    """Queries and keys at a time, and warps."""
    if num_keys > max_block:
        return {"BLOCK_Q": 1, "BLOCK_K": LONG_ROWS_BLOCK, "num_warps": 16}
    block_k = next_power_of_2(num_keys)
    block_q = min(next_power_of_2(num_queries), max(1, TILE // block_k))
    num_warps = min(16, max(1, block_q * block_k // (32 * 16)))
    return {"BLOCK_Q": block_q, "BLOCK_K": block_k, "num_warps": num_warps}


def _launch(
    kernel: Callable, max_block: int, ins: tuple[Tensor, ...], mask: Tensor | None, out: Tensor,
    scale: float, causal: bool,
) -> None:  # fmt: skip
    """A program for each tile."""
    shape = out.shape
    num_batches, num_heads, num_queries, num_keys = shape
    if 0 in shape:
        return
    if mask is not None:
        strides = mask.expand(shape).stride()
    else:
        strides = (0, 0, 0, 0)
        if not causal:  # all rows are alike: tiles need not end where a head does
            num_queries = num_batches * num_heads * num_queries
            num_batches = num_heads = 1
    sizes = _blocks(num_queries, num_keys, max_block)
    num_tiles = ceil_div(num_queries, sizes["BLOCK_Q"])
    launch(
        kernel, (num_batches * num_heads * num_tiles,),
        *ins, mask, out, num_heads, num_queries, num_keys, num_tiles, scale, *strides,
        CAUSAL=causal, **sizes,
    )  # fmt: skip


def forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """`accel::masked_softmax_fwd`."""
    x = x.contiguous()
    probs = torch.empty_like(x)
    kernel = _forward_long_rows if x.shape[-1] > MAX_BLOCK else _forward
    _launch(kernel, MAX_BLOCK, (x,), mask, probs, scale, causal)
    return probs


def backward(
    dprobs: Tensor, probs: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """`accel::masked_softmax_bwd`."""
    dprobs, probs = dprobs.contiguous(), probs.contiguous()
    dx = torch.empty_like(probs)
    kernel = _backward_long_rows if probs.shape[-1] > MAX_BLOCK_BACKWARD else _backward
    _launch(kernel, MAX_BLOCK_BACKWARD, (dprobs, probs), mask, dx, scale, causal)
    return dx


KERNELS = {"accel::masked_softmax_fwd": forward, "accel::masked_softmax_bwd": backward}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Short rows and long ones; causal, as models train, and with the mask of packed documents."""
    for num_keys, dtype in (
        (128, torch.bfloat16),
        (4096, torch.bfloat16),
        (8192, torch.float32),
        (16384, torch.bfloat16),
        (65536, torch.bfloat16),
    ):
        x = torch.empty(1, 8, num_keys, num_keys, dtype=dtype, device="meta")
        mask = torch.empty(1, 1, num_keys, num_keys, dtype=torch.bool, device="meta")
        for case, hidden in ((f"K={num_keys} causal", None), (f"K={num_keys} mask", mask)):
            yield case, forward, (x, hidden, 0.125, hidden is None)
            yield case, backward, (x, x, hidden, 0.125, hidden is None)
