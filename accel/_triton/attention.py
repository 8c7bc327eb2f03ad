"""Attention in Triton: see `accel/ops/attention.py` for the formulas, masks and layouts.

FlashAttention-2 (Dao 2023). A program of the forward, or of the gradient of q, holds a block of queries
of one head and walks over the keys that they see; one of the gradients of k and v holds a block of
keys and walks over the queries that see them, in every head of its group in turn, so that all sums
have one order. Blocks of which all is seen are not masked, but for those of a window with a left side:
a third loop would take the registers of the other two.

Rows whose width D is no power of two are two operands, say 128 and 64 columns for 192, rather than
one of 256 that is a quarter air. p and ds are rounded to the dtype of the inputs to be multiplied.

Packs: a program counts the blocks of each sequence to find its own, so that the host need not know
the lengths. The grid is what the shapes allow at most; what finds nothing returns. Tokens after the
last sequence are one more, of no keys. The values of cu_seqlens are not checked, which would wait for
the device, but cut to the tensors: no wrong one leaves them.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2, num_processors

IS_NEWER = Version(triton.__version__) >= Version("3.8")
"""Its ptxas spills more, and in one kernel has to be told how many registers it may take."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LN_2 = tl.constexpr(0.6931471805599453)
SEQUENCES_AT_ONCE = tl.constexpr(128)
"""Of a pack, whose blocks are counted together: one for each thread of 4 warps."""

BYTES_IN_CACHE = 24 << 20
"""Keys and values of the heads that run beside each other: half of the L2 of an H100 (50 MB)."""
SHARED_LIMIT = 163 << 10
"""Bytes of shared memory that a block of threads has on an A100; what `compile_table` assumes."""
DELTA_ROWS = 32
"""Queries of a program that computes delta: 16 KiB of rows in flight."""
QUERIES_DRAWN = 64
"""Random bits come for so many queries at once: with dropout, a block has a multiple of it, or `SMALLEST`."""
SMALLEST = 16
"""Queries or keys of the least block: what a product takes, and what one word of dropout's four serves."""
NO_LIMIT = -1

# They change from batch to batch: no variant of a kernel for each value.
VARYING = ["num_queries", "num_keys", "num_sequences", "num_blocks", "heads_at_once", "threshold"]


@triton.jit
def _dot(a, b, total=None):
    if INTERPRETED:  # its product of bf16 is one of their bits
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _blocks_before(starts, tokens, num_sequences, block, BLOCK: tl.constexpr):
    """The sequence of a pack that has this block of `BLOCK` tokens, and the blocks before it.

    `num_sequences` stands for the tokens after the last, and `num_sequences + 1` for no such block.
    """
    sequence = 0
    before = 0
    total = 0
    for first in range(0, num_sequences + 1, SEQUENCES_AT_ONCE):
        i = first + tl.arange(0, SEQUENCES_AT_ONCE)
        begin = tl.load(starts + i, mask=i <= num_sequences, other=tokens).to(tl.int32)
        end = tl.load(starts + i + 1, mask=i < num_sequences, other=tokens).to(tl.int32)
        begin = tl.minimum(tl.maximum(begin, 0), tokens)
        end = tl.minimum(tl.maximum(end, begin), tokens)
        blocks = (end - begin + BLOCK - 1) // BLOCK
        ends = total + tl.cumsum(blocks, 0)
        passed = (ends <= block) & (i <= num_sequences)
        sequence += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        total += tl.sum(blocks, 0)
    return sequence, before


@triton.jit
def _extent(starts, tokens, num_sequences, sequence):
    """Where a sequence of a pack begins and how long it is."""
    inside = sequence < num_sequences
    begin = tl.load(starts + tl.minimum(sequence, num_sequences)).to(tl.int32)
    end = tl.load(starts + tl.minimum(sequence + 1, num_sequences)).to(tl.int32)
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    end = tl.where(inside, tl.minimum(tl.maximum(end, begin), tokens), tokens)
    return begin, end - begin


@triton.jit
def _load(
    base, rows, stride, num_rows, columns, width,
    MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """[rows, columns] of a matrix whose rows are contiguous; 0 outside of it."""
    at = base + rows[:, None] * stride + columns[None, :]
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(at, mask=(rows < num_rows)[:, None] & (columns < width)[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(at, mask=(rows < num_rows)[:, None], other=0.0)
    elif MASK_COLUMNS:
        return tl.load(at, mask=(columns < width)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _store(base, rows, stride, num_rows, columns, width, x):
    at = base + rows[:, None] * stride + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _visible(queries, keys, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether a query sees a key, of those that are there; at least one side is limited."""
    if HAS_LEFT and HAS_RIGHT:
        return (keys <= queries + (shift + right)) & (keys >= queries + (shift - left))
    elif HAS_LEFT:
        return keys >= queries + (shift - left)
    else:
        return keys <= queries + (shift + right)


@triton.jit
def _keep(
    seed, places, first_query, first_key, head, sequence, threshold, keep_scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What dropout multiplies [BLOCK_Q, BLOCK_K] with: `dropout_mask_ref`. BLOCK_Q is 16 or a multiple of 64.

    One counter gives the words of 4 queries, 16 apart. A block of 16 keeps one of them.
    """
    first_sequence, first_head, query_place, key_place = places
    first = query_place + first_query
    if BLOCK_Q == 16:
        r = first // 64 * 16 + tl.arange(0, 16)
    else:
        r = first // 4 + tl.arange(0, BLOCK_Q // 4)
    c0 = (key_place + first_key + tl.arange(0, BLOCK_K)).to(tl.uint32)[None, :]
    c1 = r.to(tl.uint32)[:, None]
    c0, c1 = tl.broadcast(c0, c1)
    zero = c0 * 0
    c2 = zero + (first_head + head).to(tl.uint32)
    c3 = zero + (first_sequence + sequence).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    if BLOCK_Q == 16:
        w = first // 16 % 4
        words = tl.where(w < 2, tl.where(w == 0, w0, w1), tl.where(w == 2, w2, w3))
    else:
        words = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [16 g + r, key, w % 2, w // 2]
        words = tl.reshape(words, [BLOCK_Q // 64, 16, BLOCK_K, 2, 2])
        words = tl.reshape(tl.permute(words, [0, 4, 3, 1, 2]), [BLOCK_Q, BLOCK_K])
    return tl.where(words >= threshold.to(tl.uint32), keep_scale, 0.0)


@triton.jit
def _seed(seed, sequence, num_sequences, seed_stride, HAS_PLACES: tl.constexpr):
    """The seed of a sequence, and the places of the first sequence, head, query and key."""
    at = seed + tl.minimum(sequence, tl.maximum(num_sequences - 1, 0)) * seed_stride
    zero = tl.full([], 0, tl.int64)
    if HAS_PLACES:
        places = (tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4))
    else:
        places = (zero, zero, zero, zero)
    return tl.load(at), places


@triton.jit
def _head_and_block(num_heads, num_blocks, heads_at_once, LAST_FIRST: tl.constexpr):
    """(head, block) of this program: all blocks of some heads, whose keys stay in L2, then the next.

    Blocks with the most work go first, so that what is left at the end is short.
    """
    program = tl.program_id(0)
    first_head = program // (heads_at_once * num_blocks) * heads_at_once
    heads = tl.minimum(heads_at_once, num_heads - first_head)
    rest = program - first_head * num_blocks
    block = rest // heads
    return first_head + rest % heads, num_blocks - 1 - block if LAST_FIRST else block


@triton.jit
def _attend(
    acc, row_max, row_sum, q1, q2, k, v, first_key, last_key, num_keys, queries, shift,
    stride_k, stride_v, scale, left, right, seed, places, head, sequence, first_query, threshold, keep_scale,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys from `first_key`, a multiple of BLOCK_K, to `last_key`."""
    rows = tl.arange(0, BLOCK_K).to(INDEX)
    for start in tl.range(first_key, last_key, BLOCK_K):
        first = tl.cast(start, tl.int64)
        k_block = k + first * stride_k
        rest = num_keys - start
        k1 = _load(k_block, rows, stride_k, rest, tl.arange(0, D1), D, MASKED, D1 > D)
        s = _dot(q1, tl.trans(k1))
        if D2:
            k2 = _load(k_block, rows, stride_k, rest, D1 + tl.arange(0, D2), D, MASKED, D1 + D2 > D)
            s = _dot(q2, tl.trans(k2), s)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_K)
            seen = (keys < num_keys)[None, :]
            if HAS_LEFT or HAS_RIGHT:
                seen = seen & _visible(
                    queries[:, None], keys[None, :], shift, left, right, HAS_LEFT, HAS_RIGHT
                )
            s = tl.where(seen, s, float("-inf"))
        row_max_new = tl.maximum(row_max, tl.max(s, 1) * scale)
        lowered = row_max_new
        if MASKED:
            lowered = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)
        p = tl.exp2(s * scale - lowered[:, None])
        rescale = tl.exp2(row_max - lowered)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        row_max = row_max_new
        if DROPOUT:
            p *= _keep(
                seed, places, first_query, start, head, sequence, threshold, keep_scale, BLOCK_Q, BLOCK_K
            )  # fmt: skip
        columns = tl.arange(0, BLOCK_E)
        v1 = _load(v + first * stride_v, rows, stride_v, rest, columns, E, MASKED, BLOCK_E > E)
        acc = _dot(p.to(v1.dtype), v1, acc)
    return acc, row_max, row_sum


@triton.jit
def _keys_seen(
    first_query, num_queries, num_keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Where the keys that a block of queries sees are masked from, a multiple of BLOCK_K, and where they end.

    Without a left side, all see those before.
    """
    same = first_query + num_keys - num_queries
    last_same = tl.minimum(first_query + BLOCK_Q, num_queries) - 1 + num_keys - num_queries
    end = num_keys
    masked_from = num_keys
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(num_keys, last_same + right + 1), 0)
        masked_from = tl.maximum(tl.minimum(num_keys, same + right + 1), 0)
    if HAS_LEFT:
        masked_from = tl.maximum(same - left, 0)
    return masked_from // BLOCK_K * BLOCK_K, end


@triton.jit(do_not_specialize=VARYING)
def _forward(
    q, k, v, out, lse, starts_q, starts_k, seed,
    stride_qt, stride_qb, stride_qh, stride_kt, stride_kb, stride_kh, stride_vt, stride_vb, stride_vh,
    batch, num_heads, group, num_queries, num_keys, num_sequences, num_blocks, heads_at_once,
    scale, left, right, seed_stride, threshold, keep_scale,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_PLACES: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """out and lse of one block of queries. `scale` is times log2(e). RAGGED: BLOCK_K may divide no K."""
    index, block = _head_and_block(batch * num_heads, num_blocks, heads_at_once, True)
    sequence, head = index // num_heads, index % num_heads
    tokens = num_queries
    lse += index.to(tl.int64) * tokens
    b = sequence.to(tl.int64)
    first_row = 0
    first_row_k = 0
    if PACKED:
        all_keys = num_keys
        sequence, before = _blocks_before(starts_q, tokens, num_sequences, block, BLOCK_Q)
        if sequence > num_sequences:
            return
        block -= before
        first_row, num_queries = _extent(starts_q, tokens, num_sequences, sequence)
        first_row_k, num_keys = _extent(starts_k, all_keys, num_sequences, sequence)
        num_keys = tl.where(sequence < num_sequences, num_keys, 0)
    first_query = block * BLOCK_Q
    head_k = head // group
    row, row_k = tl.cast(first_row + first_query, tl.int64), tl.cast(first_row_k, tl.int64)
    q += row * stride_qt + b * stride_qb + head.to(tl.int64) * stride_qh
    k += row_k * stride_kt + b * stride_kb + head_k.to(tl.int64) * stride_kh
    v += row_k * stride_vt + b * stride_vb + head_k.to(tl.int64) * stride_vh
    rows = tl.arange(0, BLOCK_Q)
    wide = rows.to(INDEX)
    rest = num_queries - first_query
    q1 = _load(q, wide, stride_qt, rest, tl.arange(0, D1), D, True, D1 > D)
    q2 = q1
    if D2:
        q2 = _load(q, wide, stride_qt, rest, D1 + tl.arange(0, D2), D, True, D1 + D2 > D)
    number, places = 0, (0, 0, 0, 0)
    if DROPOUT:
        number, places = _seed(seed, sequence, num_sequences, seed_stride, HAS_PLACES)

    shift = num_keys - num_queries
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    masked_from, end = _keys_seen(
        first_query, num_queries, num_keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_Q, BLOCK_K
    )
    if not HAS_LEFT:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q1, q2, k, v, 0, masked_from, num_keys, first_query + rows, shift,
            stride_kt, stride_vt, scale, left, right, number, places, head, sequence, first_query,
            threshold, keep_scale, False, HAS_LEFT, HAS_RIGHT, DROPOUT, D, D1, D2, E, BLOCK_E, BLOCK_Q,
            BLOCK_K, INDEX,
        )  # fmt: skip
    if HAS_LEFT or HAS_RIGHT or RAGGED:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q1, q2, k, v, masked_from, end, num_keys, first_query + rows, shift,
            stride_kt, stride_vt, scale, left, right, number, places, head, sequence, first_query,
            threshold, keep_scale, True, HAS_LEFT, HAS_RIGHT, DROPOUT, D, D1, D2, E, BLOCK_E, BLOCK_Q,
            BLOCK_K, INDEX,
        )  # fmt: skip
    blind = row_sum == 0.0
    acc = acc * tl.where(blind, 0.0, 1.0 / row_sum)[:, None]
    stride_out = num_heads * batch * E
    out += row * stride_out + index.to(tl.int64) * E
    _store(out, wide, stride_out, rest, tl.arange(0, BLOCK_E), E, acc)
    result = tl.where(blind, float("-inf"), row_max * LN_2 + tl.log(row_sum))
    tl.store(lse + row + rows, result, mask=rows < rest)


@triton.jit
def _delta(
    dout, out, lse, offset, delta, stride_dt, stride_db, stride_dh, stride_ot, stride_ob, stride_oh,
    num_blocks, num_heads, tokens, scale, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Minus delta [B, H, Q], the products of rows of dout and out, and the offset of scores, -lse / scale.

    Both are what products of matrices start from, rather than 0: p = e^(scale (offset + q k)). Where a
    query sees no key, the offset is minus infinity and p is 0.
    """
    program = tl.program_id(0).to(tl.int64)  # of up to 2^31; the second of a grid ends at 65535
    index, block = program // num_blocks, program % num_blocks
    sequence, head = index // num_heads, index % num_heads
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_E)
    dout += sequence * stride_db + head * stride_dh
    out += sequence * stride_ob + head * stride_oh
    a = _load(dout, rows, stride_dt, tokens, columns, E, True, BLOCK_E > E).to(tl.float32)
    b = _load(out, rows, stride_ot, tokens, columns, E, True, BLOCK_E > E).to(tl.float32)
    at = index * tokens + rows
    tl.store(delta + at, -tl.sum(a * b, 1), mask=rows < tokens)
    x = tl.load(lse + at, mask=rows < tokens, other=0.0)
    tl.store(offset + at, tl.where(x == float("-inf"), x, -x / scale), mask=rows < tokens)


@triton.jit
def _statistics(offset, delta, rows, num_rows, MASK_ROWS: tl.constexpr):
    """offset and minus delta of some queries; those that are not there get p = 0."""
    if MASK_ROWS:
        return (
            tl.load(offset + rows, mask=rows < num_rows, other=float("-inf")),
            tl.load(delta + rows, mask=rows < num_rows, other=0.0),
        )
    else:
        return tl.load(offset + rows), tl.load(delta + rows)


@triton.jit
def _gradients_of_keys(
    dk1, dk2, dv, q, dout, offset, delta, k1, k2, v1, first_row, last_row, first_head, num_heads, tokens,
    num_queries, keys, shift, stride_q, stride_qh, stride_dout, stride_dh,
    scale, left, right, seed, places, sequence, first_key, threshold, keep_scale,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `first_row`, a multiple of BLOCK_Q, to `last_row` of some heads give.

    One loop over heads and blocks, so that loads run ahead from one head into the next.
    """
    rows = tl.arange(0, BLOCK_Q).to(INDEX)
    blocks = tl.maximum(last_row - first_row + BLOCK_Q - 1, 0) // BLOCK_Q
    for i in tl.range(0, num_heads * blocks):
        head = first_head + i // blocks
        start = first_row + i % blocks * BLOCK_Q
        h, first = tl.cast(head, tl.int64), tl.cast(start, tl.int64)
        rest = num_queries - start
        q_block = q + h * stride_qh + first * stride_q
        statistics = h * tokens + first
        q1 = _load(q_block, rows, stride_q, rest, tl.arange(0, D1), D, RAGGED, D1 > D)
        offset_1, delta_1 = _statistics(
            offset + statistics, delta + statistics, tl.arange(0, BLOCK_Q), rest, RAGGED
        )
        s = tl.broadcast_to(offset_1[None, :], [BLOCK_K, BLOCK_Q])
        s = _dot(k1, tl.trans(q1), s)  # [keys, queries]
        if D2:
            q2 = _load(q_block, rows, stride_q, rest, D1 + tl.arange(0, D2), D, RAGGED, D1 + D2 > D)
            s = _dot(k2, tl.trans(q2), s)
        if MASKED:
            queries = start + tl.arange(0, BLOCK_Q)
            seen = _visible(
                queries[None, :], keys[:, None], shift, left, right, HAS_LEFT, HAS_RIGHT
            )
            s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s * scale)
        columns = tl.arange(0, BLOCK_E)
        dout_block = dout + h * stride_dh + first * stride_dout
        dout1 = _load(dout_block, rows, stride_dout, rest, columns, E, RAGGED, BLOCK_E > E)
        used = p
        if DROPOUT:
            keep = tl.trans(_keep(
                seed, places, start, first_key, head, sequence, threshold, keep_scale, BLOCK_Q, BLOCK_K
            ))  # fmt: skip
            used = p * keep
        dv = _dot(used.to(dout1.dtype), dout1, dv)
        minus_delta = tl.broadcast_to(delta_1[None, :], [BLOCK_K, BLOCK_Q])
        if DROPOUT:
            dp = _dot(v1, tl.trans(dout1)) * keep + minus_delta
        else:
            dp = _dot(v1, tl.trans(dout1), minus_delta)
        ds = (p * dp).to(q1.dtype)
        dk1 = _dot(ds, q1, dk1)
        if D2:
            dk2 = _dot(ds, q2, dk2)
    return dk1, dk2, dv


@triton.jit
def _queries_that_see(
    first_key, num_queries, num_keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Where the queries of a block of keys begin, up to where they are masked, and where they end.

    The first two are multiples of BLOCK_Q. Without a left side, the queries after the second see all.
    """
    same = first_key - num_keys + num_queries
    last_same = tl.minimum(first_key + BLOCK_K, num_keys) - 1 - num_keys + num_queries
    begin = 0
    masked_to = 0
    end = num_queries
    if HAS_RIGHT:
        begin = tl.maximum(same - right, 0) // BLOCK_Q * BLOCK_Q
        masked_to = (tl.maximum(last_same - right, 0) + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
    if HAS_LEFT:
        end = tl.maximum(tl.minimum(num_queries, last_same + left + 1), 0)
        masked_to = end
    return begin, masked_to, end


@triton.jit(do_not_specialize=[*VARYING, "heads_per_part"])
def _backward_keys(
    dout, q, k, v, offset, delta, dk, dv, starts_q, starts_k, seed,
    stride_dt, stride_db, stride_dh, stride_qt, stride_qb, stride_qh,
    stride_kt, stride_kb, stride_kh, stride_vt, stride_vb, stride_vh,
    batch, num_heads, group, heads_per_part, num_queries, num_keys, num_sequences, num_blocks, heads_at_once,
    scale, scale_2, left, right, seed_stride, threshold, keep_scale,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_PLACES: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, summed over `heads_per_part` of the heads that read them.

    `scale_2` is scale times log2(e). RAGGED: BLOCK_Q may divide no Q.
    """
    num_kv_heads = num_heads // group
    parts = group // heads_per_part
    index, block = _head_and_block(batch * num_kv_heads * parts, num_blocks, heads_at_once, False)
    part, index = index % parts, index // parts
    sequence, head_k = index // num_kv_heads, index % num_kv_heads
    tokens, tokens_k = num_queries, num_keys
    b = sequence.to(tl.int64)
    first_row = 0
    first_row_k = 0
    if PACKED:
        sequence, before = _blocks_before(starts_k, tokens_k, num_sequences, block, BLOCK_K)
        if sequence > num_sequences:
            return
        block -= before
        first_row, num_queries = _extent(starts_q, tokens, num_sequences, sequence)
        first_row_k, num_keys = _extent(starts_k, tokens_k, num_sequences, sequence)
        num_queries = tl.where(sequence < num_sequences, num_queries, 0)
    first_key = block * BLOCK_K
    keys = first_key + tl.arange(0, BLOCK_K)
    row, row_k = tl.cast(first_row, tl.int64), tl.cast(first_row_k + first_key, tl.int64)
    k += row_k * stride_kt + b * stride_kb + head_k.to(tl.int64) * stride_kh
    v += row_k * stride_vt + b * stride_vb + head_k.to(tl.int64) * stride_vh
    q += row * stride_qt + b * stride_qb
    dout += row * stride_dt + b * stride_db
    offset += b * num_heads * tokens + row
    delta += b * num_heads * tokens + row
    wide = tl.arange(0, BLOCK_K).to(INDEX)
    rest = num_keys - first_key
    k1 = _load(k, wide, stride_kt, rest, tl.arange(0, D1), D, True, D1 > D)
    k2 = k1
    dk1 = tl.zeros([BLOCK_K, D1], tl.float32)
    dk2 = 0.0  # loops carry it
    if D2:
        k2 = _load(k, wide, stride_kt, rest, D1 + tl.arange(0, D2), D, True, D1 + D2 > D)
        dk2 = tl.zeros([BLOCK_K, D2], tl.float32)
    v1 = _load(v, wide, stride_vt, rest, tl.arange(0, BLOCK_E), E, True, BLOCK_E > E)
    dv_sum = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    number, places = 0, (0, 0, 0, 0)
    if DROPOUT:
        number, places = _seed(seed, sequence, num_sequences, seed_stride, HAS_PLACES)

    shift = num_keys - num_queries
    begin, masked_to, end = _queries_that_see(
        first_key, num_queries, num_keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_Q, BLOCK_K
    )
    first_head = head_k * group + part * heads_per_part
    if HAS_LEFT or HAS_RIGHT:
        dk1, dk2, dv_sum = _gradients_of_keys(
            dk1, dk2, dv_sum, q, dout, offset, delta, k1, k2, v1, begin, tl.minimum(masked_to, end),
            first_head, heads_per_part, tokens, num_queries, keys, shift, stride_qt, stride_qh, stride_dt,
            stride_dh, scale_2, left, right, number, places, sequence, first_key, threshold, keep_scale,
            True, RAGGED, HAS_LEFT, HAS_RIGHT, DROPOUT, D, D1, D2, E, BLOCK_E, BLOCK_Q, BLOCK_K, INDEX,
        )  # fmt: skip
    if not HAS_LEFT:
        dk1, dk2, dv_sum = _gradients_of_keys(
            dk1, dk2, dv_sum, q, dout, offset, delta, k1, k2, v1, masked_to, end, first_head,
            heads_per_part, tokens, num_queries, keys, shift, stride_qt, stride_qh, stride_dt, stride_dh,
            scale_2, left, right, number, places, sequence, first_key, threshold, keep_scale, False,
            RAGGED, HAS_LEFT, HAS_RIGHT, DROPOUT, D, D1, D2, E, BLOCK_E, BLOCK_Q, BLOCK_K, INDEX,
        )  # fmt: skip
    # dk and dv are [parts, K, B, G, D] and [.., E]
    stride_k = batch * num_kv_heads * D
    stride_v = batch * num_kv_heads * E
    row_k += tl.cast(part, tl.int64) * tokens_k
    dk += row_k * stride_k + (b * num_kv_heads + head_k) * D
    dv += row_k * stride_v + (b * num_kv_heads + head_k) * E
    _store(dk, wide, stride_k, rest, tl.arange(0, D1), D, dk1 * scale)
    if D2:
        _store(dk, wide, stride_k, rest, D1 + tl.arange(0, D2), D, dk2 * scale)
    _store(dv, wide, stride_v, rest, tl.arange(0, BLOCK_E), E, dv_sum)


@triton.jit
def _gradients_of_queries(
    dq1, dq2, q1, q2, dout1, offset_1, delta_1, k, v, first_key, last_key, num_keys, queries, shift,
    stride_k, stride_v, scale, left, right, seed, places, head, sequence, first_query, threshold, keep_scale,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `first_key`, a multiple of BLOCK_K, to `last_key` give."""
    rows = tl.arange(0, BLOCK_K).to(INDEX)
    for start in tl.range(first_key, last_key, BLOCK_K):
        first = tl.cast(start, tl.int64)
        rest = num_keys - start
        k_block = k + first * stride_k
        k1 = _load(k_block, rows, stride_k, rest, tl.arange(0, D1), D, MASKED, D1 > D)
        s = _dot(q1, tl.trans(k1))
        if D2:
            k2 = _load(k_block, rows, stride_k, rest, D1 + tl.arange(0, D2), D, MASKED, D1 + D2 > D)
            s = _dot(q2, tl.trans(k2), s)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_K)
            seen = (keys < num_keys)[None, :]
            if HAS_LEFT or HAS_RIGHT:
                seen = seen & _visible(
                    queries[:, None], keys[None, :], shift, left, right, HAS_LEFT, HAS_RIGHT
                )
            s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s * scale + offset_1[:, None])
        columns = tl.arange(0, BLOCK_E)
        v1 = _load(v + first * stride_v, rows, stride_v, rest, columns, E, MASKED, BLOCK_E > E)
        dp = _dot(dout1, tl.trans(v1))
        if DROPOUT:
            dp *= _keep(
                seed, places, first_query, start, head, sequence, threshold, keep_scale, BLOCK_Q, BLOCK_K
            )  # fmt: skip
        ds = (p * (dp + delta_1[:, None])).to(k1.dtype)
        dq1 = _dot(ds, k1, dq1)
        if D2:
            dq2 = _dot(ds, k2, dq2)
    return dq1, dq2


@triton.jit(do_not_specialize=VARYING)
def _backward_queries(
    dout, q, k, v, offset, delta, dq, starts_q, starts_k, seed,
    stride_dt, stride_db, stride_dh, stride_qt, stride_qb, stride_qh,
    stride_kt, stride_kb, stride_kh, stride_vt, stride_vb, stride_vh,
    batch, num_heads, group, num_queries, num_keys, num_sequences, num_blocks, heads_at_once,
    scale, scale_2, left, right, seed_stride, threshold, keep_scale,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_PLACES: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries. `scale_2` is scale times log2(e). RAGGED: BLOCK_K may divide no K."""
    index, block = _head_and_block(batch * num_heads, num_blocks, heads_at_once, True)
    sequence, head = index // num_heads, index % num_heads
    tokens = num_queries
    b = sequence.to(tl.int64)
    first_row = 0
    first_row_k = 0
    if PACKED:
        all_keys = num_keys
        sequence, before = _blocks_before(starts_q, tokens, num_sequences, block, BLOCK_Q)
        if sequence > num_sequences:
            return
        block -= before
        first_row, num_queries = _extent(starts_q, tokens, num_sequences, sequence)
        first_row_k, num_keys = _extent(starts_k, all_keys, num_sequences, sequence)
        num_keys = tl.where(sequence < num_sequences, num_keys, 0)
    first_query = block * BLOCK_Q
    head_k = head // group
    row, row_k = tl.cast(first_row + first_query, tl.int64), tl.cast(first_row_k, tl.int64)
    h = head.to(tl.int64)
    q += row * stride_qt + b * stride_qb + h * stride_qh
    dout += row * stride_dt + b * stride_db + h * stride_dh
    k += row_k * stride_kt + b * stride_kb + head_k.to(tl.int64) * stride_kh
    v += row_k * stride_vt + b * stride_vb + head_k.to(tl.int64) * stride_vh
    rows = tl.arange(0, BLOCK_Q)
    wide = rows.to(INDEX)
    rest = num_queries - first_query
    q1 = _load(q, wide, stride_qt, rest, tl.arange(0, D1), D, True, D1 > D)
    q2 = q1
    dq1 = tl.zeros([BLOCK_Q, D1], tl.float32)
    dq2 = 0.0  # loops carry it
    if D2:
        q2 = _load(q, wide, stride_qt, rest, D1 + tl.arange(0, D2), D, True, D1 + D2 > D)
        dq2 = tl.zeros([BLOCK_Q, D2], tl.float32)
    dout1 = _load(dout, wide, stride_dt, rest, tl.arange(0, BLOCK_E), E, True, BLOCK_E > E)
    statistics = index.to(tl.int64) * tokens + row
    offset_1, delta_1 = _statistics(offset + statistics, delta + statistics, rows, rest, True)
    offset_1 *= scale_2
    number, places = 0, (0, 0, 0, 0)
    if DROPOUT:
        number, places = _seed(seed, sequence, num_sequences, seed_stride, HAS_PLACES)

    shift = num_keys - num_queries
    masked_from, end = _keys_seen(
        first_query, num_queries, num_keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_Q, BLOCK_K
    )
    if not HAS_LEFT:
        dq1, dq2 = _gradients_of_queries(
            dq1, dq2, q1, q2, dout1, offset_1, delta_1, k, v, 0, masked_from, num_keys, first_query +
            rows, shift, stride_kt, stride_vt, scale_2, left, right, number, places, head, sequence,
            first_query, threshold, keep_scale, False, HAS_LEFT, HAS_RIGHT, DROPOUT, D, D1, D2, E,
            BLOCK_E, BLOCK_Q, BLOCK_K, INDEX,
        )  # fmt: skip
    if HAS_LEFT or HAS_RIGHT or RAGGED:
        dq1, dq2 = _gradients_of_queries(
            dq1, dq2, q1, q2, dout1, offset_1, delta_1, k, v, masked_from, end, num_keys, first_query +
            rows, shift, stride_kt, stride_vt, scale_2, left, right, number, places, head, sequence,
            first_query, threshold, keep_scale, True, HAS_LEFT, HAS_RIGHT, DROPOUT, D, D1, D2, E, BLOCK_E,
            BLOCK_Q, BLOCK_K, INDEX,
        )  # fmt: skip
    stride_dq = num_heads * batch * D
    dq += row * stride_dq + index.to(tl.int64) * D
    _store(dq, wide, stride_dq, rest, tl.arange(0, D1), D, dq1 * scale)
    if D2:
        _store(dq, wide, stride_dq, rest, D1 + tl.arange(0, D2), D, dq2 * scale)


class _Blocks(NamedTuple):
    queries: int
    keys: int
    num_warps: int
    num_stages: int


# Widest row of q, k and v (192: of q and k alone) -> blocks of a half dtype. What a thread accumulates in
# fp32 and the scores of a block share its 255 registers; three stages are what it takes for loads to
# run ahead of the products. Those of 64, 128 and 192 are the best of 4 to 14 on an H200, causal (8192 tokens,
# 32 heads; 4096 and 64 for 192), with Triton 3.6. TFLOP/s of the forward, of keys and of queries:
#     64    429, 370, 572        128    490, 411, 668        192 and 128    409, 368, 454
# Others may be far behind: 128 x 64 by 4 warps has 216 forward for 128.
FORWARD = {
    64: _Blocks(128, 64, 8, 3),
    128: _Blocks(128, 64, 8, 3),
    192: _Blocks(128, 64, 8, 3),
    256: _Blocks(64, 32, 8, 2),
}
BACKWARD_KEYS = {
    64: _Blocks(64, 64, 4, 3),
    128: _Blocks(64, 128, 8, 3),
    192: _Blocks(32, 128, 8, 3),
    256: _Blocks(16, 64, 8, 2),
}
BACKWARD_QUERIES = {
    64: _Blocks(128, 64, 4, 3),
    128: _Blocks(128, 64, 8, 3),
    192: _Blocks(128, 32, 8, 3),
    256: _Blocks(64, 32, 8, 2),
}
# Elsewhere, operands of products pass through registers: 64 x 128 spills. (For 192, so does all else.)
AMPERE_BACKWARD_KEYS = BACKWARD_KEYS | {64: _Blocks(64, 128, 8, 3), 128: _Blocks(64, 64, 8, 3)}
AMPERE_BACKWARD_QUERIES = BACKWARD_QUERIES | {
    64: _Blocks(128, 64, 8, 3),
    128: _Blocks(128, 32, 8, 3),
}
# Random numbers take registers, and come for 64 queries at once.
DROPOUT_FORWARD = _Blocks(128, 32, 8, 2)
DROPOUT_BACKWARD_KEYS = _Blocks(64, 32, 8, 1)
DROPOUT_BACKWARD_QUERIES = _Blocks(64, 32, 4, 2)
FP32 = _Blocks(32, 32, 8, 1)
"""fp32 has no tensor cores: its operands take registers too."""

assumed_capability: ContextVar[tuple[int, int]] = ContextVar("assumed_capability", default=(9, 0))
"""Of a device that is none: what `compile_table` compiles blocks for."""


def _parts_of(width: int) -> tuple[int, int]:
    """The powers of two, at least 16, that hold a row: (128, 64) for 192, (32, 0) for 24."""
    whole = max(16, next_power_of_2(width))
    if whole == width or whole <= 64:
        return whole, 0
    rest = max(16, next_power_of_2(width - whole // 2))
    return (whole, 0) if rest == whole // 2 else (whole // 2, rest)


def _with_contiguous_rows(t: Tensor) -> Tensor:
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def _strides(t: Tensor) -> tuple[int, int, int]:
    """Of token, batch and head, of [S, B, H, D] or a pack [T, H, D]."""
    if t.ndim == 4:
        return t.stride(0), t.stride(1), t.stride(2)
    return t.stride(0), 0, t.stride(1)


def _multiplies_from_shared(device: torch.device) -> bool:
    """Hopper's and Blackwell's wgmma and tcgen05. Consumer Blackwell, 12.0, multiplies as Ampere does."""
    cuda = device.type == "cuda"
    major, _ = torch.cuda.get_device_capability(device) if cuda else assumed_capability.get()
    return major in (9, 10)


@functools.cache
def _shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have."""
    if device.type != "cuda":
        return SHARED_LIMIT
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def _shared_bytes(
    blocks: _Blocks, width: int, value_width: int, itemsize: int, walks_keys: bool
) -> int:
    """At most what a kernel needs: one side of a block is held, of the other so many as there are stages.

    Of two stages or more one less is kept, which leaves room for all else. With one stage, k or q of a half
    dtype is there in two layouts; for the gradients of k and v perhaps dout is, and p and ds beside it.
    """
    first, second = _parts_of(width)
    values = max(16, next_power_of_2(value_width))
    columns = first + second + values
    held, walked = blocks.queries, blocks.keys
    if not walks_keys:
        held, walked = walked, held
    walked_columns = blocks.num_stages * columns
    scores = 0
    if blocks.num_stages == 1 and itemsize == 2:
        walked_columns = max(columns, 2 * first) if walks_keys else columns + max(first, values)
    if blocks.num_stages == 1 and not walks_keys:
        scores = 4 * held * walked
    return (held * columns + walked * walked_columns) * itemsize + scores


class _Problem:
    """One call: what all its launches have in common.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seed: Tensor | None,
        scale: float,
        left: int,
        right: int,
        dropout: float,
    ) -> None:
        self.packed = cu_seqlens_q is not None
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right)
        self.num_queries, self.num_heads, self.width = q.shape[0], q.shape[-2], q.shape[-1]
        self.num_keys, self.num_kv_heads, self.value_width = k.shape[0], k.shape[-2], v.shape[-1]
        self.batch = 1 if self.packed else q.shape[1]
        self.num_sequences = self.batch
        self.starts: tuple[Tensor | None, Tensor | None] = (None, None)
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            self.num_sequences = cu_seqlens_q.numel() - 1
            self.starts = (
                cu_seqlens_q.to(q.device).contiguous(),
                cu_seqlens_k.to(q.device).contiguous(),
            )
        self.group = self.num_heads // self.num_kv_heads
        self.scale, self.dropout = scale, dropout
        # A side as long as the longest sequence can be hides nothing.
        self.left = NO_LIMIT if left >= self.num_keys else left
        self.right = NO_LIMIT if right >= self.num_queries else right
        self.seed, self.seed_stride = self._seed(seed, q.device)
        self.dtype, self.device = q.dtype, q.device

    def _seed(self, seed: Tensor | None, device: torch.device) -> tuple[Tensor | None, int]:
        if not self.dropout:
            return None, 0
        if seed is None or seed.dtype != torch.int64 or not self.dropout < 1:
            raise ValueError("attention: dropout must be below 1 and needs a seed, int64")
        for_each = seed.ndim == 2 and seed.shape[0] == self.num_sequences
        if for_each and not self.num_sequences:  # tokens of no sequence read one all the same
            return seed.new_zeros(1, device=device), 0
        if seed.numel() != 1 and (seed.shape[-1] != 5 or not (seed.ndim == 1 or for_each)):
            raise ValueError(
                "attention: dropout needs a seed of 1 number, or of 5 for all or for each of the "
                f"{self.num_sequences} sequences, got {list(seed.shape)}"
            )
        return seed.to(device).contiguous(), 5 if for_each and seed.numel() > 1 else 0

    def blocks(
        self, table: dict[int, _Blocks], with_dropout: _Blocks, walks_keys: bool = True
    ) -> _Blocks:
        """Sizes of blocks for these widths, less of them where shared memory is small.

        Raises:
            ValueError: the smallest block of such rows does not fit.
        """
        widest = max(64, next_power_of_2(max(self.width, self.value_width)))
        if self.width <= 192 and self.value_width <= 128:
            widest = min(widest, 192)
        chosen = table[min(widest, max(table))]
        if self.dtype == torch.float32:
            chosen = FP32._replace(queries=QUERIES_DRAWN) if self.dropout else FP32
        elif self.dropout:
            chosen = with_dropout
        limit = _shared_limit(self.device)
        rows = (self.width, self.value_width, self.dtype.itemsize)
        while _shared_bytes(chosen, *rows, walks_keys) > limit:
            if chosen.num_stages > 1:
                chosen = chosen._replace(num_stages=chosen.num_stages - 1)
            elif chosen.keys > SMALLEST and (walks_keys or chosen.keys >= chosen.queries):
                chosen = chosen._replace(keys=chosen.keys // 2)
            elif chosen.queries > SMALLEST:
                fewer = chosen.queries // 2
                drawn = self.dropout and fewer < QUERIES_DRAWN
                chosen = chosen._replace(queries=SMALLEST if drawn else fewer)
            else:
                raise ValueError(
                    f"attention: no block of rows of {self.width} and {self.value_width} {self.dtype} fits "
                    f"{limit} bytes of shared memory: use narrower heads, or `attention_ref`"
                )
        return chosen

    def num_blocks(self, tokens: int, size: int) -> int:
        """Of one head; at most so many for a pack, whose last tokens may belong to no sequence."""
        return tokens // size + self.num_sequences + 1 if self.packed else ceil_div(tokens, size)

    def heads_at_once(self, heads_of_a_kv_head: int) -> int:
        """Programs of so many heads run before those of the next, so that L2 holds keys and values."""
        bytes_of_a_head = self.num_keys * (self.width + self.value_width) * self.dtype.itemsize
        together = max(1, BYTES_IN_CACHE // max(1, bytes_of_a_head))
        return heads_of_a_kv_head * min(together, self.batch * self.num_kv_heads)

    def sizes(self, num_blocks: int, heads_at_once: int) -> tuple[int, ...]:
        return (
            self.num_queries, self.num_keys, self.num_sequences, num_blocks, heads_at_once
        )  # fmt: skip

    def numbers(self) -> tuple[int | float, ...]:
        """left, right, seed_stride, threshold, keep_scale."""
        threshold = min(round(self.dropout * 2**32), 2**32 - 1)
        return self.left, self.right, self.seed_stride, threshold, 1 / (1 - self.dropout)

    def constants(self, blocks: _Blocks, ragged: bool, *tensors: Tensor) -> dict[str, Any]:
        """The constexpr arguments; `tensors` are those that are read by blocks of rows."""
        first, second = _parts_of(self.width)
        reach = max(t.stride(0) for t in tensors) * max(blocks.queries, blocks.keys)
        return {
            "PACKED": self.packed,
            "RAGGED": self.packed or ragged,
            "HAS_LEFT": self.left != NO_LIMIT,
            "HAS_RIGHT": self.right != NO_LIMIT,
            "DROPOUT": self.dropout > 0,
            "HAS_PLACES": self.seed is not None and self.seed.numel() > 1,
            "D": self.width,
            "D1": first,
            "D2": second,
            "E": self.value_width,
            "BLOCK_E": max(16, next_power_of_2(self.value_width)),
            "BLOCK_Q": blocks.queries,
            "BLOCK_K": blocks.keys,
            "INDEX": tl.int64 if reach >= 2**31 else tl.int32,
            "num_warps": blocks.num_warps,
            "num_stages": blocks.num_stages,
        }


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    left: int,
    right: int,
) -> None:
    """What can be seen without waiting for the device."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("attention: cu_seqlens_q and cu_seqlens_k go together")
    packed = cu_seqlens_q is not None
    if {t.ndim for t in (q, k, v)} != {3 if packed else 4} or len({q.dtype, k.dtype, v.dtype}) > 1:
        described = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (q, k, v))
        raise ValueError(
            f"attention: q, k and v must have {3 if packed else 4} dimensions and one dtype, got {described}"
        )
    fits = q.shape[-1] == k.shape[-1] > 0 and k.shape[:-1] == v.shape[:-1]
    fits = fits and k.shape[-2] > 0 and q.shape[-2] % k.shape[-2] == 0
    if not fits or (not packed and q.shape[1] != k.shape[1]):
        raise ValueError(
            "attention: q, k and v do not fit together: "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"attention: scale must be positive, got {scale}")
    if min(left, right) < NO_LIMIT:
        raise ValueError(f"attention: the window must be >= -1 (no limit), got {left} and {right}")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is not None and (starts.ndim != 1 or not starts.numel()):
            raise ValueError(
                f"attention: {name} must have shape [sequences + 1], got {list(starts.shape)}"
            )
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        counts = cu_seqlens_q.numel(), cu_seqlens_k.numel()
        if counts[0] != counts[1]:
            raise ValueError(
                "attention: cu_seqlens_q and cu_seqlens_k must be as long, got "
                f"{counts[0]} and {counts[1]}"
            )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int,
    right: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """`accel::attention_fwd`."""
    p = _Problem(q, k, v, cu_seqlens_q, cu_seqlens_k, seed, scale, left, right, dropout)
    q, k, v = (_with_contiguous_rows(t) for t in (q, k, v))
    out = q.new_empty((*q.shape[:-1], p.value_width))
    lse = q.new_empty((*q.shape[1:-1], p.num_queries), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-math.inf)
    blocks = p.blocks(FORWARD, DROPOUT_FORWARD)
    num_blocks = p.num_blocks(p.num_queries, blocks.queries)
    launch(
        _forward, (num_blocks * p.batch * p.num_heads,),
        q, k, v, out, lse, *p.starts, p.seed, *_strides(q), *_strides(k), *_strides(v),
        p.batch, p.num_heads, p.group, *p.sizes(num_blocks, p.heads_at_once(p.group)),
        scale * math.log2(math.e), *p.numbers(),
        **p.constants(blocks, p.num_keys % blocks.keys > 0, q, k, v, out),
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int,
    right: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::attention_bwd`."""
    p = _Problem(q, k, v, cu_seqlens_q, cu_seqlens_k, seed, scale, left, right, dropout)
    if (
        dout.shape != out.shape
        or out.shape != (*q.shape[:-1], p.value_width)
        or {dout.dtype, out.dtype} != {q.dtype}
        or lse.dtype != torch.float32
        or lse.shape != (*q.shape[1:-1], p.num_queries)
    ):
        raise ValueError(
            f"attention backward: dout {list(dout.shape)}, out {list(out.shape)} and lse "
            f"{list(lse.shape)} do not fit q {list(q.shape)}"
        )
    dout, q, k, v, out = (_with_contiguous_rows(t) for t in (dout, q, k, v, out))
    lse = lse.contiguous()
    if out.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    offset, delta = torch.empty_like(lse), torch.empty_like(lse)
    num_blocks = ceil_div(p.num_queries, DELTA_ROWS)
    launch(
        _delta, (p.batch * p.num_heads * num_blocks,),
        dout, out, lse, offset, delta, *_strides(dout), *_strides(out),
        num_blocks, p.num_heads, p.num_queries, scale,
        E=p.value_width, BLOCK_E=next_power_of_2(p.value_width), ROWS=DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    dk, dv = _gradients_of_k_and_v(p, dout, q, k, v, offset, delta)
    table = BACKWARD_QUERIES if _multiplies_from_shared(p.device) else AMPERE_BACKWARD_QUERIES
    blocks = p.blocks(table, DROPOUT_BACKWARD_QUERIES)
    num_blocks = p.num_blocks(p.num_queries, blocks.queries)
    dq = q.new_empty(q.shape)
    launch(
        _backward_queries, (num_blocks * p.batch * p.num_heads,),
        dout, q, k, v, offset, delta, dq, *p.starts, p.seed,
        *_strides(dout), *_strides(q), *_strides(k), *_strides(v),
        p.batch, p.num_heads, p.group, *p.sizes(num_blocks, p.heads_at_once(p.group)),
        scale, scale * math.log2(math.e), *p.numbers(),
        **p.constants(blocks, p.num_keys % blocks.keys > 0, dout, q, k, v, dq),
    )  # fmt: skip
    return dq, dk, dv


def _gradients_of_k_and_v(
    p: _Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, offset: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    table = BACKWARD_KEYS if _multiplies_from_shared(p.device) else AMPERE_BACKWARD_KEYS
    blocks = p.blocks(table, DROPOUT_BACKWARD_KEYS, walks_keys=False)
    num_blocks = p.num_blocks(p.num_keys, blocks.keys)
    # One program sums over all heads of a group, unless that leaves processors without work.
    programs = ceil_div(p.num_keys, blocks.keys) * p.batch * p.num_kv_heads
    parts = 1
    while programs * parts < num_processors(p.device) and parts < p.group:
        parts = next(n for n in range(parts + 1, p.group + 1) if p.group % n == 0)
    dtype = p.dtype if parts == 1 else torch.float32
    dk = k.new_empty((parts, *k.shape), dtype=dtype)
    dv = v.new_empty((parts, *v.shape), dtype=dtype)
    launch(
        _backward_keys, (num_blocks * p.batch * p.num_kv_heads * parts,),
        dout, q, k, v, offset, delta, dk, dv, *p.starts, p.seed,
        *_strides(dout), *_strides(q), *_strides(k), *_strides(v),
        p.batch, p.num_heads, p.group, p.group // parts,
        *p.sizes(num_blocks, p.heads_at_once(parts)),
        p.scale, p.scale * math.log2(math.e), *p.numbers(),
        **p.constants(blocks, p.num_queries % blocks.queries > 0, dout, q, k, v, dk[0], dv[0]),
        # Triton 3.8 takes 32 for 192 columns on sm_80, and spills 21 KiB a thread
        maxnreg=255 if IS_NEWER and p.width > 128 else None,
    )  # fmt: skip
    if parts == 1:
        return dk[0], dv[0]
    return dk.sum(0).to(k.dtype), dv.sum(0).to(v.dtype)


def best_forward(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`accel::attention_fwd` by the fastest that takes the call: `accel/ops/_attention_backends.py`."""
    if q.device.type != "cuda":
        return forward(q, *arguments)
    from accel.ops import _attention_backends

    return _attention_backends.forward(q, *arguments)


def best_backward(dout: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::attention_bwd` likewise."""
    if dout.device.type != "cuda":
        return backward(dout, *arguments)
    from accel.ops import _attention_backends

    return _attention_backends.backward(dout, *arguments)


KERNELS = {"accel::attention_fwd": best_forward, "accel::attention_bwd": best_backward}

_HOPPER_128 = (
    "2.66 ms all the same, 3.35 with blocks that do not "
    "(32 x 128; an H200, 8192 causal queries of 32 heads over 8)"
)
_HOPPER_64 = (
    "0.72 ms all the same, with 8 warps, which do not, 0.85 "
    "(an H200, 8192 causal queries of 32 heads)"
)
_AMPERE = "blocks that it does not get: 'for sm_80' are its own"
_AMPERE_192 = "smaller blocks spill too"
_NEWER = "since Triton 3.8; not measured"
MAY_SPILL = {
    ("_backward_keys", "D=128", "sm_90"): (320, _HOPPER_128),
    ("_backward_keys", "D=128 full", "sm_90"): (120, _HOPPER_128),
    ("_backward_keys", "D=128 window", "sm_90"): (32, _HOPPER_128),
    ("_backward_queries", "D=64", "sm_90"): (48, _HOPPER_64),
    ("_backward_keys", "D=128", "sm_80"): (624, _AMPERE),
    ("_backward_keys", "D=128 full", "sm_80"): (160, _AMPERE),
    ("_backward_keys", "D=128 window", "sm_80"): (208, _AMPERE),
    ("_backward_keys", "D=192 E=128", "sm_80"): (156, _AMPERE_192),
    ("_backward_queries", "D=64", "sm_80"): (268, _AMPERE),
    ("_backward_queries", "D=128", "sm_80"): (88, _AMPERE),
    ("_backward_queries", "D=128 full", "sm_80"): (104, _AMPERE),
    ("_backward_queries", "D=128 window", "sm_80"): (32, _AMPERE),
    ("_backward_queries", "D=192 E=128", "sm_80"): (52, _AMPERE_192),
}
"""Kernel, case and architecture -> bytes that it may spill at most, and why."""
if IS_NEWER:
    MAY_SPILL |= {
        ("_backward_keys", "D=128", "sm_90"): (408, _HOPPER_128),
        ("_backward_keys", "D=192 E=128", "sm_80"): (852, _AMPERE_192),
        ("_backward_keys", "D=192 E=128", "sm_90"): (8, _NEWER),
        ("_backward_queries", "D=64", "sm_80"): (276, _AMPERE),
        ("_backward_queries", "D=128 pack dropout", "sm_90"): (28, _NEWER),
    }


def _for_ampere(launcher: Callable, *args: Any) -> Any:
    token = assumed_capability.set((8, 0))
    try:
        return launcher(*args)
    finally:
        assumed_capability.reset(token)


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Llama's heads, a window, a pack with dropout, DeepSeek's MLA, fp32."""

    def case(
        name: str,
        heads: tuple[int, int],
        widths: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16,
        left: int = NO_LIMIT,
        right: int = 0,
        packed: bool = False,
        dropout: float = 0.0,
    ) -> Iterator[tuple[str, Callable, tuple]]:
        tokens = (4096,) if packed else (4096, 2)
        q, k, v, out = (
            torch.empty(*tokens, h, w, dtype=dtype, device="meta")
            for h, w in (
                (heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])
            )
        )  # fmt: skip
        lse = torch.empty(*q.shape[1:-1], 4096, device="meta")
        starts = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
        seed = torch.empty((), dtype=torch.int64, device="meta") if dropout else None
        rest = (starts, starts, seed, widths[0] ** -0.5, left, right, dropout)
        yield name, forward, (q, k, v, *rest)
        yield name, backward, (out, q, k, v, out, lse, *rest)
        if dtype.itemsize == 2 and max(widths) <= 128 and not dropout:
            yield f"{name} for sm_80", _for_ampere, (backward, out, q, k, v, out, lse, *rest)

    yield from case("D=64", (16, 16), (64, 64))
    yield from case("D=128", (32, 8), (128, 128))
    yield from case("D=128 full", (32, 8), (128, 128), right=NO_LIMIT)
    yield from case("D=128 window", (32, 8), (128, 128), left=1024)
    yield from case("D=128 pack dropout", (32, 8), (128, 128), packed=True, dropout=0.1)
    yield from case("D=192 E=128", (128, 128), (192, 128))
    yield from case("D=256", (8, 4), (256, 256))
    yield from case("D=64 fp32", (16, 16), (64, 64), dtype=torch.float32)
