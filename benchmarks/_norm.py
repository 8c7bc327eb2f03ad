"""What the benchmarks of the norms share: the cases, and the check of all sides."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from accel.testing.bench import OURS, Case, input_sets
from accel.testing.tolerance import assert_close_to_baseline

EAGER = "torch eager"
COMPILE = "torch.compile"

Norm = Callable[..., Tensor]

SHAPES = [
    (
        (4096, 4096),
        torch.bfloat16,
    ),  # 8 sequences of 512, or one of 4096, at the width of a 7B model
    ((4096, 4096), torch.float32),
    ((512, 1024), torch.bfloat16),  # fits the caches: the overhead of a call shows
]
# A peer must compute the same thing, but need not keep our tolerance: torch.compile adds up the 4096
# rows of a dweight one after the other and is 12 times as far off as eager in fp32.
PEER_ROUNDINGS = 64

QUICK_SHAPES = SHAPES[-1:]


@dataclass(frozen=True)
class Targets:
    """What a norm of 4096 x 4096 in bf16 shall reach: `min_of_limit`, `min_over_best` and
    `min_speedups` of `Case`, (forward, forward with backward)."""

    of_limit: tuple[float | None, float | None] = (None, None)
    over_best: tuple[float | None, float | None] = (None, None)
    speedups: dict[str, float] = field(default_factory=dict)
    """Forward with backward only."""


def norm_cases(
    ours: Norm, eager: Norm, num_vectors: int, targets: Targets, quick: bool
) -> Iterator[Case]:
    """Forward, and forward with backward, of norms called as `norm(x, *vectors_N)`.

    Bytes, with x of T N elements: the forward reads x and writes y; the backward reads dy and x and
    writes dx. The [N] vectors and the saved [T] ones are below 1 % and not counted.
    """
    for (num_rows, num_cols), dtype in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        x = torch.randn(num_rows, num_cols, dtype=dtype)
        dy = torch.randn_like(x)
        vectors = [torch.randn(num_cols, dtype=dtype) for _ in range(num_vectors)]
        leaves = [x.clone().requires_grad_(), *(v.clone().requires_grad_() for v in vectors)]
        norms = {OURS: ours, EAGER: eager}
        if not quick:  # compiling takes longer than all the rest
            norms[COMPILE] = torch.compile(eager, fullgraph=True, dynamic=False)
        label = f"{num_rows}x{num_cols} {str(dtype).removeprefix('torch.')}"
        aims = targets if (num_rows, dtype) == (4096, torch.bfloat16) else Targets()

        def check(norms=norms, leaves=leaves, dy=dy) -> None:
            _check(norms, leaves, dy)

        nbytes = x.nbytes
        yield Case(
            name=f"forward {label}",
            num_bytes=2 * nbytes,
            copy_bytes=nbytes,
            check=check,
            sides=norms,
            input_sets=input_sets(x, *vectors),
            min_of_limit=aims.of_limit[0],
            min_over_best=aims.over_best[0],
        )
        yield Case(
            name=f"forward+backward {label}",
            num_bytes=5 * nbytes,
            copy_bytes=nbytes,
            check=lambda: None,  # the same sides as above
            sides={side: partial(_forward_backward, norm) for side, norm in norms.items()},
            input_sets=input_sets(*leaves, dy),
            min_speedups=aims.speedups,
            min_of_limit=aims.of_limit[1],
            min_over_best=aims.over_best[1],
        )


def _forward_backward(norm: Norm, *leaves_and_dy: Tensor) -> object:
    *leaves, dy = leaves_and_dy
    return torch.autograd.grad(norm(*leaves), leaves, dy)


def _check(norms: dict[str, Norm], leaves: list[Tensor], dy: Tensor) -> None:
    def results(norm: Norm, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
        y = norm(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    in_fp64 = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = results(norms[EAGER], in_fp64, dy.double())
    baseline = results(norms[EAGER], leaves, dy)
    names = ["y", "dx", "dweight", "dbias"]
    for side, norm in norms.items():
        roundings = 1 if side == OURS else PEER_ROUNDINGS
        got = results(norm, leaves, dy)
        for name, *values in zip(names, got, baseline, exact, strict=False):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=roundings)
