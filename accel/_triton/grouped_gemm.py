"""Grouped products on a GPU: see `accel/ops/grouped_gemm.py` for the formulas.

The counts stay on the device, nothing here waits for them. Each program reads all E of them, sums them up in
its registers, and finds in these sums the expert of its tile. How many tiles there are is known to the device
alone, so as many programs start as there can be; those without a tile end at once. (Fewer that stay and take
turns would need none of that, but their loop keeps so much in registers that only one fits into a processor,
which then idles while it looks up or stores.) Experts may lie anywhere in memory: one tensor, or as many as
there are experts, whose addresses come from a table.

Where torch's own grouped product serves (bf16, one tensor of weights, Hopper and Blackwell) it is taken: it
keeps tensor memory accelerators busy, which pointers cannot. The sum of weight gradients with what a main
gradient holds, in fp32 and one pass, is ours alone.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.chunk_table import TRITON_DTYPES, address_table, numbers_on
from accel._triton.gemm_accumulate import add_tile, dot, offsets, swizzled, transposed_product, wide
from accel._triton.launch import ceil_div, launch, next_power_of_2

TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
"""64 sums a thread, 96 KB of operands under way: two programs fit into a processor of an H100, and one
multiplies while the other looks up its next expert or stores."""
FEW_ROWS_TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
"""For experts with few rows each, of which larger tiles would be half empty."""
FEW_ROWS = 96
"""Rows of an expert on average up to which those tiles are taken: two of 64 are one of 128."""
FP32_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 8, "num_stages": 2}
"""fp32 products are not a tensor core's: a thread holds its share of both operands in registers."""


@triton.jit
def _counts(counts_E, num_rows, num_experts, BLOCK_E: tl.constexpr):
    """int32, clamped as `_ends` are: nobody has looked at them, and what they sum up to may need 64 bits."""
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_E + experts, mask=experts < num_experts, other=0)
    counts = tl.minimum(tl.maximum(counts, 0), num_rows)
    ends = tl.cumsum(counts, 0)
    return (tl.minimum(ends, num_rows) - tl.minimum(ends - counts, num_rows)).to(tl.int32)


@triton.jit
def _matrix(
    matrices, e, stride_e, LISTED: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Where that of expert e begins: `matrices` is a table of addresses, or all of them in a row."""
    if LISTED:
        pointer = tl.load(matrices + e).to(tl.pointer_type(DTYPE))
        return tl.multiple_of(pointer, 16) if ALIGNED else pointer
    else:
        return matrices + e.to(tl.int64) * stride_e


@triton.jit
def _product(
    y_TN, x_TK, weights, counts_E, num_rows, N, K, num_experts,
    stride_yt, stride_xt, stride_xk, stride_we, stride_wk, stride_wn,
    WIDE: tl.constexpr, LISTED: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of y[rows of e] = x[rows of e] W[e]; the last programs may find that there are no more."""
    counts = _counts(counts_E, num_rows, num_experts, BLOCK_E)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M * num_n
    before = tl.cumsum(tiles, 0) <= tl.program_id(0)
    e = tl.sum(before.to(tl.int32))
    if e < BLOCK_E:
        first = tl.sum(tl.where(before, counts, 0))
        in_expert = tl.program_id(0) - tl.sum(tl.where(before, tiles, 0))
        count = tl.sum(tl.where(tl.arange(0, BLOCK_E) == e, counts, 0))
        m, n = swizzled(in_expert, tl.cdiv(count, BLOCK_M), num_n)
        row = tl.cast(first + m * BLOCK_M, tl.int64)
        col = tl.cast(n * BLOCK_N, tl.int64)
        num_valid = count - m * BLOCK_M
        rows, cols, ks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        x = x_TK + row * stride_xt
        w = _matrix(weights, e, stride_we, LISTED, DTYPE, ALIGNED) + col * stride_wn
        x_at = offsets(rows, ks, stride_xt, stride_xk, WIDE)
        w_at = offsets(ks, cols, stride_wk, stride_wn, WIDE)
        in_x, in_w = (rows < num_valid)[:, None], (cols < N - n * BLOCK_N)[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            a = tl.load(x + x_at, mask=in_x & (ks < K - k)[None, :], other=0.0)
            b = tl.load(w + w_at, mask=(ks < K - k)[:, None] & in_w, other=0.0)
            total = dot(a, b, total)
            x += tl.cast(stride_xk, tl.int64) * BLOCK_K
            w += tl.cast(stride_wk, tl.int64) * BLOCK_K
        y = y_TN + row * stride_yt + col + offsets(rows, cols, stride_yt, 1, WIDE)
        tl.store(y, total.to(y_TN.dtype.element_ty), mask=in_x & in_w)


@triton.jit
def _weight_gradient(
    out, left_TM, right_TN, counts_E, num_rows, M, N, num_experts,
    stride_oe, stride_om, stride_on, stride_lt, stride_lm, stride_rt, stride_rn,
    ACCUMULATE: tl.constexpr, WIDE: tl.constexpr,
    LISTED: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's left^T right; added to what out holds, if wanted."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    e = tl.program_id(0) // (num_m * num_n)
    m, n = swizzled(tl.program_id(0) % (num_m * num_n), num_m, num_n)
    counts = _counts(counts_E, num_rows, num_experts, BLOCK_E)
    first = tl.sum(tl.where(tl.arange(0, BLOCK_E) < e, counts, 0))
    last = first + tl.sum(tl.where(tl.arange(0, BLOCK_E) == e, counts, 0))
    if (not ACCUMULATE) or (first < last):
        row, col = m * BLOCK_M, n * BLOCK_N
        total = transposed_product(
            left_TM, right_TN, first, last, row, col, M, N,
            stride_lt, stride_lm, stride_rt, stride_rn, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        matrix = _matrix(out, e, stride_oe, LISTED, DTYPE, ALIGNED)
        if ACCUMULATE:
            add_tile(
                matrix, total, row, col, M, N, stride_om, stride_on, WIDE, BLOCK_M, BLOCK_N
            )  # fmt: skip
        else:
            rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
            matrix += tl.cast(row, tl.int64) * stride_om + tl.cast(col, tl.int64) * stride_on
            mask = (row + rows < M)[:, None] & (col + cols < N)[None, :]
            at = offsets(rows, cols, stride_om, stride_on, WIDE)
            tl.store(matrix + at, total.to(DTYPE), mask=mask)


def _check(tokens_per_expert: Tensor, num_experts: int, *row_lists: Tensor) -> None:
    """What the kernel would otherwise read beyond."""
    counts, x = tokens_per_expert, row_lists[0]
    if counts.ndim != 1 or counts.dtype != torch.int64 or len(counts) != num_experts:
        raise ValueError(
            f"grouped_gemm: tokens_per_expert must be torch.int64 of shape [{num_experts}], got "
            f"{counts.dtype} {list(counts.shape)}"
        )
    for t in row_lists:
        if t.ndim != 2 or (t.dtype, t.device, len(t)) != (x.dtype, x.device, len(x)):
            raise ValueError(
                f"grouped_gemm: needs {len(x)} rows of {x.dtype} on {x.device}, got "
                f"{list(t.shape)} of {t.dtype} on {t.device}"
            )


class _Matrices(NamedTuple):
    """What the kernels read E matrices from, or write them to."""

    memory: Tensor
    """A table of addresses, or the one tensor that holds them all."""
    constants: dict[str, Any]
    strides: tuple[int, ...]
    """Of experts, rows and columns."""


def _matrices(given: Sequence[Tensor]) -> _Matrices:
    """`given`: E matrices with the same strides, or one `[E, ., .]`."""
    first = given[0]
    constants = {"LISTED": False, "ALIGNED": False, "DTYPE": TRITON_DTYPES[first.dtype]}
    if first.ndim == 3:
        return _Matrices(first, constants, first.stride())
    table = address_table(given)
    constants |= {"LISTED": True, "ALIGNED": table.is_aligned}
    return _Matrices(table.words, constants, (0, *first.stride()))


def _lie_alike(given: Sequence[Tensor]) -> bool:
    return all(t.stride() == given[0].stride() for t in given)


def _counts_on(device: torch.device, tokens_per_expert: Tensor) -> Tensor:
    if tokens_per_expert.device == device:
        return tokens_per_expert.contiguous()
    return numbers_on(device, tokens_per_expert)


def _block_of(num_experts: int) -> int:
    """Powers of two from 32, one count for each thread of a warp: few different kernels."""
    return max(32, next_power_of_2(num_experts))


def _tile(dtype: torch.dtype, rows_per_expert: int) -> dict[str, int]:
    if dtype == torch.float32:
        return FP32_TILE
    return FEW_ROWS_TILE if rows_per_expert <= FEW_ROWS else TILE


@functools.cache
def _has_library_kernel(device: torch.device) -> bool:
    """Elsewhere torch's grouped product is a loop over counts on the host."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def _writes_garbage_without_tokens(device: torch.device) -> bool:
    """Whether torch's weight gradient of an expert without tokens is what was in the accumulators, as that of
    CUTLASS before 4.3 is on sm_100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def _suits_library(*tensors: Tensor) -> bool:
    """Whether torch's kernel can read these: bf16, contiguous, rows of whole 16 bytes."""
    return all(
        t.dtype == torch.bfloat16
        and t.is_contiguous()
        and t.numel() > 0
        and t.shape[-1] % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def _ends(counts_E: Tensor, num_rows: int) -> Tensor:
    """`[E]` int32, where the rows of each expert end, clamped as the kernels clamp: a count below 0 is 0, and
    rows that are not there are no expert's."""
    return counts_E.clamp(0, num_rows).cumsum(0).clamp_(max=num_rows).to(torch.int32)


def _library_product(x: Tensor, weight: Tensor, counts_E: Tensor, transpose_b: bool) -> Tensor:
    """Its rows begin at multiples of 16 bytes: contiguous are those of whole ones. Rows beyond those of the
    last expert are undefined."""
    matrices = weight.transpose(1, 2) if transpose_b else weight
    return torch._grouped_mm(x, matrices, _ends(counts_E, len(x))).contiguous()


def _library_wgrad(left: Tensor, right: Tensor, counts_E: Tensor) -> Tensor:
    """Rows beyond those of the last expert are left out."""
    ends_E = _ends(counts_E, len(left))
    dw = torch._grouped_mm(left.t(), right, ends_E)
    if _writes_garbage_without_tokens(left.device):
        has_none_E = ends_E == F.pad(ends_E, (1, 0))[:-1]
        dw.masked_fill_(has_none_E[:, None, None], 0)
    return dw


def grouped_gemm(
    x: Tensor, weights: Sequence[Tensor], tokens_per_expert: Tensor, transpose_b: bool
) -> Tensor:
    """`accel::grouped_gemm`."""
    stacked = weights[0].ndim == 3
    _check(tokens_per_expert, len(weights[0]) if stacked else len(weights), x)
    if x.dtype not in TRITON_DTYPES:
        return _ops().product_loop(x, weights, tokens_per_expert, transpose_b)
    N, K = weights[0].shape[-2:] if transpose_b else reversed(weights[0].shape[-2:])
    if x.shape[1] != K or any(
        (w.dtype, w.device, w.shape) != (x.dtype, x.device, weights[0].shape) for w in weights
    ):
        raise ValueError(f"grouped_gemm: weights must be like each other, with {x.shape[1]} for K")
    counts_E = _counts_on(x.device, tokens_per_expert)
    if stacked and _has_library_kernel(x.device) and _suits_library(x, weights[0]):
        return _library_product(x, weights[0], counts_E, transpose_b)
    y = x.new_empty(len(x), N)
    if y.numel() == 0:
        return y
    if not _lie_alike(weights):
        weights = [w.contiguous() for w in weights]
    matrices, constants, (stride_e, *strides) = _matrices(weights)
    num_experts = len(counts_E)
    tile = _tile(x.dtype, len(x) // num_experts)
    # As many as there can be at most: every expert may have rows of tiles that are not full.
    num_tiles = (len(x) // tile["BLOCK_M"] + num_experts) * ceil_div(N, tile["BLOCK_N"])
    strides_kn = strides[::-1] if transpose_b else strides
    launch(
        _product, (num_tiles,),
        y, x, matrices, counts_E, len(x), N, K, num_experts,
        y.stride(0), *x.stride(), stride_e, *strides_kn,
        WIDE=wide(*y.stride(), *x.stride(), *strides),
        BLOCK_E=_block_of(num_experts), **constants, **tile,
    )  # fmt: skip
    return y


def _launch_wgrad(
    left: Tensor, right: Tensor, tokens_per_expert: Tensor, out: _Matrices, *, accumulate: bool
) -> None:
    matrices, constants, strides = out
    M, N, num_experts = left.shape[1], right.shape[1], len(tokens_per_expert)
    tile = _tile(left.dtype, max(M, N))
    num_tiles = ceil_div(M, tile["BLOCK_M"]) * ceil_div(N, tile["BLOCK_N"])
    launch(
        _weight_gradient, (num_experts * num_tiles,),
        matrices, left, right, _counts_on(left.device, tokens_per_expert), len(left),
        M, N, num_experts, *strides, *left.stride(), *right.stride(),
        ACCUMULATE=accumulate, WIDE=wide(*strides[1:], *left.stride(), *right.stride()),
        BLOCK_E=_block_of(num_experts), **constants, **tile,
    )  # fmt: skip


def grouped_gemm_wgrad(
    dy: Tensor, x: Tensor, tokens_per_expert: Tensor, transpose_b: bool
) -> Tensor:
    """`accel::grouped_gemm_wgrad`."""
    _check(tokens_per_expert, len(tokens_per_expert), dy, x)
    if x.dtype not in TRITON_DTYPES:
        return _ops().wgrad_loop(dy, x, tokens_per_expert, transpose_b)
    left, right = (dy, x) if transpose_b else (x, dy)
    if _has_library_kernel(x.device) and _suits_library(left, right):
        return _library_wgrad(left, right, _counts_on(x.device, tokens_per_expert))
    dw = x.new_empty(len(tokens_per_expert), left.shape[1], right.shape[1])
    _launch_wgrad(left, right, tokens_per_expert, _matrices([dw]), accumulate=False)
    return dw


def grouped_gemm_add_wgrad_(
    dy: Tensor,
    x: Tensor,
    tokens_per_expert: Tensor,
    main_grads: Sequence[Tensor],
    transpose_b: bool,
) -> None:
    """`accel::grouped_gemm_add_wgrad_`."""
    stacked = main_grads[0].ndim == 3
    _check(tokens_per_expert, len(main_grads[0]) if stacked else len(main_grads), dy, x)
    left, right = (dy, x) if transpose_b else (x, dy)
    first = main_grads[0]
    if first.shape[-2:] != (left.shape[1], right.shape[1]) or any(
        (t.dtype, t.device, t.shape) != (first.dtype, x.device, first.shape) for t in main_grads
    ):
        raise ValueError(
            f"grouped_gemm: main_grads must be like each other, on {x.device} and of shape "
            f"[{left.shape[1]}, {right.shape[1]}] for each expert, got {list(first.shape)}"
        )
    if not {x.dtype, first.dtype} <= TRITON_DTYPES.keys() or not _lie_alike(main_grads):
        _ops().add_wgrad_loop(dy, x, tokens_per_expert, main_grads, transpose_b)
    elif len(x):
        _launch_wgrad(left, right, tokens_per_expert, _matrices(main_grads), accumulate=True)
        torch.autograd.graph.increment_version(main_grads)


def _ops() -> ModuleType:
    """The same with the library's products, one for each expert: they take every dtype."""
    return importlib.import_module("accel.ops.grouped_gemm")  # its package hides it by a function


KERNELS = {
    "accel::grouped_gemm": grouped_gemm,
    "accel::grouped_gemm_wgrad": grouped_gemm_wgrad,
    "accel::grouped_gemm_add_wgrad_": grouped_gemm_add_wgrad_,
}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Experts of a Qwen3-30B (128, 2048 x 768) as one tensor and as many; few rows each; fp32."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    counts = torch.empty(128, dtype=torch.int64, device="meta")
    x, dy = empty(65536, 2048), empty(65536, 1536)
    each = [empty(1536, 2048) for _ in range(128)]
    yield "stacked", grouped_gemm, (x, [empty(128, 2048, 1536)], counts, False)
    yield "listed, transposed", grouped_gemm, (x, each, counts, True)
    yield "listed, dgrad", grouped_gemm, (dy, each, counts, False)
    yield "few rows", grouped_gemm, (x[:4096], each, counts, True)
    yield "wgrad", grouped_gemm_wgrad, (dy, x, counts, True)
    main_grads = [empty(1536, 2048, dtype=torch.float32) for _ in range(128)]
    yield "main_grad", grouped_gemm_add_wgrad_, (dy, x, counts, main_grads, True)
    wide = empty(8192, 2048, dtype=torch.float32)
    weight = empty(8, 2048, 1536, dtype=torch.float32)
    yield "fp32", grouped_gemm, (wide, [weight], counts[:8], False)
    yield "fp32 wgrad", grouped_gemm_wgrad, (wide, wide, counts[:8], True)
