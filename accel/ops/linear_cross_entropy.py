"""Output projection and cross entropy in one, without ever holding the logits.

    forward     x = h W^T (piece by piece),  loss as in `cross_entropy`
    backward    x again, then dx over it;    dh = dx W,  dW = dx^T h

Letters     T  rows of h;   H  hidden size, the columns of h and W;   V  the vocabulary, rows of W
Dtypes      h, W, dh, dW: float32, bfloat16 or float16, all the same. x and dx have it too, as they
            would have whole. loss: float32. Sums over pieces: float32.
Pieces      [rows, tokens] of x, by `PIECES` of the device: at most as many rows (the backward
            where it returns dW: T) by as many tokens, or `tokens_per_chunk`. The products are
            torch's own (on CUDA cuBLAS) and `gemm_accumulate`, what is between them the kernels of
            `cross_entropy`. No step waits for the device.
Saved       h, W, the target and 8 T bytes.
Cost        8 T H V flops where whole logits need 6: the gradient of each row's loss is known only in
            the backward, and dW sums over rows, so x must be made twice. What it buys is memory:
            beyond dh and dW, one piece of x, a copy of a piece of h or W, and one block of rows of dh.
            dh is summed in fp32 where it lies; its storage is that block larger than it. Of a frozen h
            or W neither product nor gradient is made: 6 T H V flops.
Rounding    bf16: products are added to the fp32 sums as they are. Where `gemm_accumulate` has no
            kernel, as for fp16, the 16-bit product of each piece is rounded before it is added.
Autograd    As in `cross_entropy`; and the backward adds to a buffer that is none of the op's arguments.
Ranks       As in `cross_entropy`: W holds this rank's tokens, h is the same on all. dh is this
            rank's share, which the caller sums over the ranks (or scatters, in sequence parallel).
Order       Fixed by the shapes; the products keep what torch.mm promises.
Limits      `unsupported_reason`. A second derivative raises.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel.ops._chunks import chunks_of
from accel.ops._dispatch import log_fallback, refuse_derivative, unsupported
from accel.ops.cross_entropy import (
    check_smoothing,
    check_target_tensor,
    combine,
    cross_entropy_ref,
    forget_lost_differences,
    kept,
    loss_of,
    shard,
    smoothing_of,
)
from accel.ops.gemm_accumulate import add_product
from accel.ops.gemm_accumulate import unsupported_reason as unsupported_sum

__all__ = ["linear_cross_entropy", "linear_cross_entropy_ref", "unsupported_reason"]


class _Piece(NamedTuple):
    """The most of the logits that is there at a time."""

    rows: int
    tokens: int
    rows_at_once: int
    """Of h, in one product that makes logits."""


PIECES = {"cpu": _Piece(1024, 1024, 512), "cuda": _Piece(8192, 4096, 8192)}
"""By type of device; others as CUDA.

CPU: without AMX, from 512 rows on, more make the products no faster (bf16, H 2048, 2 threads of an AMD
Zen 4: 416 to 441 GFLOP/s for 512 x 1024, 387 to 437 for 2048 x 2048, 336 to 407 for 128 x 32000). With AMX
(2 threads of an Intel Xeon) they do, as W and the buffer are read less often. A step at T 2048, H 2048, V
32000 there, and what it holds (two runs, in turns):

    rows x tokens    512 x 1024       1024 x 1024      1024 x 1024, at once    1024 x 1536      2048 x 1024
    ms               749 to 788       659 to 707       625 to 647              640 to 683       630 to 669
    MiB              15.1             18.1             20.1                    21.1             28.0

Of 1024 rows at once oneDNN holds copies of 6 MiB, of 512 rows 4. With fewer than 1024 tokens its products of
1024 rows are slow: a step takes 903 ms with 768, 921 with 512.

CUDA: a piece is 64 MiB of bf16, where V 131072 has 2 GiB of logits. On an H200 (bf16, T 8192, H 4096, V
131072) larger ones are no faster: its power sets the products' rate, and the fp32 sums hide behind them.

    rows x tokens    8192 x 4096    8192 x 8192    8192 x 16384    8192 x 32768    4096 x 16384
    ms               54.5           54.6           54.4            54.7            55.2
"""


def _piece(device: torch.device) -> _Piece:
    return PIECES.get(device.type, PIECES["cuda"])


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    check_target: bool = True,
    grad_buffer: Tensor | None = None,
) -> Tensor:
    """The definition of correct, with whole logits. Same contract as `linear_cross_entropy`."""
    if grad_buffer is not None:
        weight = _AddTo.apply(weight, grad_buffer)
    return cross_entropy_ref(
        hidden @ weight.t(),
        target,
        group=group,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        check_target=check_target,
    )


class _AddTo(torch.autograd.Function):
    """Identity whose gradient is added to a buffer and goes no further."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None]:
        ctx.buffer += dx
        return None, None


def unsupported_reason(hidden: Tensor, weight: Tensor, target: Tensor) -> str | None:
    """Why `linear_cross_entropy` takes the reference for valid inputs; None if it does not."""
    return unsupported("accel::cross_entropy_stats", hidden)


_piece_stats = torch.ops.accel.cross_entropy_stats.default
_piece_backward = torch.ops.accel.cross_entropy_bwd_.default


class _Logits:
    """Pieces of h W^T, one after the other in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, num_rows: int, num_tokens: int) -> None:
        self.hidden, self.weight = hidden, weight
        self.rows_at_once = _piece(hidden.device).rows_at_once
        self.memory = hidden.new_empty(min(num_rows, len(hidden)) * min(num_tokens, len(weight)))

    def make(self, rows: slice, tokens: slice) -> Tensor:
        num_rows, num_tokens = rows.stop - rows.start, tokens.stop - tokens.start
        piece = self.memory[: num_rows * num_tokens].view(num_rows, num_tokens)
        hidden, weight = self.hidden[rows], self.weight[tokens]
        for part in chunks_of(num_rows, self.rows_at_once):
            torch.mm(hidden[part], weight.t(), out=piece[part])
        return piece


class _RoundedSums:
    """Sums [T, H] in fp32, rounded to the dtype of `like` where they lie, block of rows by block of rows.

    The sums of a block begin where its result will. They are twice as long where the dtype has 16 bits,
    and reach into the place of the next block, which comes later: what is held beside the result is as
    much as the result of one block.
    """

    def __init__(self, like: Tensor, rows_per_block: int) -> None:
        num_rows, self.width = like.shape
        self.ratio = torch.float32.itemsize // like.dtype.itemsize
        reach = (self.ratio - 1) * min(rows_per_block, num_rows)
        self.memory = like.new_empty((num_rows + reach) * self.width)
        self.result = self.memory[: like.numel()].view(like.shape)

    def _sums(self, rows: slice) -> Tensor:
        first, num_rows = rows.start * self.width, rows.stop - rows.start
        words = self.memory[first : first + num_rows * self.width * self.ratio]
        return words.view(torch.float32).view(num_rows, self.width)

    def zeros(self, rows: slice) -> Tensor:
        """The sums of one block, to be added to until they are rounded. Blocks come in their order."""
        return self._sums(rows).zero_()

    def round_(self, rows: slice) -> None:
        if self.ratio == 1:
            return
        sums, result = self._sums(rows), self.result[rows]
        result[:1] = sums[:1].clone()
        # Rows n to 2n - 1 of the result lie over rows n/2 to n - 1 of the sums, which have been read.
        done = 1
        while done < len(sums):
            result[done : 2 * done] = sums[done : 2 * done]
            done *= 2


torch.library.define(
    "accel::linear_cross_entropy_stats",
    "(Tensor hidden, Tensor weight, Tensor target, int vocab_start, int vocab_size,"
    " int? ignore_index, bool with_sum, int tokens_per_chunk) -> Tensor stats",
)
torch.library.define(
    "accel::linear_cross_entropy_bwd",
    "(Tensor hidden, Tensor weight, Tensor target, Tensor stats, Tensor dloss, int vocab_start,"
    " int vocab_size, float smoothing, int tokens_per_chunk, bool with_dhidden=True,"
    " bool with_dweight=True) -> (Tensor dhidden, Tensor dweight)",
)


@torch.library.register_fake("accel::linear_cross_entropy_stats")
def _stats_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int | None,
    with_sum: bool,
    tokens_per_chunk: int,
) -> Tensor:
    return hidden.new_empty((4 if with_sum else 3, *target.shape), dtype=torch.float32)


@torch.library.impl("accel::linear_cross_entropy_stats", "CompositeExplicitAutograd")
def _stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int | None,
    with_sum: bool,
    tokens_per_chunk: int,
) -> Tensor:
    """The stats of `accel::cross_entropy_stats` for h W^T; h is [T, H], the target [T]."""
    chunks = chunks_of(len(weight), tokens_per_chunk)
    stats_CKT = hidden.new_empty(
        (len(chunks), 4 if with_sum else 3, len(target)), dtype=torch.float32
    )
    rows_per_block = _piece(hidden.device).rows
    logits = _Logits(hidden, weight, rows_per_block, tokens_per_chunk)
    for rows in chunks_of(len(target), rows_per_block):
        checked = vocab_size  # by the first chunk, for all
        for stats_KT, tokens in zip(stats_CKT, chunks, strict=True):
            piece = logits.make(rows, tokens)
            first = vocab_start + tokens.start
            stats_KT[:, rows] = _piece_stats(
                piece, target[rows], first, checked, ignore_index, with_sum
            )
            checked = 0
    # Counted on the device: a tensor made of a list would be copied there, and waited for.
    starts_C1 = torch.arange(0, len(weight), tokens_per_chunk, device=hidden.device).unsqueeze(1)
    sizes_C1 = (len(weight) - starts_C1).clamp(max=tokens_per_chunk)
    local = target - vocab_start
    is_here = (local >= 0) & (local < len(weight))
    return _merge(stats_CKT, sizes_C1, (local * is_here) // tokens_per_chunk, is_here)


def _merge(stats_CKT: Tensor, sizes_C1: Tensor, chunk_T: Tensor, is_here_T: Tensor) -> Tensor:
    """The stats of all chunks together, with the chunk that has the target, if one `is_here`."""
    stats = stats_CKT[0].clone()
    stats[0] = stats_CKT[:, 0].amax(0)
    shift_CT = stats_CKT[:, 0] - stats[0]
    forget_lost_differences(stats_CKT, dim=1)
    stats[1] = (stats_CKT[:, 1] * shift_CT.exp()).sum(0)
    target_logit_CT = stats_CKT[:, 2] + shift_CT
    stats[2] = target_logit_CT.gather(0, chunk_T.unsqueeze(0))[0].masked_fill(~is_here_T, 0.0)
    if len(stats) == 4:
        stats[3] = (stats_CKT[:, 3] + sizes_C1 * shift_CT).sum(0)
    return stats


@torch.library.register_fake("accel::linear_cross_entropy_bwd")
def _backward_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
    tokens_per_chunk: int,
    with_dhidden: bool = True,
    with_dweight: bool = True,
) -> tuple[Tensor, Tensor]:
    dhidden = hidden.new_empty(hidden.shape) if with_dhidden else _no_columns(hidden)
    return dhidden, torch.empty_like(weight) if with_dweight else _no_columns(weight)


def _no_columns(like: Tensor) -> Tensor:
    """What stands for a gradient that nobody wants."""
    return like.new_empty(len(like), 0)


@torch.library.impl("accel::linear_cross_entropy_bwd", "CompositeExplicitAutograd")
def _backward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
    tokens_per_chunk: int,
    with_dhidden: bool = True,
    with_dweight: bool = True,
) -> tuple[Tensor, Tensor]:
    """dh [T, H] and dW [V, H], each product of dW made once for all rows; no columns of one not wanted."""
    if not with_dweight:
        options = vocab_start, vocab_size, smoothing, tokens_per_chunk
        call = hidden, weight, target, stats, dloss, *options
        dhidden = _backward_into(None, with_dhidden, *call)
        return dhidden, _no_columns(weight)
    logits = _Logits(hidden, weight, len(hidden), tokens_per_chunk)
    rows = slice(0, len(hidden))
    sums = _RoundedSums(hidden if with_dhidden else _no_columns(hidden), len(hidden))
    dhidden_sum = sums.zeros(rows)
    dweight = torch.empty_like(weight)
    for tokens in chunks_of(len(weight), tokens_per_chunk):
        dlogits = logits.make(rows, tokens)
        first = vocab_start + tokens.start
        _piece_backward(dlogits, target, stats, dloss, first, vocab_size, smoothing)
        if with_dhidden:
            _add_product(dhidden_sum, dlogits, weight[tokens])
        torch.mm(dlogits.t(), hidden, out=dweight[tokens])
    sums.round_(rows)
    return sums.result, dweight


def _backward_into(
    grad_buffer: Tensor | None,
    with_dhidden: bool,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
    tokens_per_chunk: int,
) -> Tensor:
    """dh as `_backward`; dW is added to the buffer, if there is one, block of rows by block of rows."""
    rows_per_block = _piece(hidden.device).rows
    logits = _Logits(hidden, weight, rows_per_block, tokens_per_chunk)
    sums = _RoundedSums(hidden if with_dhidden else _no_columns(hidden), rows_per_block)
    for rows in chunks_of(len(hidden), rows_per_block):
        dhidden_sum = sums.zeros(rows)
        block_stats = stats[:, rows].contiguous()
        for tokens in chunks_of(len(weight), tokens_per_chunk):
            dlogits = logits.make(rows, tokens)
            first = vocab_start + tokens.start
            _piece_backward(
                dlogits, target[rows], block_stats, dloss[rows], first, vocab_size, smoothing
            )
            if with_dhidden:
                _add_product(dhidden_sum, dlogits, weight[tokens])
            if grad_buffer is not None:
                _add_product(grad_buffer[tokens], dlogits.t(), hidden[rows])
        sums.round_(rows)
    return sums.result


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`; where no kernel adds 16-bit products to fp32, each is rounded before."""
    if total.dtype == a.dtype or unsupported_sum(total, a, b) is None:
        add_product(total, a, b)
    else:
        total += torch.mm(a, b)


refuse_derivative("accel::linear_cross_entropy_bwd")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        group: dist.ProcessGroup | None,
        label_smoothing: float,
        ignore_index: int | None,
        check_target: bool,
        tokens_per_chunk: int,
        grad_buffer: Tensor | None,
    ) -> Tensor:
        vocab_start, vocab_size = shard(len(weight), group)
        smoothing = smoothing_of(label_smoothing, vocab_size)
        checked = vocab_size if check_target else 0
        stats = torch.ops.accel.linear_cross_entropy_stats(
            hidden,
            weight,
            target,
            vocab_start,
            checked,
            ignore_index,
            smoothing > 0,
            tokens_per_chunk,
        )
        if group is not None:
            stats = combine(stats, target, vocab_start, len(weight), group)
        ctx.save_for_backward(hidden, weight, target, kept(stats))
        ctx.options = vocab_start, vocab_size, smoothing, tokens_per_chunk
        ctx.ignore_index = ignore_index
        # Not saved for the backward: it is added to in place by whoever shares it.
        ctx.grad_buffer = grad_buffer
        return loss_of(stats, target, vocab_size, smoothing, ignore_index)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, stats = ctx.saved_tensors
        if ctx.ignore_index is not None:
            dloss = dloss.masked_fill(target == ctx.ignore_index, 0.0)
        dloss = dloss.contiguous()
        call = hidden, weight, target, stats, dloss, *ctx.options
        with_dhidden, with_dweight, *_ = ctx.needs_input_grad
        dweight = None
        if ctx.grad_buffer is None or not with_dweight:
            dhidden, dweight = torch.ops.accel.linear_cross_entropy_bwd(
                *call, with_dhidden, with_dweight
            )
        elif torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy: a second derivative cannot be had with a grad_buffer"
            )
        else:
            with torch.no_grad():
                dhidden = _backward_into(ctx.grad_buffer, with_dhidden, *call)
        dhidden = dhidden if with_dhidden else None
        dweight = dweight if with_dweight else None
        return dhidden, dweight, None, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    check_target: bool = True,
    tokens_per_chunk: int | None = None,
    grad_buffer: Tensor | None = None,
) -> Tensor:
    """`-log softmax(hidden @ weight.t())[target]` of each row.

    Args:
        hidden: `[..., H]`, any floating dtype.
        weight: `[V, H]`, the dtype and device of hidden. With a group, this rank's tokens: rank r
            holds those from r V on.
        target, group, label_smoothing, ignore_index, check_target: see `cross_entropy`.
        tokens_per_chunk: how many columns of the logits exist at a time; None: `PIECES` says.
        grad_buffer: `[V, H]` in `torch.float32`, contiguous. The backward adds dW to it, unless weight
            is frozen, and hands none to autograd (what Megatron calls main_grad). Memory is then bounded
            in T too. Its sums are fp32. bfloat16 products are added as they are where `gemm_accumulate`
            has a kernel; float16 ones, and bfloat16 ones on a CPU without AVX-512, are rounded to 16
            bits, piece by piece, before they are added.

    Returns:
        `[...]`, `torch.float32` (`torch.float64` for float64 inputs). With a group, the gradient
        of hidden is this rank's share of it, to be summed over the group.

    Raises:
        ValueError: an input of the wrong shape, dtype, device or range.
        IndexError: a target outside the vocabulary (on CUDA an assertion, as in `cross_entropy`).

    Where `unsupported_reason` has something to say, that is logged once and
    `linear_cross_entropy_ref`, with whole logits, computes instead.
    """
    if tokens_per_chunk is None:
        tokens_per_chunk = _piece(hidden.device).tokens
    _check_inputs(hidden, weight, target, label_smoothing, group, tokens_per_chunk, grad_buffer)
    target = target.long()
    if reason := unsupported_reason(hidden, weight, target):
        log_fallback("linear_cross_entropy", reason)
        return linear_cross_entropy_ref(
            hidden,
            weight,
            target,
            group=group,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            check_target=check_target,
            grad_buffer=grad_buffer,
        )
    loss = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        target.reshape(-1),
        group,
        label_smoothing,
        ignore_index,
        check_target,
        tokens_per_chunk,
        grad_buffer,
    )
    return loss.view(target.shape)


def _check_inputs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float,
    group: dist.ProcessGroup | None,
    tokens_per_chunk: int,
    grad_buffer: Tensor | None,
) -> None:
    op = "linear_cross_entropy"
    if not hidden.is_floating_point():
        raise ValueError(f"{op}: hidden must be a floating dtype, got {hidden.dtype}")
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(
            f"{op}: hidden must have shape [..., H] with H >= 1, got {list(hidden.shape)}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) == 0:
        raise ValueError(
            f"{op}: weight must have shape [V, {hidden.shape[-1]}] with V >= 1, for hidden "
            f"{list(hidden.shape)}, got {list(weight.shape)}"
        )
    if weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise ValueError(
            f"{op}: weight must be {hidden.dtype} on {hidden.device} like hidden, got "
            f"{weight.dtype} on {weight.device}"
        )
    check_target_tensor(op, "hidden", hidden, target)
    check_smoothing(op, label_smoothing, shard(len(weight), group)[1])
    if tokens_per_chunk < 1:
        raise ValueError(f"{op}: tokens_per_chunk must be >= 1, got {tokens_per_chunk}")
    if grad_buffer is not None and (
        grad_buffer.shape != weight.shape
        or grad_buffer.dtype != torch.float32
        or grad_buffer.device != weight.device
        or grad_buffer.requires_grad
    ):
        raise ValueError(
            f"{op}: grad_buffer must be torch.float32 {list(weight.shape)} on {weight.device} "
            f"without requires_grad, got {grad_buffer.dtype} {list(grad_buffer.shape)} on "
            f"{grad_buffer.device}"
        )
