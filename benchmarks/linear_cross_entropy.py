"""Output projection and cross entropy in one on the CPU, beside the two one after the other.

FLOPs: 8 T H V on our side, which makes the logits a second time in the backward; the peers keep them
and need 6. So the rate and its limit, the product [T, H] x [H, V] alone, count 8, and the times
beside the peers' are what is honest about the price. All sides add the gradient of the weight to an
fp32 buffer, as Megatron's data parallelism does (ours from within).

Memory is what the op is for: its bound is 15 % of the logits, the gradient of the hidden states
included. The weight and the buffer are inputs.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops import cross_entropy, linear_cross_entropy
from accel.testing import bench
from accel.testing.bench import OURS, Case
from accel.testing.tolerance import assert_close_to_baseline

EAGER = "torch eager"
COMPILE = "torch.compile"
KERNEL = "eager and accel.cross_entropy"

SHAPES = [(2048, 2048, 32000)]  # T, H, V
QUICK_SHAPES = [(256, 128, 4096)]


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, target, reduction="none")


def with_kernel(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(hidden @ weight.t(), target, inplace=True)


def cases(quick: bool) -> Iterator[Case]:
    for num_rows, hidden_size, num_tokens in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        hidden = torch.randn(num_rows, hidden_size).bfloat16()
        weight = (torch.randn(num_tokens, hidden_size) * 0.02).bfloat16()
        target = torch.randint(0, num_tokens, (num_rows,))
        dloss = torch.rand(num_rows) / num_rows
        peers: dict[str, Callable[..., Tensor]] = {EAGER: eager, KERNEL: with_kernel}
        if not quick:
            peers[COMPILE] = torch.compile(eager, fullgraph=True, dynamic=False)
        leaves = [t.requires_grad_() for t in (hidden, weight)]
        buffer = torch.zeros(weight.shape)
        call = (leaves, target, dloss, buffer)
        products = 2 * num_rows * hidden_size * num_tokens
        yield Case(
            name=f"{num_rows}x{hidden_size}x{num_tokens} bfloat16",
            num_flops=4 * products,
            gemm=(num_rows, num_tokens, hidden_size),
            check=partial(_check, peers, hidden, weight, target, dloss),
            sides={OURS: partial(ours, *call)}
            | {name: partial(theirs, loss, *call) for name, loss in peers.items()},
            min_over_best=None if quick else 1.3,
            min_of_limit=None if quick else 0.85,
            max_extra_bytes=int(0.15 * num_rows * num_tokens * 2),
        )


def ours(leaves: list[Tensor], target: Tensor, dloss: Tensor, buffer: Tensor) -> Tensor:
    hidden, weight = leaves
    loss = linear_cross_entropy(hidden, weight, target, grad_buffer=buffer)
    return torch.autograd.grad(loss, hidden, dloss)[0]


def theirs(
    loss: Callable[..., Tensor], leaves: list[Tensor], target: Tensor, dloss: Tensor, buffer: Tensor
) -> Tensor:
    dhidden, dweight = torch.autograd.grad(loss(*leaves, target), leaves, dloss)
    buffer += dweight
    return dhidden


def _check(
    peers: dict[str, Any], hidden: Tensor, weight: Tensor, target: Tensor, dloss: Tensor
) -> None:
    """On a part that fits fp64: the first rows, and every 16th token."""
    rows = slice(0, 64)
    weight = weight.detach()[::16].contiguous()
    target, dloss = target[rows] // 16, dloss[rows]

    def results(step: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden[rows], weight)]
        buffer = torch.zeros(weight.shape, dtype=torch.promote_types(dtype, torch.float32))
        dhidden = step(leaves, target, dloss.to(buffer.dtype), buffer)
        return [dhidden, buffer.to(dtype)]

    exact = results(partial(theirs, eager), torch.float64)
    baseline = results(partial(theirs, eager), hidden.dtype)
    steps = {OURS: ours} | {name: partial(theirs, loss) for name, loss in peers.items()}
    for side, step in steps.items():
        if side == COMPILE:
            continue  # compiled for the whole shape; it is `eager` otherwise
        for name, *values in zip(
            ["dhidden", "dweight"], results(step, hidden.dtype), baseline, exact, strict=True
        ):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=2)


def main(argv: list[str] | None = None) -> int:
    return bench.main("linear_cross_entropy", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
