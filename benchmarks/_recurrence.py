"""What the benchmarks of recurrences share: both passes of every side, checked against token by token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accel.testing.bench import OURS, Case
from accel.testing.tolerance import assert_close_to_baseline

PEER_ROUNDINGS = 64
"""A peer must compute the same thing, but need not keep our tolerance."""

Side = Callable[..., Tensor]


@dataclass(frozen=True)
class Problem:
    """Sequences `[1, S, ...]`, and one-dimensional inputs that all tokens share."""

    label: str
    inputs: Sequence[Tensor]
    names: Sequence[str]
    dy: Tensor
    num_flops: int
    """Forward."""
    gemm: tuple[int, int, int]


def cases(
    problem: Problem,
    sides: Mapping[str, Side],
    reference: Side,
    *,
    checked_tokens: int,
    roundings: int,
) -> Iterator[Case]:
    """Forward, and forward with backward, which has three times the FLOPs at least.

    Args:
        checked_tokens: of each sequence: the reference goes one by one.
        roundings: of ours, see `accel.testing.tolerance`.
    """
    inputs = [t.requires_grad_() for t in problem.inputs]

    def results(op: Side, dtype: torch.dtype | None = None) -> list[Tensor]:
        cut = [t.detach() if t.ndim == 1 else t.detach()[:, :checked_tokens] for t in inputs]
        leaves = [t.to(dtype or t.dtype).requires_grad_() for t in cut]
        y = op(*leaves)
        dy = problem.dy[:, :checked_tokens].to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def check() -> None:
        exact, baseline = results(reference, torch.float64), results(reference)
        for side, op in sides.items():
            allowed = roundings if side == OURS else PEER_ROUNDINGS
            names = ["y", *(f"d{name}" for name in problem.names)]
            for name, *values in zip(names, results(op), baseline, exact, strict=True):
                assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=allowed)

    def forward(op: Side) -> Tensor:
        with torch.no_grad():
            return op(*inputs)

    def both(op: Side) -> object:
        return torch.autograd.grad(op(*inputs), inputs, problem.dy)

    for what, run, passes in (("forward", forward, 1), ("forward+backward", both, 3)):
        yield Case(
            name=f"{what} {problem.label}",
            num_flops=passes * problem.num_flops,
            gemm=problem.gemm,
            gemm_dtype=torch.float32,
            check=check if passes == 1 else lambda: None,  # the same sides
            sides={side: lambda op=op, run=run: run(op) for side, op in sides.items()},
        )
