"""Moving tokens to their experts and back in Triton: see `accel/ops/moe_permute.py` for the formulas.

A row map says for each row p its token. What goes the other way, sums over the rows of a token,
needs the inverse, which `_RowsOfTokens` builds without atomics and without asking the device: rows
are sorted, stably, by groups of consecutive tokens, some 500 rows each, by counting them per block of
rows and placing them with one program for each block, as `moe_row_map` itself does with tokens and
experts. The program of a token picks its rows out of its group's list, in ascending order.

So the token is read once for all its rows, (T + P) N elements moved and not 2 P N; only where
that saves less than the inverse costs are rows copied one by one.

Values are not checked, which would wait for the device: a row that names no expert of `probs` weighs
0, and any number below 0 is padding.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2

NUM_BLOCKS = 128
"""Programs that count and place: every one reads the counts of all, 64 KiB for 128 buckets."""
NUM_GROUPS = 128
"""Groups of tokens: as many columns has the tile that ranks rows in their groups."""
COUNT_TILE = 4096
"""Elements of that tile, and of the tile of routing_map."""
MAX_ITEMS = 128
"""Rows of these tiles, where there are few buckets: more programs are worth more than long ones."""
MOST_ROWS = 2**31 - 1 - NUM_BLOCKS * MAX_ITEMS
"""They are counted in 32 bits, those behind the last one in a program too."""
GROUP_BLOCK = 512
"""Entries of a group's list at a time: with top-8 and 8192 tokens, all of them."""
SUM_BLOCK = 2048
"""Columns of a program that sums: a thread of 8 warps has 16 bytes of each of four rows under way.
With twice as many ptxas spills, to have more programs beside each other."""
GATHER_BLOCK = 1024
"""Columns of a program that copies rows one by one; it takes 8 rows of so many."""
ROW_BLOCK = 8192
"""Columns of a token that one program keeps in registers for all its rows."""
LONG_ROW_BLOCK = 4096
"""The same of longer rows, which it reads again for each: with 8192, ptxas spills."""
MAX_REGISTERS = 64 if Version(triton.__version__) >= Version("3.8") else None
"""Of a thread that sums or weighs; None leaves it to ptxas. Since Triton 3.8 that takes 40 or 32 in some
cases and spills 28 to 52 bytes, to have more programs beside each other."""
PADDING_BLOCK = 32
"""Rows in which a program looks for padding."""
READ_ONCE_BYTES = 64 << 20
"""Reading less again takes 20 us of an H100's 3.3 TB/s; the inverse takes two launches of 5, which each move
little else. Derived, not measured."""

NONE = tl.constexpr(2**31 - 1)
"""Beyond every entry of a list."""
BY_ROW = tl.constexpr(1)
BY_EXPERT = tl.constexpr(2)


# -- counting ------------------------------------------------------------------------------------


@triton.jit
def _counts_before(
    counts_CB, program, num_programs, num_buckets, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Of each bucket, what the programs before this one have counted, and what all have; int32."""
    buckets = tl.arange(0, BLOCK_B)
    before = tl.zeros([BLOCK_B], tl.int32)
    total = tl.zeros([BLOCK_B], tl.int32)
    for start in range(0, num_programs, BLOCK_C):
        programs = start + tl.arange(0, BLOCK_C)
        mask = (programs < num_programs)[:, None] & (buckets < num_buckets)[None, :]
        at = programs[:, None] * num_buckets + buckets[None, :]
        counts = tl.load(counts_CB + at, mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((programs < program)[:, None], counts, 0), axis=0)
    return before, total


@triton.jit
def _routed(run_TE, start, length, num_experts, BLOCK_I: tl.constexpr, BLOCK_B: tl.constexpr):
    """int32 [BLOCK_I, BLOCK_B] from token `start` of a run on, 1 where it goes to an expert."""
    tokens = start + tl.arange(0, BLOCK_I)
    experts = tl.arange(0, BLOCK_B)
    mask = (tokens < length)[:, None] & (experts < num_experts)[None, :]
    routed = tl.load(run_TE + tokens[:, None] * num_experts + experts[None, :], mask=mask, other=0)
    return (routed != 0).to(tl.int32)


@triton.jit
def _count_routed(
    routing_map_TE, counts_CE, row_map_P, num_tokens, num_experts, num_rows, per_program,
    rows_per_program, BLOCK_I: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Tokens of each expert in a run of tokens; and its share of the row map becomes padding."""
    program = tl.program_id(0)
    run_TE = routing_map_TE + program.to(tl.int64) * per_program * num_experts
    length = tl.minimum(per_program, num_tokens - program * per_program)
    count = tl.zeros([BLOCK_B], tl.int32)
    for start in range(0, length, BLOCK_I):
        count += tl.sum(_routed(run_TE, start, length, num_experts, BLOCK_I, BLOCK_B), axis=0)
    experts = tl.arange(0, BLOCK_B)
    tl.store(counts_CE + program * num_experts + experts, count, mask=experts < num_experts)
    last_row = tl.minimum((program + 1) * rows_per_program, num_rows)
    for start in range(program * rows_per_program, last_row, 1024):
        rows = start + tl.arange(0, 1024)
        tl.store(row_map_P + rows, tl.full([1024], -1, tl.int64), mask=rows < last_row)


@triton.jit
def _place_routed(
    routing_map_TE, counts_CE, row_map_P, num_tokens, num_experts, num_rows, per_program,
    num_programs, capacity, align,
    HAS_CAPACITY: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    run_TE = routing_map_TE + program.to(tl.int64) * per_program * num_experts
    length = tl.minimum(per_program, num_tokens - program * per_program)
    experts = tl.arange(0, BLOCK_B)
    seen, total = _counts_before(counts_CE, program, num_programs, num_experts, BLOCK_C, BLOCK_B)
    if HAS_CAPACITY:
        first = experts * capacity
    else:
        wanted = (total + (align - 1)) // align * align
        first = tl.cumsum(wanted, axis=0) - wanted
    for start in range(0, length, BLOCK_I):
        routed = _routed(run_TE, start, length, num_experts, BLOCK_I, BLOCK_B)
        slot = seen[None, :] + tl.cumsum(routed, axis=0) - routed
        items = start + tl.arange(0, BLOCK_I)
        tokens = program * per_program + items
        keep = routed != 0
        if HAS_CAPACITY:  # what an expert has left over goes to the first tokens of others
            slot = tl.where(keep, slot, total[None, :] + tokens[:, None] - slot)
            keep = (items < length)[:, None] & (experts < num_experts)[None, :] & (slot < capacity)
        row = first[None, :] + slot
        place = experts[None, :].to(tl.int64) * num_tokens + tokens[:, None]
        tl.store(row_map_P + row, place, mask=keep & (row < num_rows))
        seen += tl.sum(routed, axis=0)


@triton.jit
def _tokens_and_experts(row_map_P, rows, last, num_tokens):
    """Both int32; the token of padding is -1. An expert beyond 32 bits is beyond all that there are."""
    place = tl.load(row_map_P + rows, mask=rows < last, other=-1)
    safe = tl.where(place < 0, 0, place)
    expert = safe // num_tokens
    token = safe - expert * num_tokens
    return tl.where(place < 0, -1, token).to(tl.int32), tl.minimum(expert, 2**31 - 1).to(tl.int32)


@triton.jit
def _in_groups(tokens, tokens_per_group, BLOCK_B: tl.constexpr):
    """int32 [BLOCK_I, BLOCK_B], 1 where a row's token is of the group; padding is of none."""
    group = tl.where(tokens < 0, -1, tokens // tokens_per_group)
    return (group[:, None] == tl.arange(0, BLOCK_B)[None, :]).to(tl.int32)


@triton.jit
def _count_groups(
    row_map_P, counts_CG, num_rows, num_tokens, num_groups, tokens_per_group, per_program,
    BLOCK_I: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    count = tl.zeros([BLOCK_B], tl.int32)
    last = tl.minimum((program + 1) * per_program, num_rows)
    for start in range(program * per_program, last, BLOCK_I):
        rows = start + tl.arange(0, BLOCK_I)
        tokens, _ = _tokens_and_experts(row_map_P, rows, last, num_tokens)
        count += tl.sum(_in_groups(tokens, tokens_per_group, BLOCK_B), axis=0)
    groups = tl.arange(0, BLOCK_B)
    tl.store(counts_CG + program * num_groups + groups, count, mask=groups < num_groups)


@triton.jit
def _place_groups(
    row_map_P, counts_CG, first_G, lists_3P, num_rows, num_tokens, num_groups, tokens_per_group,
    per_program, num_programs,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Token, row and expert of each entry of `lists_3P`; the list of group g starts at first_G[g]."""
    program = tl.program_id(0)
    groups = tl.arange(0, BLOCK_B)
    seen, total = _counts_before(counts_CG, program, num_programs, num_groups, BLOCK_C, BLOCK_B)
    end = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(first_G + groups + 1, end, mask=groups < num_groups)
        tl.store(first_G, 0)
    seen += end - total
    last = tl.minimum((program + 1) * per_program, num_rows)
    for start in range(program * per_program, last, BLOCK_I):
        rows = start + tl.arange(0, BLOCK_I)
        tokens, experts = _tokens_and_experts(row_map_P, rows, last, num_tokens)
        member = _in_groups(tokens, tokens_per_group, BLOCK_B)
        rank = seen[None, :] + tl.cumsum(member, axis=0) - member
        entry = tl.sum(rank * member, axis=1).to(tl.int64)  # a row is of one group
        tl.store(lists_3P + entry, tokens, mask=tokens >= 0)
        tl.store(lists_3P + num_rows + entry, rows, mask=tokens >= 0)
        tl.store(lists_3P + num_rows + num_rows + entry, experts, mask=tokens >= 0)
        seen += tl.sum(member, axis=0)


# -- moving --------------------------------------------------------------------------------------


@triton.jit
def _entries_of(lists_3P, token, start, last, BLOCK_L: tl.constexpr):
    """The entries of a token among BLOCK_L of the list, NONE in place of others; their number."""
    entries = start + tl.arange(0, BLOCK_L)
    tokens = tl.load(lists_3P + entries, mask=entries < last, other=-1)
    found = tokens == token
    return tl.where(found, entries, NONE), tl.sum(found.to(tl.int32), axis=0)


@triton.jit
def _take_first(entries):
    """The first entry, NONE if there is none; and the others."""
    first = tl.min(entries, axis=0)
    return first, tl.where(entries == first, NONE, entries)


@triton.jit
def _row(lists_3P, entry, num_rows):
    """The row of an entry in int64, 0 for no entry."""
    return tl.load(lists_3P + num_rows + entry, mask=entry < NONE, other=0).to(tl.int64)


@triton.jit
def _expert(lists_3P, entry, num_rows):
    return tl.load(lists_3P + num_rows + num_rows + entry, mask=entry < NONE, other=0)


@triton.jit
def _weight(weights, lists_3P, entry, token, row, num_rows, num_experts, BY: tl.constexpr):
    """Of an entry, in fp32: weights are [P] or [T, E]; 0 for no entry."""
    if BY == BY_EXPERT:
        expert = _expert(lists_3P, entry, num_rows)
        at = token.to(tl.int64) * num_experts + expert
        w = tl.load(weights + at, mask=(entry < NONE) & (expert < num_experts), other=0.0)
    else:
        w = tl.load(weights + row, mask=entry < NONE, other=0.0)
    return w.to(tl.float32)


@triton.jit
def _load_entry(
    rows_PN, weights, lists_3P, entry, token, cols, num_rows, num_cols, num_experts,
    BY: tl.constexpr,
):  # fmt: skip
    """Row, its columns and its weight; no entry weighs nothing."""
    row = _row(lists_3P, entry, num_rows)
    mask = (cols < num_cols) & (entry < NONE)
    values = tl.load(rows_PN + row * num_cols + cols, mask=mask, other=0.0)
    w = 1.0
    if BY != 0:
        w = _weight(weights, lists_3P, entry, token, row, num_rows, num_experts, BY)
    return row, values, w


@triton.jit
def _add_dweight(dprobs_E, dweights_P, lists_3P, entry, row, num_rows, BLOCK_E: tl.constexpr):
    """dprobs_E with the gradient of an entry's weight added at its expert."""
    dw = _weight(dweights_P, lists_3P, entry, row, row, num_rows, 0, BY_ROW)
    expert = _expert(lists_3P, entry, num_rows)
    return dprobs_E + tl.where(tl.arange(0, BLOCK_E) == expert, dw, 0.0)


@triton.jit
def _sum_rows(
    rows_PN, weights, dweights_P, lists_3P, first_G, out_TN, dprobs_TE,
    num_rows, num_cols, num_experts, tokens_per_group, num_col_blocks,
    BY: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out[t] = sum of w[p] rows[p]; with `dprobs_TE` also dprobs[t, e] = sum of dweights[p]."""
    token = tl.program_id(0) // num_col_blocks
    col_block = tl.program_id(0) % num_col_blocks
    cols = col_block * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    dprobs = tl.zeros([BLOCK_E], tl.float32)
    first = tl.load(first_G + token // tokens_per_group)
    last = tl.load(first_G + token // tokens_per_group + 1)
    for start in range(first, last, BLOCK_L):
        entries, count = _entries_of(lists_3P, token, start, last, BLOCK_L)
        for _ in range(0, count, 4):  # four loads before the first sum waits for one
            a, entries = _take_first(entries)
            b, entries = _take_first(entries)
            c, entries = _take_first(entries)
            d, entries = _take_first(entries)
            row_a, v_a, w_a = _load_entry(
                rows_PN, weights, lists_3P, a, token, cols, num_rows, num_cols, num_experts, BY
            )
            row_b, v_b, w_b = _load_entry(
                rows_PN, weights, lists_3P, b, token, cols, num_rows, num_cols, num_experts, BY
            )
            row_c, v_c, w_c = _load_entry(
                rows_PN, weights, lists_3P, c, token, cols, num_rows, num_cols, num_experts, BY
            )
            row_d, v_d, w_d = _load_entry(
                rows_PN, weights, lists_3P, d, token, cols, num_rows, num_cols, num_experts, BY
            )
            if dprobs_TE is not None:
                dprobs = _add_dweight(dprobs, dweights_P, lists_3P, a, row_a, num_rows, BLOCK_E)
                dprobs = _add_dweight(dprobs, dweights_P, lists_3P, b, row_b, num_rows, BLOCK_E)
                dprobs = _add_dweight(dprobs, dweights_P, lists_3P, c, row_c, num_rows, BLOCK_E)
                dprobs = _add_dweight(dprobs, dweights_P, lists_3P, d, row_d, num_rows, BLOCK_E)
            total += v_a.to(tl.float32) * w_a
            total += v_b.to(tl.float32) * w_b
            total += v_c.to(tl.float32) * w_c
            total += v_d.to(tl.float32) * w_d
    at = token.to(tl.int64) * num_cols + cols
    tl.store(out_TN + at, total.to(out_TN.dtype.element_ty), mask=cols < num_cols)
    if dprobs_TE is not None:
        experts = tl.arange(0, BLOCK_E)
        at = token.to(tl.int64) * num_experts + experts
        mask = (experts < num_experts) & (col_block == 0)
        tl.store(dprobs_TE + at, dprobs.to(dprobs_TE.dtype.element_ty), mask=mask)


@triton.jit
def _gather_rows(
    tokens_TN, row_map_P, probs_TE, rows_PN, w_P,
    num_rows, num_tokens, num_cols, num_experts, num_col_blocks,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """rows[p] = tokens[t] and, with probs, w[p] = probs[t, e]; 0 for padding. Row by row."""
    col_block = tl.program_id(0) % num_col_blocks
    cols = col_block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (tl.program_id(0) // num_col_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens, experts = _tokens_and_experts(row_map_P, rows, num_rows, num_tokens)
    within = (cols < num_cols)[None, :]
    at = tokens[:, None].to(tl.int64) * num_cols + cols[None, :]
    values = tl.load(tokens_TN + at, mask=(tokens >= 0)[:, None] & within, other=0.0)
    at = rows[:, None] * num_cols + cols[None, :]
    tl.store(rows_PN + at, values, mask=(rows < num_rows)[:, None] & within)
    if probs_TE is not None:
        at = tokens.to(tl.int64) * num_experts + experts
        w = tl.load(probs_TE + at, mask=(tokens >= 0) & (experts < num_experts), other=0.0)
        tl.store(w_P + rows, w, mask=(rows < num_rows) & (col_block == 0))


@triton.jit
def _zero_padding(
    row_map_P, rows_PN, w_P, first, num_rows, num_cols, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Zeros in those of the rows from `first` on that are padding, and in their places of w_P."""
    rows = first.to(tl.int64) + tl.arange(0, BLOCK_P)
    place = tl.load(row_map_P + rows, mask=rows < num_rows, other=0)
    if w_P is not None:
        zeros = tl.zeros([BLOCK_P], tl.float32).to(w_P.dtype.element_ty)
        tl.store(w_P + rows, zeros, mask=place < 0)
    left = tl.where(place < 0, tl.arange(0, BLOCK_P), NONE)
    for _ in range(0, tl.sum((place < 0).to(tl.int32), axis=0)):
        row, left = _take_first(left)
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            at = (first.to(tl.int64) + row) * num_cols + cols
            nothing = tl.zeros([BLOCK_N], tl.float32).to(rows_PN.dtype.element_ty)
            tl.store(rows_PN + at, nothing, mask=cols < num_cols)


@triton.jit
def _copy_tokens(
    tokens_TN, row_map_P, probs_TE, lists_3P, first_G, rows_PN, w_P,
    num_rows, num_tokens, num_cols, num_experts, tokens_per_group,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same, token by token; the programs beyond the last token write the padding."""
    token = tl.program_id(0)
    if token >= num_tokens:
        first_row = (token - num_tokens) * BLOCK_P
        _zero_padding(row_map_P, rows_PN, w_P, first_row, num_rows, num_cols, BLOCK_P, BLOCK_N)
    else:
        first = tl.load(first_G + token // tokens_per_group)
        last = tl.load(first_G + token // tokens_per_group + 1)
        for start in range(first, last, BLOCK_L):
            entries, count = _entries_of(lists_3P, token, start, last, BLOCK_L)
            if w_P is not None:
                found = entries < NONE
                rows = tl.load(lists_3P + num_rows + entries, mask=found, other=0)
                experts = tl.load(lists_3P + num_rows + num_rows + entries, mask=found, other=0)
                probs_E = probs_TE + token.to(tl.int64) * num_experts
                w = tl.load(probs_E + experts, mask=found & (experts < num_experts), other=0.0)
                tl.store(w_P + rows, w, mask=found)
            for first_col in range(0, num_cols, BLOCK_N):
                cols = first_col + tl.arange(0, BLOCK_N)
                x_N = tokens_TN + token.to(tl.int64) * num_cols
                values = tl.load(x_N + cols, mask=cols < num_cols, other=0.0)
                left = entries
                for _ in range(0, count):
                    entry, left = _take_first(left)
                    row = _row(lists_3P, entry, num_rows)
                    tl.store(rows_PN + row * num_cols + cols, values, mask=cols < num_cols)


@triton.jit
def _weigh_columns(dout, y_N, dy_N, w, cols, num_cols):
    """dy = w dout in some columns of a row; dout y."""
    mask = cols < num_cols
    y = tl.load(y_N + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dy_N + cols, (dout * w).to(dy_N.dtype.element_ty), mask=mask)
    return dout * y


@triton.jit
def _weigh_tokens(
    dout_TN, y_PN, row_map_P, probs, lists_3P, first_G, dy_PN, dprobs,
    num_rows, num_tokens, num_cols, num_experts, tokens_per_group,
    BY: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    """dy[p] = w[p] dout[t]; dprobs is the sum of dout[t] y[p] over columns. Token by token."""
    token = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    if token >= num_tokens:
        first_row = (token - num_tokens) * BLOCK_P
        by_row = dprobs if BY == BY_ROW else None
        _zero_padding(row_map_P, dy_PN, by_row, first_row, num_rows, num_cols, BLOCK_P, BLOCK_N)
    else:
        experts = tl.arange(0, BLOCK_E)
        dprobs_E = tl.zeros([BLOCK_E], tl.float32)
        dout_N = dout_TN + token.to(tl.int64) * num_cols
        if WHOLE_ROWS:
            dout = tl.load(dout_N + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        first = tl.load(first_G + token // tokens_per_group)
        last = tl.load(first_G + token // tokens_per_group + 1)
        for start in range(first, last, BLOCK_L):
            entries, count = _entries_of(lists_3P, token, start, last, BLOCK_L)
            for _ in range(0, count):
                entry, entries = _take_first(entries)
                row = _row(lists_3P, entry, num_rows)
                w = _weight(probs, lists_3P, entry, token, row, num_rows, num_experts, BY)
                y_N, dy_N = y_PN + row * num_cols, dy_PN + row * num_cols
                if WHOLE_ROWS:
                    dots = _weigh_columns(dout, y_N, dy_N, w, cols, num_cols)
                else:
                    dots = tl.zeros([BLOCK_N], tl.float32)
                    for first_col in range(0, num_cols, BLOCK_N):
                        at = first_col + cols
                        dout = tl.load(dout_N + at, mask=at < num_cols, other=0.0).to(tl.float32)
                        dots += _weigh_columns(dout, y_N, dy_N, w, at, num_cols)
                dw = tl.sum(dots, axis=0)
                if BY == BY_ROW:
                    tl.store(dprobs + row, dw.to(dprobs.dtype.element_ty))
                else:
                    expert = _expert(lists_3P, entry, num_rows)
                    dprobs_E += tl.where(experts == expert, dw, 0.0)
        if BY == BY_EXPERT:
            at = token.to(tl.int64) * num_experts + experts
            tl.store(dprobs + at, dprobs_E.to(dprobs.dtype.element_ty), mask=experts < num_experts)


# -- launchers -----------------------------------------------------------------------------------


class _RowsOfTokens(NamedTuple):
    """The inverse of a row map, up to the order of tokens in a group."""

    first_G: Tensor
    """[groups + 1] int32: where the list of each group starts."""
    lists_3P: Tensor
    """[3, P] int32: token, row and expert of each entry; rows of a group ascend."""
    tokens_per_group: int


def _counting(num_items: int, num_buckets: int) -> dict[str, int]:
    """Blocks of the tiles that count items in buckets; 16 elements a thread, some of them int64."""
    block_b = next_power_of_2(num_buckets)
    block_i = min(MAX_ITEMS, max(1, COUNT_TILE // block_b), next_power_of_2(num_items))
    num_warps = 8 if block_i * block_b >= 2048 else 4
    return {"BLOCK_I": block_i, "BLOCK_B": block_b, "num_warps": num_warps}


def _runs(num_items: int, block: int) -> tuple[int, int]:
    """The number of programs that count, and the items of each, whole blocks."""
    per_program = ceil_div(ceil_div(num_items, block), NUM_BLOCKS) * block
    return ceil_div(num_items, per_program), per_program


def _rows_of_tokens(row_map_P: Tensor, num_tokens: int) -> _RowsOfTokens:
    num_rows = row_map_P.shape[0]
    if max(num_rows, num_tokens) > MOST_ROWS:
        raise ValueError(f"moe_permute: too many rows or tokens: {num_rows} and {num_tokens}")
    tokens_per_group = ceil_div(num_tokens, NUM_GROUPS)
    num_groups = ceil_div(num_tokens, tokens_per_group)
    blocks = _counting(num_rows, num_groups)
    num_programs, per_program = _runs(num_rows, blocks["BLOCK_I"])
    counts_CG = row_map_P.new_empty((num_programs, num_groups), dtype=torch.int32)
    first_G = row_map_P.new_empty(num_groups + 1, dtype=torch.int32)
    lists_3P = row_map_P.new_empty((3, num_rows), dtype=torch.int32)
    launch(
        _count_groups, (num_programs,),
        row_map_P, counts_CG, num_rows, num_tokens, num_groups, tokens_per_group, per_program,
        **blocks,
    )  # fmt: skip
    launch(
        _place_groups, (num_programs,),
        row_map_P, counts_CG, first_G, lists_3P, num_rows, num_tokens, num_groups,
        tokens_per_group, per_program, num_programs,
        BLOCK_C=blocks["BLOCK_I"], **blocks,
    )  # fmt: skip
    return _RowsOfTokens(first_G, lists_3P, tokens_per_group)


def _inverse_pays(row_map_P: Tensor, tokens: Tensor) -> bool:
    """Whether reading each token once saves more than its rows cost to find."""
    read_again = (row_map_P.shape[0] - tokens.shape[0]) * tokens.shape[1] * tokens.element_size()
    return read_again >= READ_ONCE_BYTES


def _list_block(num_rows: int) -> int:
    return min(GROUP_BLOCK, next_power_of_2(num_rows))


def _num_warps(num_elements: int) -> int:
    """Threads with 16 elements each, 4 to 8 warps."""
    return min(8, max(4, num_elements // 512))


def _copy(tokens: Tensor, row_map_P: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The token of each row, and its probability."""
    num_rows, (num_tokens, num_cols) = row_map_P.shape[0], tokens.shape
    w_P = None if probs is None else probs.new_empty(num_rows)
    rows = tokens.new_empty((num_rows, num_cols))
    if num_tokens == 0:
        return rows.zero_(), None if w_P is None else w_P.zero_()
    if num_rows == 0:
        return rows, w_P
    tokens, row_map_P = tokens.contiguous(), row_map_P.contiguous()
    if probs is not None:
        probs = probs.contiguous()
    num_experts = 0 if probs is None else probs.shape[1]
    if _inverse_pays(row_map_P, tokens):
        inverse = _rows_of_tokens(row_map_P, num_tokens)
        block_n = min(next_power_of_2(num_cols), ROW_BLOCK)
        launch(
            _copy_tokens, (num_tokens + ceil_div(num_rows, PADDING_BLOCK),),
            tokens, row_map_P, probs, inverse.lists_3P, inverse.first_G, rows, w_P,
            num_rows, num_tokens, num_cols, num_experts, inverse.tokens_per_group,
            BLOCK_L=_list_block(num_rows), BLOCK_P=PADDING_BLOCK, BLOCK_N=block_n,
            num_warps=_num_warps(block_n),
        )  # fmt: skip
        return rows, w_P
    block_n = min(next_power_of_2(num_cols), GATHER_BLOCK)
    block_r = min(8 * GATHER_BLOCK // block_n, 64)
    num_col_blocks = max(1, ceil_div(num_cols, block_n))
    launch(
        _gather_rows, (ceil_div(num_rows, block_r) * num_col_blocks,),
        tokens, row_map_P, probs, rows, w_P,
        num_rows, num_tokens, num_cols, num_experts, num_col_blocks,
        BLOCK_R=block_r, BLOCK_N=block_n, num_warps=_num_warps(block_r * block_n),
    )  # fmt: skip
    return rows, w_P


def _sum(
    rows: Tensor, row_map_P: Tensor, num_tokens: int, weights: Tensor | None,
    dweights_P: Tensor | None, dprobs: Tensor | None,
) -> Tensor:  # fmt: skip
    """The sum of each token's rows; fills `dprobs` with the sums of `dweights_P`."""
    num_rows, num_cols = rows.shape
    out = rows.new_empty((num_tokens, num_cols))
    if num_rows == 0 or num_tokens == 0:
        if dprobs is not None:
            dprobs.zero_()
        return out.zero_()
    if num_cols == 0 and dprobs is None:
        return out
    by_expert = weights is not None and weights.ndim == 2
    like = dprobs if weights is None else weights
    num_experts = like.shape[1] if like is not None and like.ndim == 2 else 0
    row_map_P = row_map_P.contiguous()
    inverse = _rows_of_tokens(row_map_P, num_tokens)
    block_n = min(next_power_of_2(num_cols), SUM_BLOCK)
    num_col_blocks = max(1, ceil_div(num_cols, block_n))
    launch(
        _sum_rows, (num_tokens * num_col_blocks,),
        rows.contiguous(), None if weights is None else weights.contiguous(),
        None if dweights_P is None else dweights_P.contiguous(),
        inverse.lists_3P, inverse.first_G, out, dprobs,
        num_rows, num_cols, num_experts, inverse.tokens_per_group, num_col_blocks,
        BY=0 if weights is None else BY_EXPERT.value if by_expert else BY_ROW.value,
        BLOCK_L=_list_block(num_rows), BLOCK_N=block_n,
        BLOCK_E=1 if dprobs is None else next_power_of_2(num_experts),
        num_warps=_num_warps(2 * block_n), maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out


def _check_map(op: str, name: str, rows: Tensor, row_map: Tensor, num_rows: int) -> None:
    """Raise for what would be read outside of memory."""
    if row_map.ndim != 1 or row_map.dtype != torch.int64:
        raise ValueError(
            f"{op}: row_map must be torch.int64 of shape [P], got {row_map.dtype} "
            f"{list(row_map.shape)}"
        )
    if rows.ndim != 2 or rows.shape[0] != num_rows:
        raise ValueError(f"{op}: {name} must have {num_rows} rows, got {list(rows.shape)}")


def _check_probs(op: str, probs: Tensor, num_rows: int, num_tokens: int) -> None:
    by_expert = probs.ndim == 2 and probs.shape[0] == num_tokens
    if not by_expert and probs.shape != (num_rows,):
        raise ValueError(
            f"{op}: probs must have shape [{num_tokens}, E] or [{num_rows}], one for each row, "
            f"got {list(probs.shape)}"
        )


def row_map(routing_map: Tensor, num_rows: int, capacity: int, align: int) -> Tensor:
    """`accel::moe_row_map`."""
    if routing_map.ndim != 2 or routing_map.dtype != torch.bool or num_rows < 0 or align < 1:
        raise ValueError(
            "moe_row_map: routing_map must be bool of shape [T, E], num_rows not negative and align "
            f"1 or more, got {routing_map.dtype} {list(routing_map.shape)}, {num_rows} and {align}"
        )
    num_tokens, num_experts = routing_map.shape
    if num_tokens == 0 or num_experts == 0 or num_rows == 0:
        return routing_map.new_full((num_rows,), -1, dtype=torch.int64)
    room = capacity if capacity >= 0 else align
    if max(num_rows, (num_tokens + room) * num_experts) > MOST_ROWS:
        raise ValueError(
            f"moe_row_map in Triton counts rows to {MOST_ROWS}, got {num_tokens} tokens for {num_experts} "
            f"experts in {num_rows} rows with capacity {capacity} and align {align}"
        )
    routing_map = routing_map.contiguous()
    row_map_P = routing_map.new_empty(num_rows, dtype=torch.int64)
    blocks = _counting(num_tokens, num_experts)
    num_programs, per_program = _runs(num_tokens, blocks["BLOCK_I"])
    counts_CE = routing_map.new_empty((num_programs, num_experts), dtype=torch.int32)
    launch(
        _count_routed, (num_programs,),
        routing_map, counts_CE, row_map_P, num_tokens, num_experts, num_rows, per_program,
        ceil_div(num_rows, num_programs), **blocks,
    )  # fmt: skip
    launch(
        _place_routed, (num_programs,),
        routing_map, counts_CE, row_map_P, num_tokens, num_experts, num_rows, per_program,
        num_programs, capacity, align,
        HAS_CAPACITY=capacity >= 0, BLOCK_C=blocks["BLOCK_I"], **blocks,
    )  # fmt: skip
    return row_map_P


def permute_forward(x: Tensor, row_map: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """`accel::moe_permute_fwd`."""
    _check_map("moe_permute", "x", x, row_map, x.shape[0])
    if probs is not None and (probs.ndim != 2 or probs.shape[0] != x.shape[0]):
        raise ValueError(
            f"moe_permute: probs must have shape [{x.shape[0]}, E], got {list(probs.shape)}"
        )
    y, w_P = _copy(x, row_map, probs)
    return y, x.new_empty(0) if w_P is None else w_P


def permute_backward(
    dy: Tensor, dw: Tensor, row_map: Tensor, num_tokens: int, num_experts: int,
    probs_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`accel::moe_permute_bwd`."""
    _check_map("moe_permute backward", "dy", dy, row_map, row_map.shape[0])
    if num_experts == 0:
        dx = _sum(dy, row_map, num_tokens, None, None, None)
        return dx, dy.new_empty(0, dtype=probs_dtype)
    if dw.shape != row_map.shape:
        raise ValueError(
            "moe_permute backward: the gradient of the permuted probs must have shape "
            f"{list(row_map.shape)}, got {list(dw.shape)}"
        )
    dprobs = dy.new_empty((num_tokens, num_experts), dtype=probs_dtype)
    return _sum(dy, row_map, num_tokens, None, dw, dprobs), dprobs


def unpermute_forward(
    y: Tensor, row_map: Tensor, num_tokens: int, probs: Tensor | None
) -> Tensor:  # fmt: skip
    """`accel::moe_unpermute_fwd`."""
    _check_map("moe_unpermute", "y", y, row_map, row_map.shape[0])
    if probs is not None:
        _check_probs("moe_unpermute", probs, row_map.shape[0], num_tokens)
    return _sum(y, row_map, num_tokens, probs, None, None)


def unpermute_backward(dout: Tensor, row_map: Tensor) -> Tensor:
    """`accel::moe_unpermute_bwd`."""
    _check_map("moe_unpermute backward", "dout", dout, row_map, dout.shape[0])
    return _copy(dout, row_map, None)[0]


def unpermute_probs_backward(
    dout: Tensor, y: Tensor, row_map: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """`accel::moe_unpermute_probs_bwd`."""
    op = "moe_unpermute backward"
    num_rows, num_tokens = row_map.shape[0], dout.shape[0]
    _check_map(op, "dout", dout, row_map, num_tokens)
    if y.shape != (num_rows, dout.shape[1]) or y.dtype != dout.dtype:
        raise ValueError(
            f"{op}: y must be {dout.dtype} of shape {[num_rows, dout.shape[1]]}, got {y.dtype} "
            f"{list(y.shape)}"
        )
    _check_probs(op, probs, num_rows, num_tokens)
    dy, dprobs = y.new_empty(y.shape), probs.new_empty(probs.shape)
    num_cols = y.shape[1]
    if num_rows == 0 or num_tokens == 0 or num_cols == 0:
        return dy.zero_(), dprobs.zero_()
    row_map = row_map.contiguous()
    inverse = _rows_of_tokens(row_map, num_tokens)
    by_expert = probs.ndim == 2
    num_experts = probs.shape[1] if by_expert else 0
    whole = num_cols <= ROW_BLOCK
    block_n = next_power_of_2(num_cols) if whole else LONG_ROW_BLOCK
    launch(
        _weigh_tokens, (num_tokens + ceil_div(num_rows, PADDING_BLOCK),),
        dout.contiguous(), y.contiguous(), row_map, probs.contiguous(), inverse.lists_3P,
        inverse.first_G, dy, dprobs,
        num_rows, num_tokens, num_cols, num_experts, inverse.tokens_per_group,
        BY=BY_EXPERT.value if by_expert else BY_ROW.value, BLOCK_L=_list_block(num_rows),
        BLOCK_P=PADDING_BLOCK, BLOCK_N=block_n, BLOCK_E=next_power_of_2(num_experts),
        WHOLE_ROWS=whole, num_warps=_num_warps(block_n) if whole and block_n < ROW_BLOCK else 16,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return dy, dprobs


KERNELS = {
    "accel::moe_row_map": row_map,
    "accel::moe_permute_fwd": permute_forward,
    "accel::moe_permute_bwd": permute_backward,
    "accel::moe_unpermute_fwd": unpermute_forward,
    "accel::moe_unpermute_bwd": unpermute_backward,
    "accel::moe_unpermute_probs_bwd": unpermute_probs_backward,
}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Mixtral's, Qwen3's and DeepSeek-V3's layers of experts, and rows longer than a block."""
    for num_tokens, num_cols, num_experts, topk in (
        (8192, 4096, 8, 2),
        (8192, 2048, 128, 8),
        (4096, 7168, 256, 8),
        (4096, 12288, 16, 4),
    ):
        name = f"N={num_cols} E={num_experts}"
        num_rows = num_tokens * topk
        x = torch.empty(num_tokens, num_cols, dtype=torch.bfloat16, device="meta")
        y = torch.empty(num_rows, num_cols, dtype=torch.bfloat16, device="meta")
        probs = torch.empty(num_tokens, num_experts, device="meta")
        w_P = torch.empty(num_rows, device="meta")
        rows = torch.empty(num_rows, dtype=torch.int64, device="meta")
        routing_map = torch.empty(num_tokens, num_experts, dtype=torch.bool, device="meta")
        yield name, row_map, (routing_map, num_rows, -1, 1)
        yield name, permute_forward, (x, rows, probs)
        yield name, permute_backward, (y, w_P, rows, num_tokens, num_experts, w_P.dtype)
        yield name, unpermute_forward, (y, rows, num_tokens, None)
        yield name, unpermute_probs_backward, (x, y, rows, probs)
    yield name, row_map, (routing_map, num_rows, num_rows // num_experts, 1)
    yield name, permute_forward, (x, rows[:num_tokens], None)
    yield name, unpermute_forward, (y, rows, num_tokens, probs)
    yield name, unpermute_forward, (y, rows, num_tokens, w_P)
    yield name, unpermute_probs_backward, (x, y, rows, w_P)
