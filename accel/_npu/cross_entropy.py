"""Softmax cross entropy on Ascend: see `accel/ops/cross_entropy.py` for the formulas.

Plain PyTorch, some rows at a time, so that no fp32 copy of all logits is ever held: torch-npu's
`npu_cross_entropy_loss` knows neither a vocabulary that is split over ranks nor accel's smoothing, and
returns the logarithms of all probabilities. `accel::linear_cross_entropy_*` is made of these two.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from accel.ops.cross_entropy import check_target_range

__all__ = ["KERNELS", "backward", "backward_inplace", "stats"]

ELEMENTS_AT_A_TIME = 1 << 24
"""64 MiB of fp32."""


def _blocks(num_rows: int, num_tokens: int) -> Iterator[slice]:
    step = max(1, ELEMENTS_AT_A_TIME // max(1, num_tokens))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def stats(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int | None,
    with_sum: bool,
) -> Tensor:
    """`accel::cross_entropy_stats`. To check targets waits for the device."""
    if vocab_size:
        check_target_range(target, vocab_size, ignore_index)
    num_tokens = logits.shape[-1]
    rows = logits.reshape(target.numel(), num_tokens)
    targets = target.reshape(-1) - vocab_start
    result = logits.new_empty((4 if with_sum else 3, len(rows)), dtype=torch.float32)
    for block in _blocks(len(rows), num_tokens):
        x = rows[block].float()
        maximum = x.amax(-1)
        x = x - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]
        outside = (targets[block] < 0) | (targets[block] >= num_tokens)
        at_target = x.gather(-1, targets[block].masked_fill(outside, 0)[:, None])[:, 0]
        values = [maximum, x.exp().sum(-1), at_target.masked_fill(outside, 0.0)]
        if with_sum:
            values.append(x.sum(-1))
        result[:, block] = torch.stack(values)
    return result.view(len(result), *target.shape)


def _gradient_into(
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> None:
    """Both `[T, V]`, and they may be the same."""
    num_tokens = logits.shape[-1]
    targets, dlosses = target.reshape(-1) - vocab_start, dloss.reshape(-1).float()
    maxima, sums = stats[0].reshape(-1), stats[1].reshape(-1)
    for block in _blocks(len(logits), num_tokens):
        dx = (logits[block].float() - maxima[block, None]).exp_().div_(sums[block, None])
        if smoothing:
            dx -= smoothing / vocab_size
        here = (targets[block] >= 0) & (targets[block] < num_tokens)
        minus = torch.where(here, smoothing - 1.0, 0.0)[:, None]
        dx.scatter_add_(-1, targets[block].masked_fill(~here, 0)[:, None], minus)
        dx.mul_(dlosses[block, None]).masked_fill_(dlosses[block, None] == 0, 0.0)
        out[block].copy_(dx)


def backward(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> Tensor:
    """`accel::cross_entropy_bwd`."""
    dlogits = logits.new_empty(logits.shape)
    shape = target.numel(), logits.shape[-1]
    rows, drows = logits.contiguous().view(shape), dlogits.view(shape)
    _gradient_into(drows, rows, target, stats, dloss, vocab_start, vocab_size, smoothing)
    return dlogits


def backward_inplace(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    smoothing: float,
) -> None:
    """`accel::cross_entropy_bwd_`."""
    rows = logits.view(target.numel(), logits.shape[-1])
    _gradient_into(rows, rows, target, stats, dloss, vocab_start, vocab_size, smoothing)


KERNELS = {
    "accel::cross_entropy_stats": stats,
    "accel::cross_entropy_bwd": backward,
    "accel::cross_entropy_bwd_": backward_inplace,
}
