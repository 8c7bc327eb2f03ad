"""The norm of many tensors, and many tensors times a number: see `accel/ops/multi_tensor.py`.

Each is one launch over the chunks of all tensors, which `chunk_table` describes (two, where some
tensors are not aligned), and one more to add up the norm: each chunk leaves a sum of squares, and one
program adds those. Sums are fp32 over the PER_THREAD squares of a block in a thread, fp64 over those.
Their order is that of the chunks, which the shapes fix, and where only some tensors are aligned, which
those are. Nothing is read back by the host.

Whole blocks are read and written without a mask, 16 bytes at a time, even where a tensor's size is
odd; what is left of a tensor goes element by element.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.chunk_table import (
    TRITON_DTYPES,
    ChunkTable,
    chunk_tables,
    find_chunk,
    list_pointer,
)
from accel._triton.launch import ceil_div, launch, next_power_of_2, num_processors

PER_THREAD = 32
"""Elements of a block in each thread: 64 bytes of bf16 on their way."""
NUM_WARPS = 8
BLOCK = 32 * NUM_WARPS * PER_THREAD
MAX_CHUNK = 16 * BLOCK
"""Elements of a program, at most: 256 KiB of bf16, some 40 us of its share of the memory. Larger ones
would only make a smaller table."""
PROGRAMS_PER_PROCESSOR = 16
"""Chunks are smaller than that until there are so many: four rounds of what a processor runs at once."""
NORM_BLOCK = 2048
VECTOR_BYTES = 16


@triton.jit
def _sum_of_squares(x):
    """[U, L, VECTOR] -> [L] in fp64: what one thread has is added up in fp32."""
    x = x.to(tl.float32)
    return tl.sum(tl.sum(x * x, axis=2), axis=0).to(tl.float64)


@triton.jit(do_not_specialize=["num_chunks"])
def _squares(
    words, sums_C, num_chunks,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    U: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The sum of the squares of one chunk."""
    row, start, end = find_chunk(words, num_chunks, 1, CHUNK)
    x_N = list_pointer(row, 0, DTYPE, ALIGNED)
    vectors_UL = tl.arange(0, U)[:, None] * L + tl.arange(0, L)[None, :]
    within = (vectors_UL * VECTOR)[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
    sum_L = tl.zeros([L], tl.float64)
    left = (end - start).to(tl.int32)
    for first in range(0, left - left % (U * L * VECTOR), U * L * VECTOR):
        sum_L += _sum_of_squares(tl.load(x_N + start + first + within))
    rest = left % (U * L * VECTOR)
    if rest > 0:
        x = tl.load(x_N + (end - rest) + within, mask=within < rest, other=0.0)
        sum_L += _sum_of_squares(x)
    tl.store(sums_C + tl.program_id(0), tl.sum(sum_L, axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def _norm(sums_C, norm, num_chunks, BLOCK: tl.constexpr):
    """The root of the sum of all chunks' sums; one program."""
    chunks = tl.arange(0, BLOCK)
    sum_B = tl.zeros([BLOCK], tl.float64)
    for first in range(0, num_chunks, BLOCK):
        at = first + chunks
        sum_B += tl.load(sums_C + at, mask=at < num_chunks, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(sum_B, axis=0)).to(tl.float32))


@triton.jit(do_not_specialize=["num_chunks"])
def _scale(
    words, num_chunks, factor,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    U: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """target = source factor for one chunk."""
    row, start, end = find_chunk(words, num_chunks, 2, CHUNK)
    source_N = list_pointer(row, 0, SOURCE, ALIGNED)
    target_N = list_pointer(row, 1, TARGET, ALIGNED)
    vectors_UL = tl.arange(0, U)[:, None] * L + tl.arange(0, L)[None, :]
    within = (vectors_UL * VECTOR)[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
    left = (end - start).to(tl.int32)
    for first in range(0, left - left % (U * L * VECTOR), U * L * VECTOR):
        x = tl.load(source_N + start + first + within).to(tl.float32)
        tl.store(target_N + start + first + within, (x * factor).to(TARGET))
    rest = left % (U * L * VECTOR)
    if rest > 0:
        at, mask = end - rest, within < rest
        x = tl.load(source_N + at + within, mask=mask, other=0.0).to(tl.float32)
        tl.store(target_N + at + within, (x * factor).to(TARGET), mask=mask)


def _chunk(tensors: Sequence[Tensor]) -> int:
    """Elements of a chunk: a power of two of blocks, at most MAX_CHUNK."""
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(tensors[0].device)
    blocks = ceil_div(sum([t.numel() for t in tensors]), wanted * BLOCK)
    return min(MAX_CHUNK, BLOCK * next_power_of_2(blocks))


def _blocks(table: ChunkTable, chunk: int, *dtypes: torch.dtype) -> dict[str, int | bool]:
    """What every launch over chunks is told. Vectors are of 16 bytes of the wider dtype."""
    vector = VECTOR_BYTES // max([dtype.itemsize for dtype in dtypes])
    lanes = 32 * NUM_WARPS
    shape = {"U": BLOCK // (lanes * vector), "L": lanes, "VECTOR": vector, "num_warps": NUM_WARPS}
    return {"ALIGNED": table.is_aligned, "CHUNK": chunk, **shape}


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """`accel::l2_norm`."""
    if not tensors:
        return torch.tensor(0.0)
    _check_list("l2_norm", "tensors", tensors, tensors)
    dtype, chunk = tensors[0].dtype, _chunk(tensors)
    tables = chunk_tables([tensors], chunk)
    num_chunks = sum(table.num_chunks for table in tables)
    if num_chunks == 0:
        return tensors[0].new_zeros((), dtype=torch.float32)
    sums_C = tensors[0].new_empty(num_chunks, dtype=torch.float64)
    first = 0
    for table in tables:
        launch(
            _squares, (table.num_chunks,),
            table.words, sums_C[first:], table.num_chunks,
            DTYPE=TRITON_DTYPES[dtype], **_blocks(table, chunk, dtype),
        )  # fmt: skip
        first += table.num_chunks
    norm = tensors[0].new_empty((), dtype=torch.float32)
    launch(_norm, (1,), sums_C, norm, num_chunks, BLOCK=NORM_BLOCK, num_warps=NUM_WARPS)
    return norm


def scale(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float) -> None:
    """`accel::scale_`."""
    if not sources and not targets:
        return
    _check_list("scale", "sources", sources, sources)
    _check_list("scale", "targets", targets, sources)
    source, target, chunk = sources[0].dtype, targets[0].dtype, _chunk(sources)
    for table in chunk_tables([sources, targets], chunk):
        launch(
            _scale, (table.num_chunks,),
            table.words, table.num_chunks, factor,
            SOURCE=TRITON_DTYPES[source], TARGET=TRITON_DTYPES[target],
            **_blocks(table, chunk, source, target),
        )  # fmt: skip
    torch.autograd.graph.increment_version(targets)


def _check_list(op: str, name: str, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """The kernels see memory, not shapes: each tensor must be as long as its neighbour in `like`."""
    if len(tensors) != len(like):
        raise ValueError(
            f"{op}: needs one of {name} for each source, {len(like)}, got {len(tensors)}"
        )
    dtype, device = tensors[0].dtype, like[0].device
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}")
    for i, (t, other) in enumerate(zip(tensors, like, strict=True)):
        if (
            t.dtype != dtype
            or t.device != device
            or t.shape != other.shape
            or not t.is_contiguous()
        ):
            raise ValueError(
                f"{op}: {name}[{i}] must be contiguous, {dtype}, on {device} and of shape "
                f"{list(other.shape)}, got {t.dtype} on {t.device}, shape {list(t.shape)}, strides "
                f"{t.stride()}"
            )


KERNELS = {"accel::l2_norm": l2_norm, "accel::scale_": scale}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """The gradients of a model's shard; smaller ones, whose chunks are smaller."""
    for num_tensors, dtype in ((256, torch.float32), (256, torch.bfloat16), (3, torch.float32)):
        tensors = [torch.empty(4096, 4096, dtype=dtype, device="meta")] * num_tensors
        targets = [t.float() for t in tensors]
        name = f"{num_tensors} of 2^24 {str(dtype)[6:]}"
        yield name, l2_norm, (tensors,)
        yield name, scale, (tensors, targets, 0.5)
    halves = [t.bfloat16() for t in targets]
    yield "fp32 to bf16", scale, (targets, halves, 0.5)
