"""LayerNorm in Triton: see `accel/ops/layer_norm.py` for the formulas.

The variance is the mean square about the mean, which keeps the digits that E[x^2] - E[x]^2 loses.
Rows of up to MAX_BLOCK elements stay in registers: x is read once forward, x and dy once backward.
Longer rows are read in blocks, three times forward and twice backward, but once from memory: later
from a cache. Backward, each of a fixed number of programs sums dweight and dbias over its run of
rows, in registers or, for long rows, in memory that its cache holds; these sums are added up at the
end.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch
from accel._triton.norm import (
    LONG_ROWS_BLOCK,
    backward_blocks,
    blocks,
    load_scale,
    load_vector,
    runs,
    sum_partials,
)

__all__ = ["KERNELS", "backward", "compile_cases", "forward"]

MAX_BLOCK = 16384
"""Elements of a row in registers, forward: 32 in each thread of 16 warps."""
MAX_BLOCK_BACKWARD = 8192
"""The same backward, where x, dy, scale and two sums are there at once: with 32 each, they spill."""


@triton.jit
def _normalize(x, mean, rstd, weight_N, bias_N, cols, num_cols, ZERO_CENTERED: tl.constexpr):
    h = (x - mean[:, None]) * rstd[:, None]
    scale = load_scale(weight_N, cols, num_cols, ZERO_CENTERED)
    return h * scale[None, :] + load_vector(bias_N, cols, num_cols)[None, :]


@triton.jit
def _forward(
    x_TN, weight_N, bias_N, y_TN, mean_T, rstd_T, num_rows, num_cols, eps,
    ZERO_CENTERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = rows < num_rows
    cols = tl.arange(0, BLOCK_N)
    if WHOLE_ROWS:
        at = rows[:, None] * num_cols + cols[None, :]
        mask = valid[:, None] & (cols < num_cols)[None, :]
        x = tl.load(x_TN + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=1) / num_cols
        centred = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / num_cols + eps)
        y = _normalize(x, mean, rstd, weight_N, bias_N, cols, num_cols, ZERO_CENTERED)
        tl.store(y_TN + at, y.to(y_TN.dtype.element_ty), mask=mask)
    else:
        sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            at = rows[:, None] * num_cols + (start + cols)[None, :]
            mask = valid[:, None] & (start + cols < num_cols)[None, :]
            sums += tl.load(x_TN + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(sums, axis=1) / num_cols
        squares = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            at = rows[:, None] * num_cols + (start + cols)[None, :]
            mask = valid[:, None] & (start + cols < num_cols)[None, :]
            x = tl.load(x_TN + at, mask=mask, other=0.0).to(tl.float32)
            centred = tl.where(mask, x - mean[:, None], 0.0)
            squares += centred * centred
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / num_cols + eps)
        for start in range(0, num_cols, BLOCK_N):
            at = rows[:, None] * num_cols + (start + cols)[None, :]
            mask = valid[:, None] & (start + cols < num_cols)[None, :]
            x = tl.load(x_TN + at, mask=mask, other=0.0).to(tl.float32)
            y = _normalize(x, mean, rstd, weight_N, bias_N, start + cols, num_cols, ZERO_CENTERED)
            tl.store(y_TN + at, y.to(y_TN.dtype.element_ty), mask=mask)
    tl.store(mean_T + rows, mean, mask=valid)
    tl.store(rstd_T + rows, rstd, mask=valid)


@triton.jit
def _backward_rows(
    dy_TN, x_TN, weight_N, mean_T, rstd_T, dx_TN, sums_P2N, num_rows, num_cols, rows_per_program,
    ZERO_CENTERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx of a run of whole rows, and the sums of their dweight and dbias."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    scale = load_scale(weight_N, cols, num_cols, ZERO_CENTERED)
    dweight = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_T)
        valid = rows < last
        at = rows[:, None] * num_cols + cols[None, :]
        mask = valid[:, None] & (cols < num_cols)[None, :]
        x = tl.load(x_TN + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_TN + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_T + rows, mask=valid, other=0.0)[:, None]
        rstd = tl.load(rstd_T + rows, mask=valid, other=0.0)[:, None]
        h = (x - mean) * rstd
        g = dy * scale[None, :]  # 0 beyond the row
        mean_g = (tl.sum(g, axis=1) / num_cols)[:, None]
        mean_gh = (tl.sum(g * h, axis=1) / num_cols)[:, None]
        dx = (g - mean_g - h * mean_gh) * rstd
        tl.store(dx_TN + at, dx.to(dx_TN.dtype.element_ty), mask=mask)
        dweight += dy * h
        dbias += dy
    sums = sums_P2N + 2 * program * num_cols + cols
    tl.store(sums, tl.sum(dweight, axis=0), mask=cols < num_cols)
    tl.store(sums + num_cols, tl.sum(dbias, axis=0), mask=cols < num_cols)


@triton.jit
def _add_to(total, addend, mask):
    tl.store(total, tl.load(total, mask=mask, other=0.0) + addend, mask=mask)


@triton.jit
def _backward_long_rows(
    dy_TN, x_TN, weight_N, mean_T, rstd_T, dx_TN, sums_P2N, num_rows, num_cols, rows_per_program,
    ZERO_CENTERED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for rows that do not fit into registers; the sums are in memory, zero at first."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, num_rows)):
        mean = tl.load(mean_T + row)
        rstd = tl.load(rstd_T + row)
        gs = tl.zeros([BLOCK_N], tl.float32)
        products = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            at = start + cols
            x = load_vector(x_TN + row * num_cols, at, num_cols)
            dy = load_vector(dy_TN + row * num_cols, at, num_cols)
            g = dy * load_scale(weight_N, at, num_cols, ZERO_CENTERED)
            gs += g
            products += g * ((x - mean) * rstd)
        mean_g = tl.sum(gs, axis=0) / num_cols
        mean_gh = tl.sum(products, axis=0) / num_cols
        for start in range(0, num_cols, BLOCK_N):
            at = start + cols
            h = (load_vector(x_TN + row * num_cols, at, num_cols) - mean) * rstd
            dy = load_vector(dy_TN + row * num_cols, at, num_cols)
            g = dy * load_scale(weight_N, at, num_cols, ZERO_CENTERED)
            dx = (g - mean_g - h * mean_gh) * rstd
            valid = at < num_cols
            tl.store(dx_TN + row * num_cols + at, dx.to(dx_TN.dtype.element_ty), mask=valid)
            sums = sums_P2N + 2 * program * num_cols + at
            _add_to(sums, dy * h, valid)
            _add_to(sums + num_cols, dy, valid)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_fwd`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    mean_T, rstd_T = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    num_rows, num_cols = rstd_T.numel(), x.shape[-1]
    if num_cols == 0:
        return y, mean_T.zero_(), rstd_T.fill_(eps).rsqrt_()
    sizes = blocks(num_cols, MAX_BLOCK, per_thread=32)
    launch(
        _forward, (ceil_div(num_rows, sizes["BLOCK_T"]),),
        x, weight.contiguous(), bias.contiguous(), y, mean_T, rstd_T, num_rows, num_cols, eps,
        ZERO_CENTERED=zero_centered, WHOLE_ROWS=num_cols <= MAX_BLOCK, **sizes,
    )  # fmt: skip
    return y, mean_T, rstd_T


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean_T: Tensor, rstd_T: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::layer_norm_bwd`."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dx = torch.empty_like(x)
    num_rows, num_cols = rstd_T.numel(), x.shape[-1]
    if num_cols == 0 or num_rows == 0:
        return dx, torch.zeros_like(weight), torch.zeros_like(weight)
    whole = num_cols <= MAX_BLOCK_BACKWARD
    if whole:
        sizes = backward_blocks(num_cols, MAX_BLOCK_BACKWARD, x.element_size(), num_tensors=2)
    else:
        sizes = {"BLOCK_N": LONG_ROWS_BLOCK, "num_warps": 16}
    num_programs, rows_per_program = runs(num_rows, sizes.get("BLOCK_T", 1), x.device)
    new = x.new_empty if whole else x.new_zeros
    sums_P2N = new((num_programs, 2, num_cols), dtype=torch.float32)
    launch(
        _backward_rows if whole else _backward_long_rows, (num_programs,),
        dy, x, weight, mean_T, rstd_T, dx, sums_P2N, num_rows, num_cols, rows_per_program,
        ZERO_CENTERED=zero_centered, **sizes,
    )  # fmt: skip
    dweight, dbias = sum_partials(sums_P2N, weight.dtype)
    return dx, dweight, dbias


KERNELS = {"accel::layer_norm_fwd": forward, "accel::layer_norm_bwd": backward}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """A head's width, models' and one beyond `MAX_BLOCK`, in the dtypes that train."""
    for num_cols, dtype in (
        (128, torch.bfloat16),
        (4096, torch.bfloat16),
        (8192, torch.bfloat16),
        (8192, torch.float32),
        (12288, torch.bfloat16),
        (20480, torch.bfloat16),
    ):
        x = torch.empty(8192, num_cols, dtype=dtype, device="meta")
        vector = torch.empty(num_cols, dtype=dtype, device="meta")
        mean_T = rstd_T = torch.empty(8192, device="meta")
        case = f"N={num_cols} {str(dtype).removeprefix('torch.')}"
        yield case, forward, (x, vector, vector, 1e-5, False)
        yield case, backward, (x, x, vector, mean_T, rstd_T, False)
