"""SwiGLU and its relatives in Triton: see `accel/ops/activation.py` for the formulas.

All are elementwise and bound by memory. A program takes a tile of rows and columns of y, for gated
ones the same columns of both halves of x: everything is read once and written once. Backward, a
program that sums takes more than a tile: whole rows for dprobs, or, with a bias, one block of columns
of a run of rows, for dbias; the sums of the runs are added up at the end.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2, num_processors
from accel.ops.activation import gradient_limit

TILE = 2048
"""Elements of y that a program takes at a time: 16 in each of 4 x 32 threads, two loads of 16 bytes
from each 16-bit tensor. Derived, not measured."""
TILE_OF_SUMS = 1024
"""The same where dbias is summed: with 16 in each thread, its sums take 200 registers, with 8 they take
100 or so, and twice as many programs run beside each other."""
NUM_WARPS = 4
MIN_BLOCK = 512
"""The least columns at a time where there are as many: 1 KiB of each row of 16 bits."""
RUNS_PER_PROCESSOR = 4
"""Programs with a bias: as many as run beside each other on a processor at up to 128 registers."""

GATED = ("swiglu", "geglu", "quick_geglu")
KINDS = (*GATED, "gelu", "squared_relu")

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2_HIGH = tl.constexpr(float.fromhex("0x1.62ep-1"))
"""ln(2) to 12 bits, so that its products with whole numbers below 2^12 are exact,"""
LN_2_LOW = tl.constexpr(float.fromhex("0x1.0bfbe8p-15"))
"""and the rest."""
GELU_LINEAR = tl.constexpr(1.5957691216057308)
"""2 sqrt(2 / pi), since (1 + tanh(z)) / 2 = sigmoid(2 z): no cancellation where z is near 0 or below."""
GELU_CUBIC = tl.constexpr(1.5957691216057308 * 0.044715)


@triton.jit
def _exp(v, PRECISE: tl.constexpr):
    """e^v. `tl.exp` rounds v log2(e), which takes |v| 2^-24 of accuracy: enough for 16-bit results.

    Else e^v = 2^n e^r with n = round(v / ln 2), where |r| is so small that this rounding does not show.
    """
    if PRECISE:
        v = tl.where(v > 104.0, 104.0, tl.where(v < -104.0, -104.0, v))  # no inf - inf; NaN stays
        n = tl.floor(v * LOG2_E + 0.5)
        r = (v - n * LN_2_HIGH) - n * LN_2_LOW
        e = tl.exp2(n) * tl.exp2(r * LOG2_E)
    else:
        e = tl.exp(v)
    return e


@triton.jit
def _exponent(v, KIND: tl.constexpr):
    """q where f(v) = v sigmoid(q)."""
    if KIND == "swiglu":
        q = v
    elif KIND == "quick_geglu":
        q = 1.702 * v
    else:
        q = v * (GELU_LINEAR + GELU_CUBIC * v * v)
    return q


@triton.jit
def _exponent_slope(v, KIND: tl.constexpr):
    """dq / dv."""
    if KIND == "swiglu":
        slope = v * 0.0 + 1.0
    elif KIND == "quick_geglu":
        slope = v * 0.0 + 1.702
    else:
        slope = GELU_LINEAR + 3.0 * GELU_CUBIC * v * v
    return slope


@triton.jit
def _activate(v, KIND: tl.constexpr, PRECISE: tl.constexpr):
    if KIND == "squared_relu":
        v = tl.where(v < 0.0, 0.0, v)  # NaN stays
        value = v * v
    else:
        value = v / (1.0 + _exp(-_exponent(v, KIND), PRECISE))
    return value


@triton.jit
def _activate_with_slope(v, KIND: tl.constexpr, PRECISE: tl.constexpr):
    if KIND == "squared_relu":
        v = tl.where(v < 0.0, 0.0, v)
        value, slope = v * v, 2.0 * v
    else:
        s = 1.0 / (1.0 + _exp(-_exponent(v, KIND), PRECISE))
        value = v * s
        slope = s + value * (1.0 - s) * _exponent_slope(v, KIND)
    return value, slope


@triton.jit
def _load_biased(x, bias, rows, width, cols, valid, col_valid):
    """Columns `cols` of x + bias, fp32 [BLOCK_T, BLOCK_F]; 0 where they are not valid."""
    at = rows[:, None] * width + cols[None, :]
    v = tl.load(x + at, mask=valid[:, None] & col_valid[None, :], other=0.0).to(tl.float32)
    if bias is not None:
        v += tl.load(bias + cols, mask=col_valid, other=0.0).to(tl.float32)[None, :]
    return v


@triton.jit
def _limited(gate, up, limit, offset, LIMITED: tl.constexpr):
    if LIMITED:  # NaN stays
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + offset
    return gate, up


@triton.jit
def _tile_of_program(num_cols, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """Rows and columns; the blocks of a row belong to neighbours, which run at the same time."""
    num_col_blocks = tl.cdiv(num_cols, BLOCK_F)
    program = tl.program_id(0)
    rows = (program // num_col_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return rows, (program % num_col_blocks) * BLOCK_F + tl.arange(0, BLOCK_F)


@triton.jit
def _forward(
    x, bias, probs_T, y, num_rows, num_cols, limit, offset,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, LIMITED: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    rows, cols = _tile_of_program(num_cols, BLOCK_T, BLOCK_F)
    valid, col_valid = rows < num_rows, cols < num_cols
    if IS_GATED:
        gate = _load_biased(x, bias, rows, 2 * num_cols, cols, valid, col_valid)
        up = _load_biased(x, bias, rows, 2 * num_cols, num_cols + cols, valid, col_valid)
        gate, up = _limited(gate, up, limit, offset, LIMITED)
        value = _activate(gate, KIND, PRECISE) * up
    else:
        value = _activate(
            _load_biased(x, bias, rows, num_cols, cols, valid, col_valid), KIND, PRECISE
        )
    if probs_T is not None:
        value *= tl.load(probs_T + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
    at = rows[:, None] * num_cols + cols[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=valid[:, None] & col_valid[None, :])


@triton.jit
def _store_gradient(
    dy, x, bias, dx, prob_T, rows, cols, valid, num_cols, limit, offset, gradient_limit,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, LIMITED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Store a tile of dx; return its halves (the same twice if there are none) and dy y / p, in fp32.

    dx may be the memory of x: nobody else reads this tile, and a thread writes what it has read.
    """
    col_valid = cols < num_cols
    mask = valid[:, None] & col_valid[None, :]
    at = rows[:, None] * num_cols + cols[None, :]
    dv = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        gate = _load_biased(x, bias, rows, 2 * num_cols, cols, valid, col_valid)
        up = _load_biased(x, bias, rows, 2 * num_cols, num_cols + cols, valid, col_valid)
        gate_in, up_in = _limited(gate, up, limit, offset, LIMITED)
        value, slope = _activate_with_slope(gate_in, KIND, PRECISE)
        dot = dv * value * up_in
        if prob_T is not None:
            dv *= prob_T[:, None]
        dgate, dup = dv * up_in * slope, dv * value
        if LIMITED:  # no gradient where the limit held
            dgate = tl.where(gate > gradient_limit, 0.0, dgate)
            dup = tl.where((up > gradient_limit) | (up < -gradient_limit), 0.0, dup)
        at += rows[:, None] * num_cols  # rows of dx are twice as long
        tl.store(dx + at, dgate.to(dx.dtype.element_ty), mask=mask)
        tl.store(dx + at + num_cols, dup.to(dx.dtype.element_ty), mask=mask)
    else:
        v = _load_biased(x, bias, rows, num_cols, cols, valid, col_valid)
        value, slope = _activate_with_slope(v, KIND, PRECISE)
        dot = dv * value
        if prob_T is not None:
            dv *= prob_T[:, None]
        dgate = dv * slope
        dup = dgate
        tl.store(dx + at, dgate.to(dx.dtype.element_ty), mask=mask)
    return dgate, dup, dot


@triton.jit
def _backward_tile(
    dy, x, dx, num_rows, num_cols, limit, offset, gradient_limit,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, LIMITED: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Neither bias nor probs: nothing to sum."""
    rows, cols = _tile_of_program(num_cols, BLOCK_T, BLOCK_F)
    _store_gradient(
        dy, x, None, dx, None, rows, cols, rows < num_rows, num_cols, limit, offset, gradient_limit,
        KIND, IS_GATED, LIMITED, PRECISE,
    )  # fmt: skip


@triton.jit
def _backward_rows(
    dy, x, probs_T, dx, dprobs_T, num_rows, num_cols, limit, offset, gradient_limit,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, LIMITED: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """probs and no bias: whole rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = rows < num_rows
    prob_T = tl.load(probs_T + rows, mask=valid, other=0.0).to(tl.float32)
    dots = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for start in range(0, num_cols, BLOCK_F):
        _dgate, _dup, dot = _store_gradient(
            dy, x, None, dx, prob_T, rows, start + tl.arange(0, BLOCK_F), valid, num_cols,
            limit, offset, gradient_limit, KIND, IS_GATED, LIMITED, PRECISE,
        )  # fmt: skip
        dots += dot
    tl.store(dprobs_T + rows, tl.sum(dots, axis=1).to(dprobs_T.dtype.element_ty), mask=valid)


@triton.jit
def _backward_columns(
    dy, x, bias, probs_T, dx, dbias_PN, dprobs_CT, num_rows, num_cols, rows_per_run,
    limit, offset, gradient_limit,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, LIMITED: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """A bias, perhaps probs: a block of columns of a run of rows, whose sums go out in fp32."""
    num_col_blocks = tl.cdiv(num_cols, BLOCK_F)
    run = (tl.program_id(0) // num_col_blocks).to(tl.int64)
    col_block = (tl.program_id(0) % num_col_blocks).to(tl.int64)
    cols = col_block.to(tl.int32) * BLOCK_F + tl.arange(0, BLOCK_F)
    dbias_gate = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    dbias_up = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    first = run * rows_per_run
    last = tl.minimum(first + rows_per_run, num_rows)
    for start in range(first, last, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        valid = rows < last
        prob_T = None
        if probs_T is not None:
            prob_T = tl.load(probs_T + rows, mask=valid, other=0.0).to(tl.float32)
        dgate, dup, dot = _store_gradient(
            dy, x, bias, dx, prob_T, rows, cols, valid, num_cols,
            limit, offset, gradient_limit, KIND, IS_GATED, LIMITED, PRECISE,
        )  # fmt: skip
        dbias_gate += dgate
        dbias_up += dup
        if probs_T is not None:
            dprobs = tl.sum(dot, axis=1).to(dprobs_CT.dtype.element_ty)
            tl.store(dprobs_CT + col_block * num_rows + rows, dprobs, mask=valid)
    width = 2 * num_cols if IS_GATED else num_cols
    to = dbias_PN + run * width + cols
    tl.store(to, tl.sum(dbias_gate, axis=0), mask=cols < num_cols)
    if IS_GATED:
        tl.store(to + num_cols, tl.sum(dbias_up, axis=0), mask=cols < num_cols)


class _Call(NamedTuple):
    """The inputs of a call, checked and contiguous, and what the kernels want to know."""

    x: Tensor
    bias: Tensor | None
    probs_T: Tensor | None
    num_rows: int
    num_cols: int
    """Of y."""
    limits: tuple[float, float]
    """The clamp value, infinity for none, and the offset."""
    gradient_limit: float
    """What is beyond it has no gradient."""
    options: dict[str, Any]

    @property
    def num_tiles(self) -> tuple[int, int]:
        """Of rows and of columns."""
        return (
            ceil_div(self.num_rows, self.options["BLOCK_T"]),
            ceil_div(self.num_cols, self.options["BLOCK_F"]),
        )


def _blocks(num_cols: int, tile: int) -> dict[str, int]:
    """Columns at a time so that few lie beyond the last, and as many rows as fill a tile."""
    block_f = min(next_power_of_2(num_cols), tile)
    if num_cols > MIN_BLOCK:
        sizes = (block_f, max(block_f // 2, MIN_BLOCK), max(block_f // 4, MIN_BLOCK))
        block_f = min(sizes, key=lambda size: ceil_div(num_cols, size) * size)
    return {"BLOCK_T": tile // block_f, "BLOCK_F": block_f, "num_warps": NUM_WARPS}


def _check(
    x: Tensor, bias: Tensor | None, probs: Tensor | None, kind: str, clamp_value: float | None
) -> None:
    """What would let a kernel read past a buffer; the public functions say the rest better."""
    if kind not in KINDS:
        raise ValueError(f"activation: unknown kind {kind!r}")
    if x.ndim == 0 or (kind in GATED and x.shape[-1] % 2):
        raise ValueError(f"{kind}: x must have shape [..., 2F] or [..., F], got {list(x.shape)}")
    if bias is not None and (bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ValueError(
            f"{kind}: bias must be {x.dtype} [{x.shape[-1]}], got {bias.dtype} {list(bias.shape)}"
        )
    if probs is not None and probs.numel() != x.shape[:-1].numel():
        raise ValueError(
            f"{kind}: probs must have {x.shape[:-1].numel()} elements, got {list(probs.shape)}"
        )
    if clamp_value is not None and not clamp_value >= 0:
        raise ValueError(f"{kind}: clamp_value must not be negative, got {clamp_value}")


def _call(
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
    *,
    tile: int,
) -> _Call:
    _check(x, bias, probs, kind, clamp_value)
    gated = kind in GATED
    num_cols = x.shape[-1] // 2 if gated else x.shape[-1]
    options = {
        "KIND": kind,
        "IS_GATED": gated,
        "LIMITED": gated and (clamp_value is not None or offset != 0),
        "PRECISE": x.dtype == torch.float32,
        **_blocks(num_cols, tile),
    }
    return _Call(
        x.contiguous(),
        None if bias is None else bias.contiguous(),
        None if probs is None else probs.contiguous(),
        x.shape[:-1].numel(),
        num_cols,
        (float("inf") if clamp_value is None else clamp_value, offset),
        gradient_limit(clamp_value),
        options,
    )


def forward(
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
    inplace_grad: bool,
) -> Tensor:
    """`accel::activation_fwd`."""
    call = _call(x, bias, probs, kind, clamp_value, offset, tile=TILE)
    y = x.new_empty((*x.shape[:-1], call.num_cols))
    rows, cols = call.num_tiles
    launch(
        _forward, (rows * cols,),
        call.x, call.bias, call.probs_T, y, call.num_rows, call.num_cols, *call.limits,
        **call.options,
    )  # fmt: skip
    return y


def _launch_columns(
    call: _Call, dx: Tensor, dy: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dbias and dprobs of a call with a bias, which is not empty; dx is written."""
    assert call.bias is not None
    row_tiles, col_tiles = call.num_tiles
    num_runs = min(row_tiles, max(1, RUNS_PER_PROCESSOR * num_processors(dx.device) // col_tiles))
    tiles_per_run = ceil_div(row_tiles, num_runs)
    num_runs = ceil_div(row_tiles, tiles_per_run)
    dbias_PN = dx.new_empty((num_runs, dx.shape[-1]), dtype=torch.float32)
    # Each block of columns has its part of every row's sum: rounded once, where it is the only one.
    dprobs_CT = None
    if probs is not None:
        dprobs_dtype = probs.dtype if col_tiles == 1 else torch.float32
        dprobs_CT = probs.new_empty((col_tiles, call.num_rows), dtype=dprobs_dtype)
    launch(
        _backward_columns, (num_runs * col_tiles,),
        dy, call.x, call.bias, call.probs_T, dx, dbias_PN, dprobs_CT,
        call.num_rows, call.num_cols, tiles_per_run * call.options["BLOCK_T"], *call.limits,
        call.gradient_limit, **call.options,
    )  # fmt: skip
    dbias = dbias_PN.sum(0).to(call.bias.dtype)
    if probs is None or dprobs_CT is None:
        return dbias, dx.new_empty(0)
    dprobs_T = dprobs_CT if col_tiles == 1 else dprobs_CT.sum(0).to(probs.dtype)
    return dbias, dprobs_T.view(probs.shape)


def _backward_into(
    dx: Tensor, dy: Tensor, call: _Call, probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Write dx, which may be the memory of x; dbias and dprobs, empty where there is none."""
    x, bias = call.x, call.bias
    if dy.shape != (*x.shape[:-1], call.num_cols) or dy.dtype != x.dtype:
        raise ValueError(
            f"activation backward: dy must be like y, {x.dtype} "
            f"{[*x.shape[:-1], call.num_cols]}, got {dy.dtype} {list(dy.shape)}"
        )
    if x.numel() == 0:
        empty = x.new_empty(0)
        dbias = empty if bias is None else torch.zeros_like(bias)
        return dbias, x.new_empty(0) if probs is None else probs.new_zeros(probs.shape)
    dy = dy.contiguous()
    if bias is not None:
        return _launch_columns(call, dx, dy, probs)
    rows, cols = call.num_tiles
    sizes = (call.num_rows, call.num_cols, *call.limits, call.gradient_limit)
    if probs is None:
        launch(_backward_tile, (rows * cols,), dy, x, dx, *sizes, **call.options)
        return x.new_empty(0), x.new_empty(0)
    dprobs = probs.new_empty(probs.shape)
    launch(_backward_rows, (rows,), dy, x, call.probs_T, dx, dprobs, *sizes, **call.options)
    return x.new_empty(0), dprobs


def backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::activation_bwd`."""
    tile = TILE if bias is None else TILE_OF_SUMS
    call = _call(x, bias, probs, kind, clamp_value, offset, tile=tile)
    dx = x.new_empty(x.shape)
    return dx, *_backward_into(dx, dy, call, probs)


def backward_inplace(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    kind: str,
    clamp_value: float | None,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """`accel::activation_bwd_inplace`."""
    if not x.is_contiguous():
        raise ValueError(f"{kind} backward: x must be contiguous to be overwritten")
    tile = TILE if bias is None else TILE_OF_SUMS
    call = _call(x, bias, probs, kind, clamp_value, offset, tile=tile)
    return _backward_into(x, dy, call, probs)


KERNELS = {
    "accel::activation_fwd": forward,
    "accel::activation_bwd": backward,
    "accel::activation_bwd_inplace": backward_inplace,
}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Llama's SwiGLU, a DeepSeek expert's with probs, and the others with a bias."""
    for kind, num_cols, with_bias, with_probs, clamp_value, dtype in (
        ("swiglu", 14336, False, False, None, torch.bfloat16),
        ("swiglu", 14336, False, False, None, torch.float32),
        ("swiglu", 2048, False, True, None, torch.bfloat16),
        ("swiglu", 1408, False, True, None, torch.bfloat16),
        ("quick_geglu", 2880, True, True, 7.0, torch.bfloat16),
        ("geglu", 14336, True, False, None, torch.bfloat16),
        ("geglu", 14336, True, True, 7.0, torch.float32),
        ("gelu", 16384, True, False, None, torch.bfloat16),
        ("squared_relu", 16384, False, True, None, torch.bfloat16),
    ):
        width = num_cols * (2 if kind in GATED else 1)
        x = torch.empty(8192, width, dtype=dtype, device="meta")
        dy = torch.empty(8192, num_cols, dtype=dtype, device="meta")
        bias = torch.empty(width, dtype=dtype, device="meta") if with_bias else None
        probs = torch.empty(8192, 1, device="meta") if with_probs else None
        arguments = (x, bias, probs, kind, clamp_value, 0.0)
        case = f"{kind} F={num_cols} {str(dtype).removeprefix('torch.')}"
        yield case, forward, (*arguments, False)
        yield case, backward, (dy, *arguments)
