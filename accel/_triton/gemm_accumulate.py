"""`out += a^T b` on a GPU: cuBLAS where this torch can ask it for an fp32 sum of bf16 products, else Triton.

cuBLAS reads and writes out in place, for operands of any strides of which one is 1. The kernel here serves
where `aten::addmm.dtype_out` refuses an fp32 sum (torch before it learned that), and in the interpreter; the
tile that it computes is also that of the weight gradients of `grouped_gemm`.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch, num_processors

__all__ = [
    "KERNELS",
    "add_tile",
    "compile_cases",
    "dot",
    "gemm_accumulate",
    "offsets",
    "swizzled",
    "transposed_product",
    "wide",
]

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LARGE_TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
"""64 sums a thread, 96 KB of operands under way: two programs fit into a processor of an H100, and one
multiplies while the other stores."""
SMALL_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
"""Where large tiles would leave processors without work."""
GROUP = tl.constexpr(8)
"""Rows of tiles that are worked on together, so that they find the same columns in the L2 cache."""


@triton.jit
def dot(a, b, total):
    """total + a b, products and sums in fp32."""
    if INTERPRETED:  # its product of bf16 is one of their bits
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def swizzled(tile, num_rows, num_cols):
    """-> row and column of a tile; GROUP rows are walked column by column."""
    group = tile // (GROUP * num_cols)
    height = tl.minimum(num_rows - group * GROUP, GROUP)
    within = tile % (GROUP * num_cols)
    return group * GROUP + within % height, within // height


@triton.jit
def offsets(rows, cols, stride_row, stride_col, WIDE: tl.constexpr):
    """Of a tile's elements from its first: 32 bits do, unless strides are `wide`."""
    if WIDE:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return rows[:, None] * stride_row + cols[None, :] * stride_col


@triton.jit
def transposed_product(
    a, b, first, last, row, col, M, N, stride_ak, stride_am, stride_bk, stride_bn,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum over first <= k < last of a[k, row:]^T b[k, col:]: `[BLOCK_M, BLOCK_N]` fp32."""
    rows, cols, ks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a += tl.cast(first, tl.int64) * stride_ak + tl.cast(row, tl.int64) * stride_am
    b += tl.cast(first, tl.int64) * stride_bk + tl.cast(col, tl.int64) * stride_bn
    a_at = offsets(ks, rows, stride_ak, stride_am, WIDE)
    b_at = offsets(ks, cols, stride_bk, stride_bn, WIDE)
    in_a, in_b = (row + rows < M)[None, :], (col + cols < N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(first, last, BLOCK_K):
        valid = (ks < last - k)[:, None]
        a_KM = tl.load(a + a_at, mask=valid & in_a, other=0.0)
        b_KN = tl.load(b + b_at, mask=valid & in_b, other=0.0)
        total = dot(tl.trans(a_KM), b_KN, total)
        a += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b += tl.cast(stride_bk, tl.int64) * BLOCK_K
    return total


@triton.jit
def add_tile(
    out, total, row, col, M, N, stride_om, stride_on,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[row:, col:] += total, one half after the other: both at once want twice the registers."""
    out += tl.cast(row, tl.int64) * stride_om + tl.cast(col, tl.int64) * stride_on
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N // 2)
    halves = tl.reshape(total, [BLOCK_M, 2, BLOCK_N // 2])
    left, right = tl.split(tl.permute(halves, [0, 2, 1]))
    at = out + offsets(rows, cols, stride_om, stride_on, WIDE)
    mask = (row + rows < M)[:, None] & (col + cols < N)[None, :]
    tl.store(at, (tl.load(at, mask=mask).to(tl.float32) + left).to(out.dtype.element_ty), mask=mask)
    at += tl.cast(stride_on, tl.int64) * (BLOCK_N // 2)
    mask = (row + rows < M)[:, None] & (col + BLOCK_N // 2 + cols < N)[None, :]
    tl.store(
        at, (tl.load(at, mask=mask).to(tl.float32) + right).to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _gemm_accumulate(
    out, a, b, M, N, K, stride_om, stride_ak, stride_am, stride_bk, stride_bn,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = swizzled(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    total = transposed_product(
        a, b, 0, K, m * BLOCK_M, n * BLOCK_N, M, N, stride_ak, stride_am, stride_bk, stride_bn,
        WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    add_tile(
        out, total, m * BLOCK_M, n * BLOCK_N, M, N, stride_om, 1, WIDE, BLOCK_M, BLOCK_N
    )  # fmt: skip


def wide(*strides: int) -> bool:
    """Whether 256 times one of them, the most that a tile spans, goes beyond 32 bits."""
    return max(strides) >= 2**23


@functools.cache
def _cublas_sums_in_fp32(device: torch.device) -> bool:
    """Whether `addmm.dtype_out` takes an fp32 sum beside bf16 operands: asked with the least product."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    a = torch.empty(16, 16, dtype=torch.bfloat16, device=device)
    try:
        _cublas(torch.empty(16, 16, device=device), a, a)
    except RuntimeError as error:
        if "dtype" in str(error):
            return False
        raise
    return True


def _cublas(out: Tensor, a: Tensor, b: Tensor) -> None:
    with torch.no_grad():
        torch.ops.aten.addmm.dtype_out(out, a.t(), b, torch.float32, out=out)


def _check(out: Tensor, a: Tensor, b: Tensor) -> None:
    fits = out.ndim == a.ndim == b.ndim == 2 and (
        a.shape[0] == b.shape[0] and out.shape == (a.shape[1], b.shape[1])
    )
    dtypes = (out.dtype, a.dtype, b.dtype)
    if not fits or dtypes != (torch.float32, torch.bfloat16, torch.bfloat16):
        raise ValueError(
            "gemm_accumulate: needs fp32 out [M, N], bf16 a [K, M] and b [K, N], got "
            f"{out.dtype} {list(out.shape)}, {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"
        )
    if not out.device == a.device == b.device:
        raise ValueError(
            f"gemm_accumulate: one device, got {out.device}, {a.device} and {b.device}"
        )
    if out.stride(1) != 1 and out.shape[1] > 1:
        raise ValueError(
            f"gemm_accumulate: the rows of out must be contiguous, got strides {out.stride()}"
        )


def gemm_accumulate(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`accel::gemm_accumulate`."""
    _check(out, a, b)
    (K, M), N = a.shape, b.shape[1]
    if 0 in (M, N, K):
        return
    if _cublas_sums_in_fp32(out.device):
        _cublas(out, a, b)
        return
    large = ceil_div(M, LARGE_TILE["BLOCK_M"]) * ceil_div(N, LARGE_TILE["BLOCK_N"])
    tile = LARGE_TILE if large >= num_processors(out.device) else SMALL_TILE
    strides = (out.stride(0), *a.stride(), *b.stride())
    launch(
        _gemm_accumulate, (ceil_div(M, tile["BLOCK_M"]) * ceil_div(N, tile["BLOCK_N"]),),
        out, a, b, M, N, K, *strides, WIDE=wide(*strides), **tile,
    )  # fmt: skip
    torch.autograd.graph.increment_version(out)


KERNELS = {"accel::gemm_accumulate": gemm_accumulate}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """The weight gradients of a 4096-wide model, from 8192 tokens, and of a small one; a transpose."""
    for M, N in ((4096, 14336), (512, 512)):
        a, b = (torch.empty(8192, n, dtype=torch.bfloat16, device="meta") for n in (M, N))
        out = torch.empty(M, N, device="meta")
        yield f"{M} x {N}", gemm_accumulate, (out, a, b)
    a = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")
    b = torch.empty(8192, 14336, dtype=torch.bfloat16, device="meta")
    yield "transpose", gemm_accumulate, (torch.empty(4096, 14336, device="meta"), a.t(), b)
