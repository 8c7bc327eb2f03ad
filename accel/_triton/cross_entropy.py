"""Cross entropy in Triton: see `accel/ops/cross_entropy.py` for the formulas.

A program of the forward reads one row, or one part of it where rows are few, in blocks of
[vectors, lanes, elements of a vector]. Every lane has a maximum and a sum of its own, so that nothing
crosses threads until the row's end and an exponential is spent on each element and one more on each
block of a lane. The backward is elementwise: a program for each block of a row, over the logits where
the op says so. Either moves each logit once.

Vectors are of 16 bytes where V allows it: where it is no multiple of 8 (16-bit) or 4 (fp32), rows
start anywhere, and vectors are as short as V's power of two.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2, num_processors

PER_THREAD = 32
"""Elements of a block in each thread: 64 bytes of bf16 on their way, and fp32 copies of them fit into
64 registers with the rest, four programs to a processor (65536 registers over 64 x 8 x 32 threads).
Derived, not measured."""
MAX_WARPS = 8
PROGRAMS_PER_PROCESSOR = 8
"""Rows are split until there are so many programs: two rounds of what a processor runs at once, so
that the last round, when processors idle, is no more than half of the time."""
MAX_PARTS = 64
"""Parts of a row, at most: what a program of `_merge` holds of each row."""
ROWS_PER_MERGE = 32
VECTOR_BYTES = 16
CHECK_BLOCK = 1024

LOG2_E = tl.constexpr(1.4426950408889634)
# e^v is 2^(v log2(e)): one multiply-add and one instruction for 2^, where `tl.exp` takes six. So the
# maximum is subtracted after the multiplication, once it is rounded, and `_rounding` makes up for that.
FAR = tl.constexpr(1073741824.0)
"""Far from 0 (masks are often -1e10 or finfo.min) what rounding adds is more than an exponent holds, or the
product overflows. Values there are equal or so far apart that any exponential is 0: 2^v does for e^v."""


@triton.jit
def _slope(highest):
    """What values are multiplied with beside such a maximum."""
    return tl.where(tl.abs(highest) >= FAR, 1.0, LOG2_E)


@triton.jit
def _or_0(exponent):
    """The exponent of a maximum; 0 for -inf, from which no difference may be taken."""
    return tl.where(exponent == float("-inf"), 0.0, exponent)


@triton.jit
def _from(slope, exponent, to_slope, to_exponent):
    """What a sum is multiplied with; 0 where the slopes, and so the maxima, are far apart."""
    return tl.where(slope == to_slope, tl.exp2(exponent - to_exponent), 0.0)


@triton.jit
def _rounding(highest):
    """2^(what rounding added to highest slope): so much below e^(x - highest) is 2^ of the rounded."""
    slope = _slope(highest)
    return tl.exp2(tl.fma(_or_0(highest), -slope, _or_0(highest * slope)))


@triton.jit
def _part(
    x_V, first, last,
    WITH_SUM: tl.constexpr, U: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """-> largest x, sum e^(x - largest), sum x of the vectors first <= i < last of a row."""
    vectors_UL = tl.arange(0, U)[:, None] * L + tl.arange(0, L)[None, :]
    elements = tl.arange(0, VECTOR)[None, None, :]
    highest_L = tl.full([L], float("-inf"), tl.float32)
    exponent_L = tl.full([L], float("-inf"), tl.float32)
    sum_exp_L = tl.zeros([L], tl.float32)
    sum_L = tl.zeros([L], tl.float32)
    for start in range(first, last, U * L):
        at_UL = start + vectors_UL
        mask = (at_UL < last)[:, :, None]
        at = (at_UL * VECTOR)[:, :, None] + elements
        x = tl.load(x_V + at, mask=mask, other=float("-inf")).to(tl.float32)
        before_L = _slope(highest_L)
        highest_L = tl.maximum(highest_L, tl.max(tl.max(x, axis=2), axis=0))
        slope_L = _slope(highest_L)
        higher_L = highest_L * slope_L
        shift_L = _or_0(higher_L)
        exp = tl.exp2(tl.fma(x, slope_L[None, :, None], -shift_L[None, :, None]))
        sum_exp_L *= _from(before_L, exponent_L, slope_L, shift_L)
        sum_exp_L += tl.sum(tl.sum(exp, axis=2), axis=0)
        exponent_L = higher_L
        if WITH_SUM:
            sum_L += tl.sum(tl.sum(tl.where(mask, x, 0.0), axis=2), axis=0)
    highest = tl.max(highest_L, axis=0)
    slope, exponent = _slope(highest), _or_0(highest * _slope(highest))
    sum_exp = tl.sum(sum_exp_L * _from(_slope(highest_L), exponent_L, slope, exponent), axis=0)
    return highest, sum_exp * _rounding(highest), tl.sum(sum_L, axis=0)


@triton.jit
def _store_stats(
    x_TV, target_T, stats_KT, rows, valid, highest, sum_exp, sum_x,
    target_stride, num_rows, num_cols, vocab_start,
    WITH_SUM: tl.constexpr,
):  # fmt: skip
    token = tl.load(target_T + rows * target_stride, mask=valid, other=-1) - vocab_start
    is_here = (token >= 0) & (token < num_cols) & valid
    logit = tl.load(x_TV + rows * num_cols + token, mask=is_here, other=0.0).to(tl.float32)
    tl.store(stats_KT + rows, highest, mask=valid)
    tl.store(stats_KT + num_rows + rows, sum_exp, mask=valid)
    tl.store(stats_KT + 2 * num_rows + rows, tl.where(is_here, logit - highest, 0.0), mask=valid)
    if WITH_SUM:
        tl.store(stats_KT + 3 * num_rows + rows, sum_x - highest * num_cols, mask=valid)


@triton.jit(do_not_specialize=["vocab_start"])
def _stats(
    x_TV, target_T, stats_KT, target_stride, num_rows, num_vectors, vocab_start,
    WITH_SUM: tl.constexpr, U: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    x_V = x_TV + row * num_vectors * VECTOR
    highest, sum_exp, sum_x = _part(x_V, 0, num_vectors, WITH_SUM, U, L, VECTOR)
    _store_stats(
        x_TV, target_T, stats_KT, row, row < num_rows, highest, sum_exp, sum_x,
        target_stride, num_rows, num_vectors * VECTOR, vocab_start, WITH_SUM,
    )  # fmt: skip


@triton.jit
def _stats_of_parts(
    x_TV, parts_KPT, num_rows, num_parts, num_vectors, vectors_per_part,
    WITH_SUM: tl.constexpr, U: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program for each part of each row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * vectors_per_part
    last = tl.minimum(first + vectors_per_part, num_vectors)
    x_V = x_TV + row * num_vectors * VECTOR
    highest, sum_exp, sum_x = _part(x_V, first, last, WITH_SUM, U, L, VECTOR)
    at = parts_KPT + part * num_rows + row
    tl.store(at, highest)
    tl.store(at + num_parts * num_rows, sum_exp)
    if WITH_SUM:
        tl.store(at + 2 * num_parts * num_rows, sum_x)


@triton.jit(do_not_specialize=["vocab_start"])
def _merge(
    x_TV, target_T, parts_KPT, stats_KT, target_stride, num_rows, num_parts, num_cols, vocab_start,
    WITH_SUM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The stats of whole rows from those of their parts."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = rows < num_rows
    parts = tl.arange(0, BLOCK_P)
    mask = (parts < num_parts)[:, None] & valid[None, :]
    at = parts_KPT + parts[:, None] * num_rows + rows[None, :]
    plane = num_parts * num_rows
    highest_PT = tl.load(at, mask=mask, other=float("-inf"))
    sum_exp_PT = tl.load(at + plane, mask=mask, other=0.0)
    highest = tl.max(highest_PT, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    sum_exp = tl.sum(sum_exp_PT * tl.exp(highest_PT - shift[None, :]), axis=0)
    sum_x = highest
    if WITH_SUM:
        sum_x = tl.sum(tl.load(at + 2 * plane, mask=mask, other=0.0), axis=0)
    _store_stats(
        x_TV, target_T, stats_KT, rows, valid, highest, sum_exp, sum_x,
        target_stride, num_rows, num_cols, vocab_start, WITH_SUM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocab_start"])
def _backward(
    x_TV, target_T, stats_KT, dloss_T, dx_TV,
    target_stride, dloss_stride, num_rows, num_vectors, blocks_per_row, vocab_start,
    on_target, on_each_token,
    U: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One block of one row of dloss (softmax - on_target [column is the target] - on_each_token).

    dx may be x: what a program writes it alone has read.
    """
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    start = (program % blocks_per_row) * (U * L)
    at_UL = start + tl.arange(0, U)[:, None] * L + tl.arange(0, L)[None, :]
    mask = (at_UL < num_vectors)[:, :, None]
    cols = (at_UL * VECTOR)[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
    at = row * num_vectors * VECTOR + cols
    dloss = tl.load(dloss_T + row * dloss_stride)
    if dloss == 0.0:  # a masked token
        tl.store(dx_TV + at, tl.zeros([U, L, VECTOR], dx_TV.dtype.element_ty), mask=mask)
    else:
        x = tl.load(x_TV + at, mask=mask, other=0.0).to(tl.float32)
        highest = tl.load(stats_KT + row)
        slope = _slope(highest)
        scale = dloss / tl.load(stats_KT + num_rows + row) * _rounding(highest)
        token = tl.load(target_T + row * target_stride) - vocab_start
        is_here = (token >= 0) & (token < num_vectors * VECTOR)
        col = tl.where(is_here, token, -1).to(tl.int32)
        dx = tl.exp2(tl.fma(x, slope, -(highest * slope))) * scale - dloss * on_each_token
        dx = tl.where(cols == col, dx - dloss * on_target, dx)
        tl.store(dx_TV + at, dx.to(dx_TV.dtype.element_ty), mask=mask)


@triton.jit(debug=True, do_not_specialize=["ignore_index"])
def _check_targets(
    target_T, target_stride, num_rows, vocab_size, ignore_index,
    HAS_IGNORE_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(target_T + rows * target_stride, mask=rows < num_rows, other=0)
    bad = (token < 0) | (token >= vocab_size)
    if HAS_IGNORE_INDEX:
        bad = bad & (token != ignore_index)
    num_bad = tl.sum(bad.to(tl.int32), axis=0)
    tl.device_assert(num_bad == 0, "cross_entropy: a target is outside the vocabulary")


def _blocks(logits: Tensor) -> tuple[int, dict[str, int]]:
    """The vectors of a row, and how a block is cut into vectors and lanes."""
    num_cols = logits.shape[-1]
    vector = min(VECTOR_BYTES // logits.element_size(), num_cols & -num_cols)
    lanes = min(32 * MAX_WARPS, max(32, next_power_of_2(ceil_div(num_cols, PER_THREAD))))
    num_warps = lanes // 32
    blocks = {"U": PER_THREAD // vector, "L": lanes, "VECTOR": vector, "num_warps": num_warps}
    return num_cols // vector, blocks


def stats(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int | None,
    with_sum: bool,
) -> Tensor:
    """`accel::cross_entropy_stats`; a target outside the vocabulary is a device-side assertion."""
    _check_logits(logits, target)
    logits, target = logits.contiguous(), target.reshape(-1)
    stats_KT = logits.new_empty((4 if with_sum else 3, *logits.shape[:-1]), dtype=torch.float32)
    num_rows, num_cols = len(target), logits.shape[-1]
    if num_rows == 0:
        return stats_KT
    if vocab_size > 0:
        launch(
            _check_targets, (ceil_div(num_rows, CHECK_BLOCK),),
            target, target.stride(0), num_rows, vocab_size, ignore_index or 0,
            HAS_IGNORE_INDEX=ignore_index is not None, BLOCK=CHECK_BLOCK,
        )  # fmt: skip
    num_vectors, blocks = _blocks(logits)
    num_blocks = ceil_div(num_vectors, blocks["U"] * blocks["L"])
    wanted = ceil_div(PROGRAMS_PER_PROCESSOR * num_processors(logits.device), num_rows)
    blocks_per_part = ceil_div(num_blocks, min(wanted, num_blocks, MAX_PARTS))
    num_parts = ceil_div(num_blocks, blocks_per_part)
    if num_parts == 1:
        launch(
            _stats, (num_rows,),
            logits, target, stats_KT, target.stride(0), num_rows, num_vectors, vocab_start,
            WITH_SUM=with_sum, **blocks,
        )  # fmt: skip
        return stats_KT
    parts_KPT = logits.new_empty((3 if with_sum else 2, num_parts, num_rows), dtype=torch.float32)
    launch(
        _stats_of_parts, (num_rows, num_parts),
        logits, parts_KPT, num_rows, num_parts, num_vectors,
        blocks_per_part * blocks["U"] * blocks["L"], WITH_SUM=with_sum, **blocks,
    )  # fmt: skip
    launch(
        _merge, (ceil_div(num_rows, ROWS_PER_MERGE),),
        logits, target, parts_KPT, stats_KT,
        target.stride(0), num_rows, num_parts, num_cols, vocab_start,
        WITH_SUM=with_sum, BLOCK_P=next_power_of_2(num_parts), BLOCK_T=ROWS_PER_MERGE,
    )  # fmt: skip
    return stats_KT


def _backward_into(
    dlogits: Tensor,
    logits: Tensor,
    target: Tensor,
    stats_KT: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> None:
    """`dlogits` and `logits` are contiguous and may be the same."""
    _check_logits(logits, target)
    _check_saved(target, stats_KT, dloss, vocab_size)
    target, dloss = target.reshape(-1), dloss.reshape(-1)
    num_vectors, blocks = _blocks(logits)
    blocks_per_row = ceil_div(num_vectors, blocks["U"] * blocks["L"])
    launch(
        _backward, (len(target) * blocks_per_row,),
        logits, target, stats_KT, dloss, dlogits,
        target.stride(0), dloss.stride(0), len(target), num_vectors, blocks_per_row, vocab_start,
        1.0 - smoothing, smoothing / vocab_size, **blocks,
    )  # fmt: skip


def backward(
    logits: Tensor,
    target: Tensor,
    stats_KT: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> Tensor:
    """`accel::cross_entropy_bwd`."""
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    _backward_into(dlogits, logits, target, stats_KT, dloss, vocab_start, vocab_size, smoothing)
    return dlogits


def backward_inplace(
    logits: Tensor,
    target: Tensor,
    stats_KT: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> None:
    """`accel::cross_entropy_bwd_`."""
    if not logits.is_contiguous():
        raise ValueError(
            "cross_entropy backward in place: logits must be contiguous, got strides "
            f"{logits.stride()}"
        )
    _backward_into(logits, logits, target, stats_KT, dloss, vocab_start, vocab_size, smoothing)


def _check_logits(logits: Tensor, target: Tensor) -> None:
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits must have shape [..., V] with V >= 1, got {list(logits.shape)}"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"cross_entropy: target must be int64, got {target.dtype}")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: target must have the shape of logits {list(logits.shape)} without its "
            f"last dimension, got {list(target.shape)}"
        )


def _check_saved(target: Tensor, stats_KT: Tensor, dloss: Tensor, vocab_size: int) -> None:
    is_stats = stats_KT.ndim == target.ndim + 1 and stats_KT.shape[1:] == target.shape
    if not (
        is_stats
        and len(stats_KT) >= 2
        and stats_KT.is_contiguous()
        and stats_KT.dtype == torch.float32
    ):
        raise ValueError(
            "cross_entropy backward: needs the contiguous fp32 stats of the forward, got "
            f"{stats_KT.dtype} {list(stats_KT.shape)}"
        )
    if dloss.shape != target.shape or dloss.dtype != torch.float32:
        raise ValueError(
            f"cross_entropy backward: dloss must be float32 {list(target.shape)} like the loss, got "
            f"{dloss.dtype} {list(dloss.shape)}"
        )
    if vocab_size < 1:
        raise ValueError(f"cross_entropy backward: vocab_size must be >= 1, got {vocab_size}")


KERNELS = {
    "accel::cross_entropy_stats": stats,
    "accel::cross_entropy_bwd": backward,
    "accel::cross_entropy_bwd_": backward_inplace,
}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Llama's and DeepSeek's vocabularies, one of 16 ranks' shard, few rows, smoothing, and an odd V."""
    for num_rows, num_cols, dtype, with_sum in (
        (8192, 131072, torch.bfloat16, False),
        (8192, 131072, torch.bfloat16, True),
        (64, 129280, torch.bfloat16, True),
        (4096, 8080, torch.bfloat16, False),
        (8192, 50257, torch.bfloat16, False),
        (8192, 128256, torch.float32, False),
    ):
        logits = torch.empty(num_rows, num_cols, dtype=dtype, device="meta")
        target = torch.empty(num_rows, dtype=torch.int64, device="meta")
        saved = torch.empty(4, num_rows, device="meta")
        smoothing = 0.1 if with_sum else 0.0
        case = f"T={num_rows} V={num_cols} {str(dtype)[6:]}{' smooth' if with_sum else ''}"
        yield case, stats, (logits, target, 0, num_cols, -100, with_sum)
        arguments = (logits, target, saved, saved[0], 0, num_cols, smoothing)
        yield case, backward_inplace, arguments
