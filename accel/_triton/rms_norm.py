"""RMSNorm in Triton, also behind a residual addition: see `accel/ops/rms_norm.py` for the formulas.

Rows of up to MAX_BLOCK elements stay in registers: x is read once forward, x and dy once backward.
Longer rows are read twice in blocks, the second time from a cache. Backward, each of a fixed number
of programs sums dweight over its run of rows, in registers or, for long rows, in a row of memory
that its cache holds; these sums are added up at the end.

`add_rms_norm.py` runs these same kernels, since it owes the bits of an addition and this norm.
For that, products and sums are not contracted (`enable_fp_fusion`): ptxas would choose otherwise
where something is added to dx.
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

__all__ = ["KERNELS", "backward", "compile_cases", "forward", "launch_backward", "launch_forward"]

MAX_BLOCK = 16384
"""Elements of a row in registers, forward: 32 in each thread of 16 warps."""
MAX_BLOCK_BACKWARD = 8192
"""The same backward, where x, dy and the sum of dweight are there at once: with 32 each, they spill."""


@triton.jit
def _load_rows(x_TN, residual_TN, bias_N, total_TN, at, mask, cols, num_cols):
    """x, or what goes to total: residual + (x + bias), where each sum is rounded to the dtype of x."""
    x = tl.load(x_TN + at, mask=mask, other=0.0)
    if residual_TN is not None:
        dtype = x_TN.dtype.element_ty
        if bias_N is not None:
            bias = load_vector(bias_N, cols, num_cols)
            x = (x.to(tl.float32) + bias[None, :]).to(dtype)
        residual = tl.load(residual_TN + at, mask=mask, other=0.0).to(tl.float32)
        x = (residual + x.to(tl.float32)).to(dtype)
        tl.store(total_TN + at, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def _forward(
    x_TN, residual_TN, bias_N, weight_N, y_TN, total_TN, rstd_T, num_rows, num_cols, eps,
    ZERO_CENTERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = rows < num_rows
    cols = tl.arange(0, BLOCK_N)
    if WHOLE_ROWS:
        at = rows[:, None] * num_cols + cols[None, :]
        mask = valid[:, None] & (cols < num_cols)[None, :]
        x = _load_rows(x_TN, residual_TN, bias_N, total_TN, at, mask, cols, num_cols)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / num_cols + eps)
        y = x * rstd[:, None] * load_scale(weight_N, cols, num_cols, ZERO_CENTERED)[None, :]
        tl.store(y_TN + at, y.to(y_TN.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            at = rows[:, None] * num_cols + (start + cols)[None, :]
            mask = valid[:, None] & (start + cols < num_cols)[None, :]
            x = _load_rows(x_TN, residual_TN, bias_N, total_TN, at, mask, start + cols, num_cols)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / num_cols + eps)
        if residual_TN is not None:
            tl.debug_barrier()  # what other threads stored to total
            x_TN = total_TN
        for start in range(0, num_cols, BLOCK_N):
            at = rows[:, None] * num_cols + (start + cols)[None, :]
            mask = valid[:, None] & (start + cols < num_cols)[None, :]
            x = tl.load(x_TN + at, mask=mask, other=0.0).to(tl.float32)
            scale = load_scale(weight_N, start + cols, num_cols, ZERO_CENTERED)
            y = x * rstd[:, None] * scale[None, :]
            tl.store(y_TN + at, y.to(y_TN.dtype.element_ty), mask=mask)
    tl.store(rstd_T + rows, rstd, mask=valid)


@triton.jit
def _store_dx(dx_TN, dtotal_TN, dx, at, mask):
    """dx, or dx + dtotal of the dtype that both have by then: torch adds them so."""
    dx = dx.to(dx_TN.dtype.element_ty)
    if dtotal_TN is not None:
        dtotal = tl.load(dtotal_TN + at, mask=mask, other=0.0).to(tl.float32)
        dx = (dx.to(tl.float32) + dtotal).to(dx_TN.dtype.element_ty)
    tl.store(dx_TN + at, dx, mask=mask)


@triton.jit
def _backward_rows(
    dy_TN, dtotal_TN, x_TN, weight_N, rstd_T, dx_TN, dweight_PN,
    num_rows, num_cols, rows_per_program,
    ZERO_CENTERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx of a run of whole rows, and the sum of their dweight."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    scale = load_scale(weight_N, cols, num_cols, ZERO_CENTERED)
    dweight = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_T)
        valid = rows < last
        at = rows[:, None] * num_cols + cols[None, :]
        mask = valid[:, None] & (cols < num_cols)[None, :]
        x = tl.load(x_TN + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_TN + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_T + rows, mask=valid, other=0.0)[:, None]
        h = x * rstd
        g = dy * scale[None, :]
        dx = (g - h * (tl.sum(g * h, axis=1) / num_cols)[:, None]) * rstd
        _store_dx(dx_TN, dtotal_TN, dx, at, mask)
        dweight += dy * h
    at = program * num_cols + cols
    tl.store(dweight_PN + at, tl.sum(dweight, axis=0), mask=cols < num_cols)


@triton.jit
def _backward_long_rows(
    dy_TN, dtotal_TN, x_TN, weight_N, rstd_T, dx_TN, dweight_PN,
    num_rows, num_cols, rows_per_program,
    ZERO_CENTERED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for rows that do not fit into registers; dweight is summed in memory, zero at first."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, num_rows)):
        rstd = tl.load(rstd_T + row)
        products = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            at = start + cols
            x = load_vector(x_TN + row * num_cols, at, num_cols)
            dy = load_vector(dy_TN + row * num_cols, at, num_cols)
            products += dy * load_scale(weight_N, at, num_cols, ZERO_CENTERED) * (x * rstd)
        mean = tl.sum(products, axis=0) / num_cols
        for start in range(0, num_cols, BLOCK_N):
            at = start + cols
            h = load_vector(x_TN + row * num_cols, at, num_cols) * rstd
            dy = load_vector(dy_TN + row * num_cols, at, num_cols)
            dx = (dy * load_scale(weight_N, at, num_cols, ZERO_CENTERED) - h * mean) * rstd
            _store_dx(dx_TN, dtotal_TN, dx, row * num_cols + at, at < num_cols)
            total = dweight_PN + program * num_cols + at
            sum_before = tl.load(total, mask=at < num_cols, other=0.0)
            tl.store(total, sum_before + dy * h, mask=at < num_cols)


def launch_forward(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """y, rstd_T, and with a residual total; all tensors contiguous."""
    y = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    rstd_T = x.new_empty(x.shape[:-1], dtype=torch.float32)
    num_rows, num_cols = rstd_T.numel(), x.shape[-1]
    if num_cols == 0:
        return y, total, rstd_T.fill_(eps).rsqrt_()
    sizes = blocks(num_cols, MAX_BLOCK, per_thread=32)
    launch(
        _forward, (ceil_div(num_rows, sizes["BLOCK_T"]),),
        x, residual, bias, weight, y, total, rstd_T, num_rows, num_cols, eps,
        ZERO_CENTERED=zero_centered, WHOLE_ROWS=num_cols <= MAX_BLOCK, enable_fp_fusion=False,
        **sizes,
    )  # fmt: skip
    return y, total, rstd_T


def launch_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, rstd_T: Tensor,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, to which dtotal is added, and dweight; all tensors contiguous."""
    dx = torch.empty_like(x)
    num_rows, num_cols = rstd_T.numel(), x.shape[-1]
    if num_cols == 0 or num_rows == 0:
        return dx, torch.zeros_like(weight)
    whole = num_cols <= MAX_BLOCK_BACKWARD
    if whole:
        num_tensors = 2 if dtotal is None else 3
        sizes = backward_blocks(num_cols, MAX_BLOCK_BACKWARD, x.element_size(), num_tensors)
    else:
        sizes = {"BLOCK_N": LONG_ROWS_BLOCK, "num_warps": 16}
    num_programs, rows_per_program = runs(num_rows, sizes.get("BLOCK_T", 1), x.device)
    new = x.new_empty if whole else x.new_zeros
    dweight_P1N = new((num_programs, 1, num_cols), dtype=torch.float32)
    launch(
        _backward_rows if whole else _backward_long_rows, (num_programs,),
        dy, dtotal, x, weight, rstd_T, dx, dweight_P1N, num_rows, num_cols, rows_per_program,
        ZERO_CENTERED=zero_centered, enable_fp_fusion=False, **sizes,
    )  # fmt: skip
    (dweight,) = sum_partials(dweight_P1N, weight.dtype)
    return dx, dweight


def forward(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_fwd`."""
    y, _, rstd_T = launch_forward(
        x.contiguous(), None, None, weight.contiguous(), eps, zero_centered
    )
    return y, rstd_T


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd_T: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """`accel::rms_norm_bwd`."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    return launch_backward(dy, None, x, weight, rstd_T, zero_centered)


KERNELS = {"accel::rms_norm_fwd": forward, "accel::rms_norm_bwd": backward}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """A head's width, a model's and one beyond `MAX_BLOCK`, in the dtypes that train."""
    for num_cols in (128, 4096, 8192, 16384, 20480):
        x = torch.empty(8192, num_cols, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(num_cols, dtype=torch.bfloat16, device="meta")
        rstd_T = torch.empty(8192, device="meta")
        yield f"N={num_cols}", forward, (x, weight, 1e-5, False)
        yield f"N={num_cols}", backward, (x, x, weight, rstd_T, False)
