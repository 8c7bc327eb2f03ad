"""What the norms share: blocks of rows, the [N] vectors on their way in, their gradients' way out.

Letters as in `accel/ops/rms_norm.py`: T rows, N columns; and P programs, each of which sums the
gradients of the vectors over its run of rows, in fp32. `sum_partials` adds these up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2, num_processors

__all__ = ["LONG_ROWS_BLOCK", "backward_blocks", "blocks", "load_scale", "load_vector", "runs",
           "sum_partials"]  # fmt: skip

TILE = 4096
"""Elements of the tile of rows that a program takes at a time, where rows are shorter: 32 in each of 4 x 32
threads, four loads of 16 bytes from each 16-bit tensor. Derived, not measured."""
LONG_ROWS_BLOCK = 4096
"""Elements at a time of rows that do not fit into registers, backward."""
BYTES_UNDER_WAY = 64 << 10
"""Of tiles that the backward fetches into shared memory while it works at another. A processor of an
H200 must have some 30 KiB on the way to use all of its memory's bandwidth, and one program runs on
each; a block of an A100, the smallest, has 163 KiB."""
PARTIALS_BLOCK_P = 64
PARTIALS_BLOCK_N = 32
"""A line of the cache in fp32, and enough programs for every processor at N = 4096."""


@triton.jit
def load_vector(vector_N, cols, num_cols):
    return tl.load(vector_N + cols, mask=cols < num_cols, other=0.0).to(tl.float32)


@triton.jit
def load_scale(weight_N, cols, num_cols, ZERO_CENTERED: tl.constexpr):
    s = load_vector(weight_N, cols, num_cols)
    return s + 1.0 if ZERO_CENTERED else s


@triton.jit
def _sum_partials(
    partials_PKN, grad_N, grad_2_N, num_partials, num_cols,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first vector's gradient by programs (i, 0), the second's by programs (i, 1)."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    vector = tl.program_id(1)
    valid = cols < num_cols
    stride = tl.cast(num_cols, tl.int64) * tl.num_programs(1)
    sums = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, num_partials, BLOCK_P):
        partials = start + tl.arange(0, BLOCK_P)
        at = partials[:, None] * stride + vector * num_cols + cols[None, :]
        mask = (partials < num_partials)[:, None] & valid[None, :]
        sums += tl.load(partials_PKN + at, mask=mask, other=0.0)
    grad = tl.sum(sums, axis=0).to(grad_N.dtype.element_ty)
    if grad_2_N is None:
        tl.store(grad_N + cols, grad, mask=valid)
    else:
        tl.store(grad_N + cols, grad, mask=valid & (vector == 0))
        tl.store(grad_2_N + cols, grad, mask=valid & (vector == 1))


def sum_partials(partials_PKN: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The K gradients, one or two, each [N] of the dtype: sums over P, in one launch."""
    num_partials, num_vectors, num_cols = partials_PKN.shape
    grads = tuple(partials_PKN.new_empty(num_cols, dtype=dtype) for _ in range(num_vectors))
    launch(
        _sum_partials, (ceil_div(num_cols, PARTIALS_BLOCK_N), num_vectors),
        partials_PKN, grads[0], grads[1] if num_vectors == 2 else None, num_partials, num_cols,
        BLOCK_P=PARTIALS_BLOCK_P, BLOCK_N=PARTIALS_BLOCK_N, num_warps=4,
    )  # fmt: skip
    return grads


def blocks(num_cols: int, max_block: int, per_thread: int) -> dict[str, int]:
    """Rows and columns at a time, and warps, so that a thread holds about so many elements."""
    block_n = min(next_power_of_2(num_cols), max_block)
    block_t = max(1, TILE // block_n)
    num_warps = min(16, max(4, block_t * block_n // (32 * per_thread)))
    return {"BLOCK_T": block_t, "BLOCK_N": block_n, "num_warps": num_warps}


def backward_blocks(
    num_cols: int, max_block: int, element_size: int, num_tensors: int
) -> dict[str, int]:
    """`blocks` and the stages: one tile at work, and one or two of so many tensors under way."""
    sizes = blocks(num_cols, max_block, per_thread=16)
    tile_bytes = sizes["BLOCK_T"] * sizes["BLOCK_N"] * element_size * num_tensors
    return sizes | {"STAGES": 3 if 2 * tile_bytes <= BYTES_UNDER_WAY else 2}


def runs(num_rows: int, block_t: int, device: torch.device) -> tuple[int, int]:
    """Programs of a backward, at most one for each processor, and rows of each: whole tiles."""
    rows = ceil_div(ceil_div(num_rows, num_processors(device)), block_t) * block_t
    return ceil_div(num_rows, rows), rows
