"""Softmax cross entropy of logits that may be split over ranks along the vocabulary.

    forward     m = max x,  S = sum e^(x - m)      loss = log S - (x[target] - m)
    backward    p = e^(x - m) / S                  dx = dloss (p - [column is the target])

Smoothing   With a = label_smoothing and s = a V / (V - 1), as in Megatron:
            loss' = (1 - s) loss - s mean(log p),  dx = dloss (p - (1 - s) [target] - s / V).
Letters     T  rows, the product of all dimensions of x but the last;   V  the vocabulary
Dtypes      x, dx: float32, bfloat16 or float16. loss, dloss: float32, as is all arithmetic.
Saved       x, the target and 8 T bytes: m and S. No softmax.
Moved       forward T V elements, backward 2 T V: nothing is read twice from memory.
In place    With `inplace` the backward writes dx over x, so that no second [T, V] is ever held. The
            forward leaves x alone. Afterwards x counts as modified: whoever else saved it for a
            backward gets autograd's error, as does a second backward; plain reads see dx.
Autograd    A `torch.autograd.Function` around the ops of `torch.library`, not `register_autograd`: what
            has a gradient is the loss, which the forward makes of its op's result once it has spoken to
            the other ranks, and a process group is no argument of an op.
Ranks       Each holds V / ranks consecutive tokens of the same rows. Two small all-reduces in the
            forward, of T and 2 T floats (3 T with smoothing); none in the backward.
Order       CPU: every row is one thread's work, in an order that V alone fixes: any number of threads
            gives the same bits. CUDA: fixed by T, V, the number of processors, which say into how
            many parts rows are split, and in CUDA C++ by where x begins within 16 bytes.
Limits      `unsupported_reason`. Non-contiguous x is copied first. A second derivative raises.
            Rows whose dloss is 0 get dx = 0 without a look at x.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.ops._dispatch import log_fallback, refuse_derivative, unsupported
from accel.ops._overwriting import overwritable

__all__ = ["cross_entropy", "cross_entropy_ref", "unsupported_reason"]


def cross_entropy_ref(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    check_target: bool = True,
) -> Tensor:
    """The definition of correct, in plain torch, on any device. Same contract as `cross_entropy`.

    The target is looked up without indexed assignment (`masked_target *= ~outside`, MindSpeed's
    rewrite of Megatron's), which is a host synchronisation on Ascend.
    """
    vocab_start, vocab_size = shard(logits.shape[-1], group)
    if check_target:
        check_target_range(target, vocab_size, ignore_index)
    x = logits if logits.dtype == torch.float64 else logits.float()
    shift = _all_reduce_max(x.detach().amax(-1), group)
    x = x - shift.unsqueeze(-1)
    outside = (target < vocab_start) | (target >= vocab_start + x.shape[-1])
    masked_target = (target - vocab_start) * ~outside
    target_logit = x.gather(-1, masked_target.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
    log_sum = _all_reduce_sum(x.exp().sum(-1), group).log()
    loss = log_sum - _all_reduce_sum(target_logit, group)
    if label_smoothing > 0:
        smoothing = smoothing_of(label_smoothing, vocab_size)
        mean_log_prob = _all_reduce_sum(x.sum(-1), group) / vocab_size - log_sum
        loss = (1 - smoothing) * loss - smoothing * mean_log_prob
    return loss if ignore_index is None else loss.masked_fill(target == ignore_index, 0.0)


def unsupported_reason(logits: Tensor, target: Tensor) -> str | None:
    """Why `cross_entropy` takes the reference for valid inputs; None if it takes the kernel."""
    return unsupported("accel::cross_entropy_stats", logits)


torch.library.define(
    "accel::cross_entropy_stats",
    "(Tensor logits, Tensor target, int vocab_start, int vocab_size, int? ignore_index,"
    " bool with_sum) -> Tensor stats",
)
torch.library.define(
    "accel::cross_entropy_bwd",
    "(Tensor logits, Tensor target, Tensor stats, Tensor dloss, int vocab_start, int vocab_size,"
    " float smoothing) -> Tensor dlogits",
)
torch.library.define(
    "accel::cross_entropy_bwd_",
    "(Tensor(a!) logits, Tensor target, Tensor stats, Tensor dloss, int vocab_start,"
    " int vocab_size, float smoothing) -> ()",
)
_stats = torch.ops.accel.cross_entropy_stats.default
_backward = torch.ops.accel.cross_entropy_bwd.default
_backward_inplace = torch.ops.accel.cross_entropy_bwd_.default


@torch.library.register_fake("accel::cross_entropy_stats")
def _stats_fake(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int | None,
    with_sum: bool,
) -> Tensor:
    """[3 or 4, T]: max, sum e^(x - max), x[target] - max (0 if elsewhere), sum (x - max).

    All of this shard alone. Raises IndexError (CUDA: fails an assertion on the device) for a target
    that is neither below `vocab_size`, the size of the whole vocabulary, nor `ignore_index`;
    `vocab_size` 0 checks nothing.
    """
    return logits.new_empty((4 if with_sum else 3, *target.shape), dtype=torch.float32)


@torch.library.register_fake("accel::cross_entropy_bwd")
def _backward_fake(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("accel::cross_entropy_bwd_")
def _backward_inplace_fake(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> None:
    return None


refuse_derivative("accel::cross_entropy_bwd")


def combine(stats: Tensor, target: Tensor, vocab_start: int, num_tokens: int, group: Any) -> Tensor:
    """The stats of the whole vocabulary from those of each rank's shard of `num_tokens`."""
    local_max = stats[0]
    stats = forget_lost_differences(stats.clone())
    _all_reduce_max(stats[0], group)
    shift = local_max - stats[0]
    stats[1] *= shift.exp()
    is_here = (target >= vocab_start) & (target < vocab_start + num_tokens)
    stats[2] += shift.masked_fill(~is_here, 0.0)
    if stats.shape[0] == 4:
        stats[3] += num_tokens * shift
    dist.all_reduce(stats[1:], group=group)
    return stats


def forget_lost_differences(stats: Tensor, dim: int = 0) -> Tensor:
    """In place, 0 for each difference to a maximum of -inf: NaN, where that to the maximum of several shards
    is what its own is further down, -inf.

    Args:
        dim: along which the 3 or 4 stats lie.
    """
    lost = stats.select(dim, 0) == -torch.inf
    stats.narrow(dim, 2, stats.shape[dim] - 2).masked_fill_(lost.unsqueeze(dim), 0.0)
    return stats


def kept(stats: Tensor) -> Tensor:
    """What the backward reads of the stats, in memory of its own: max and sum e^(x - max)."""
    return stats[:2].clone()


def loss_of(
    stats: Tensor, target: Tensor, vocab_size: int, smoothing: float, ignore_index: int | None
) -> Tensor:
    """The loss of each row from the stats of the whole vocabulary."""
    log_sum = stats[1].log()
    loss = log_sum - stats[2]
    if smoothing > 0:
        loss = (1 - smoothing) * loss - smoothing * (stats[3] / vocab_size - log_sum)
    return loss if ignore_index is None else loss.masked_fill(target == ignore_index, 0.0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: dist.ProcessGroup | None,
        label_smoothing: float,
        ignore_index: int | None,
        check_target: bool,
        inplace: bool,
    ) -> Tensor:
        vocab_start, vocab_size = shard(logits.shape[-1], group)
        smoothing = smoothing_of(label_smoothing, vocab_size)
        checked = vocab_size if check_target else 0
        stats = _stats(logits, target, vocab_start, checked, ignore_index, smoothing > 0)
        if group is not None:
            stats = combine(stats, target, vocab_start, logits.shape[-1], group)
        ctx.save_for_backward(logits, target, kept(stats))
        ctx.shard = vocab_start, vocab_size, smoothing
        ctx.ignore_index, ctx.inplace, ctx.overwritten = ignore_index, inplace, False
        return loss_of(stats, target, vocab_size, smoothing, ignore_index)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(
                "cross_entropy: the first backward wrote the gradient over the logits; use "
                "inplace=False to run backward twice"
            )
        logits, target, stats = ctx.saved_tensors
        if ctx.ignore_index is not None:
            dloss = dloss.masked_fill(target == ctx.ignore_index, 0.0)
        if not ctx.inplace:
            dlogits = _backward(logits, target, stats, dloss, *ctx.shard)
            return dlogits, None, None, None, None, None, None
        if torch.is_grad_enabled():
            raise RuntimeError("cross_entropy: a second derivative cannot be had with inplace=True")
        ctx.overwritten = True
        dlogits = logits.detach()
        _backward_inplace(dlogits, target, stats, dloss, *ctx.shard)
        torch.autograd.graph.increment_version(logits)
        return dlogits, None, None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    check_target: bool = True,
    inplace: bool = False,
) -> Tensor:
    """`-log softmax(logits)[target]` of each row.

    Args:
        logits: `[..., V]`, any floating dtype. With a group, this rank's shard of the vocabulary:
            rank r holds the tokens from r V on.
        target: `[...]`, an integer dtype: tokens of the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary; None if this one has all of it.
        label_smoothing: in [0, 1), over the whole vocabulary.
        ignore_index: rows with this target have loss 0 and gradient 0. None: there is none.
        check_target: raise for a target outside the vocabulary. False: such a row has no target
            logit, its loss is `log sum e^(x - max x)`, which is what Megatron makes of it.
        inplace: the backward writes the gradient over the logits (see the top of this file).
            Ignored under `torch.compile`, which plans memory itself.

    Returns:
        `[...]`, `torch.float32` (`torch.float64` for float64 logits).

    Raises:
        ValueError: an input of the wrong shape, dtype, device or range, or `inplace` with logits
            that must not change.
        IndexError: a target outside the vocabulary. On CUDA nobody waits for the device to say so:
            an assertion fails there, as in `torch.nn.functional.cross_entropy`, and the next call
            that does wait raises.

    Where `unsupported_reason` has something to say, that is logged once and `cross_entropy_ref`
    computes instead, never in place.
    """
    _check_inputs(logits, target, label_smoothing, group)
    target = target.long()
    if reason := unsupported_reason(logits, target):
        log_fallback("cross_entropy", reason)
        return cross_entropy_ref(
            logits,
            target,
            group=group,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            check_target=check_target,
        )
    if torch.compiler.is_compiling():
        inplace = False
    if inplace and (reason := overwritable(logits)):
        raise ValueError(f"cross_entropy: inplace cannot write over logits that are {reason}")
    return _CrossEntropy.apply(
        logits.contiguous(), target, group, label_smoothing, ignore_index, check_target, inplace
    )


def _check_inputs(
    logits: Tensor, target: Tensor, label_smoothing: float, group: dist.ProcessGroup | None
) -> None:
    if not logits.is_floating_point():
        raise ValueError(f"cross_entropy: logits must be a floating dtype, got {logits.dtype}")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits must have shape [..., V] with V >= 1, got {list(logits.shape)}"
        )
    check_target_tensor("cross_entropy", "logits", logits, target)
    check_smoothing("cross_entropy", label_smoothing, shard(logits.shape[-1], group)[1])


def check_target_tensor(op: str, name: str, rows: Tensor, target: Tensor) -> None:
    """Raise `ValueError` unless target has one integer for each row of `rows`, called `name`."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"{op}: target must be an integer dtype, got {target.dtype}")
    if target.shape != rows.shape[:-1]:
        raise ValueError(
            f"{op}: target must have shape {list(rows.shape[:-1])}, that of {name} "
            f"{list(rows.shape)} without the last dimension, got {list(target.shape)}"
        )
    if target.device != rows.device:
        raise ValueError(f"{op}: target must be on {rows.device} like {name}, got {target.device}")


def check_smoothing(op: str, label_smoothing: float, vocab_size: int) -> None:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1), got {label_smoothing}")
    if label_smoothing > 0 and vocab_size < 2:
        raise ValueError(f"{op}: label_smoothing needs a vocabulary of 2, got {vocab_size}")


def check_target_range(target: Tensor, vocab_size: int, ignore_index: int | None) -> None:
    """Raise `IndexError` for a target outside the vocabulary; waits for the device."""
    bad = (target < 0) | (target >= vocab_size)
    if ignore_index is not None:
        bad &= target != ignore_index
    if bad.any():
        raise IndexError(
            f"cross_entropy: target {int(target[bad][0])} is outside the vocabulary of "
            f"{vocab_size} tokens"
        )


def shard(num_tokens: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The first token of a rank that holds `num_tokens`, and the size of the whole vocabulary."""
    if group is None:
        return 0, num_tokens
    return group.rank() * num_tokens, group.size() * num_tokens


def smoothing_of(label_smoothing: float, vocab_size: int) -> float:
    return label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing > 0 else 0.0


def _all_reduce_max(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def _all_reduce_sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks; to autograd, what the others add is constant."""
    if group is None:
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return torch.where(total == x.detach(), x, x + (total - x.detach()))  # both may be -inf
