"""Ragged expert products on the CPU: `grouped_gemm` beside a loop over the experts.

The peers split the rows, multiply and concatenate, as Megatron's `SequentialMLP` does. FLOPs: 2 T K N
forward, three times that with backward (dx and dW cost as much each). The limit is one dense product of
[T, K] and [K, N]. Not swept: fp16.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from accel.ops import grouped_gemm, grouped_gemm_ref
from accel.testing import bench
from accel.testing.bench import OURS, Case
from accel.testing.tolerance import assert_close_to_baseline

EAGER, COMPILE = "torch eager", "torch.compile"

SHAPES = [((900, 100, 512, 0, 1024, 700, 460, 400), 1024, 2816)]
QUICK_SHAPES = [((90, 10, 0, 28), 256, 352)]


def cases(quick: bool) -> Iterator[Case]:
    for counts, inner, num_cols in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        dtype = torch.bfloat16
        num_rows = sum(counts)
        tokens_per_expert = torch.tensor(counts)
        x = torch.randn(num_rows, inner, dtype=dtype, requires_grad=True)
        weight = (torch.randn(len(counts), inner, num_cols) * inner**-0.5).to(dtype)
        weight.requires_grad_()
        dy = torch.randn(num_rows, num_cols, dtype=dtype)
        sides: dict[str, Callable[..., Tensor]] = {OURS: grouped_gemm, EAGER: grouped_gemm_ref}
        if not quick:  # compiling takes longer than all the rest
            sides[COMPILE] = torch.compile(_split_by(counts), fullgraph=True, dynamic=False)
        label = f"{len(counts)} experts {num_rows}x{inner}x{num_cols} bfloat16"
        gemm = (num_rows, num_cols, inner)
        flops = 2 * num_rows * num_cols * inner

        def forward(op, x=x, weight=weight, counts=tokens_per_expert):
            with torch.no_grad():
                return op(x, weight, counts)

        def both(op, x=x, weight=weight, counts=tokens_per_expert, dy=dy):
            return torch.autograd.grad(op(x, weight, counts), (x, weight), dy)

        def check(sides=sides, x=x, weight=weight, counts=tokens_per_expert, dy=dy) -> None:
            _check(sides, x, weight, counts, dy)

        yield Case(
            name=f"forward {label}",
            num_flops=flops,
            gemm=gemm,
            check=check,
            sides={side: lambda f=op: forward(f) for side, op in sides.items()},
        )
        yield Case(
            name=f"forward+backward {label}",
            num_flops=3 * flops,
            gemm=gemm,
            check=lambda: None,  # the same sides as above
            sides={side: lambda f=op: both(f) for side, op in sides.items()},
        )


def _split_by(counts: tuple[int, ...]) -> Callable[..., Tensor]:
    """The reference with counts that the compiler knows."""

    def split(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return torch.cat([a @ w for a, w in zip(x.split(counts), weight.unbind(0), strict=True)])

    return split


def _check(
    sides: dict[str, Callable[..., Tensor]],
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    dy: Tensor,
) -> None:
    def results(op: Callable[..., Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
        y = op(x, weight, counts)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = results(grouped_gemm_ref, *wide, dy.double())
    baseline = results(grouped_gemm_ref, x, weight, dy)
    for side, op in sides.items():
        for name, *values in zip(
            ("y", "dx", "dweight"), results(op, x, weight, dy), baseline, exact, strict=True
        ):
            assert_close_to_baseline(*values, name=f"{side}: {name}")


def main(argv: list[str] | None = None) -> int:
    return bench.main("grouped_gemm", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
