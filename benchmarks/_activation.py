"""What the benchmarks of the activations share: the cases, and the check of all sides."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from accel.ops.activation import GATED, activation_ref
from accel.testing.bench import OURS, Case, input_sets
from accel.testing.tolerance import assert_close_to_baseline

EAGER = "torch eager"
COMPILE = "torch.compile"

Activation = Callable[..., Tensor]

NAMED_SHAPE = (4096, 5504, torch.bfloat16)  # one sequence of 4096 at the FFN of a 1.3B LLaMA
SHAPES = [
    NAMED_SHAPE,
    (4096, 5504, torch.float32),
    (256, 1024, torch.bfloat16),  # fits the caches: the overhead of a call shows
]
QUICK_SHAPES = SHAPES[-1:]
OUR_ROUNDINGS = {torch.float32: 16}  # as tests/ops/test_activation.py counts them
PEER_ROUNDINGS = 64  # a peer must compute the same thing, but need not keep our tolerance


def activation_cases(
    ours: Activation,
    kind: str,
    quick: bool,
    *,
    min_of_limit: tuple[float, float] | None = None,
    min_over_best: float | None = None,
) -> Iterator[Case]:
    """Forward, and forward with backward, of an activation without bias or probabilities.

    Bytes, with y of T F elements: gated, the forward reads 2 T F and writes T F, the backward reads
    3 T F and writes 2 T F; the others 1 and 1, and 2 and 1.

    Args:
        min_of_limit: the targets of forward and of both, at the first shape.
        min_over_best: the same for the speed over the best peer.
    """
    eager = partial(activation_ref, kind)
    halves = 2 if kind in GATED else 1
    for num_rows, num_cols, dtype in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        leaf = torch.randn(num_rows, halves * num_cols).to(dtype).requires_grad_()
        x = leaf.detach()
        dy = torch.randn(num_rows, num_cols).to(dtype)
        sides = {OURS: ours, EAGER: eager}
        if not quick:  # compiling takes longer than all the rest
            sides[COMPILE] = torch.compile(eager, fullgraph=True, dynamic=False)
        named = (num_rows, num_cols, dtype) == NAMED_SHAPE
        shares = min_of_limit if named and min_of_limit else (None, None)
        over_best = min_over_best if named else None
        width = f"2x{num_cols}" if halves == 2 else str(num_cols)
        label = f"{num_rows}x{width} {str(dtype).removeprefix('torch.')}"
        yield Case(
            name=f"forward {label}",
            num_bytes=(halves + 1) * dy.nbytes,
            copy_bytes=dy.nbytes,
            check=partial(_check, sides, leaf, dy),
            sides=sides,
            input_sets=input_sets(x),
            min_of_limit=shares[0],
            min_over_best=over_best,
        )
        yield Case(
            name=f"forward+backward {label}",
            num_bytes=(3 * halves + 2) * dy.nbytes,
            copy_bytes=dy.nbytes,
            check=lambda: None,  # the same sides as above
            sides={side: partial(_forward_backward, f) for side, f in sides.items()},
            input_sets=input_sets(leaf, dy),
            min_of_limit=shares[1],
            min_over_best=over_best,
        )


def _forward_backward(f: Activation, leaf: Tensor, dy: Tensor) -> object:
    return torch.autograd.grad(f(leaf), leaf, dy)


def _check(sides: dict[str, Activation], leaf: Tensor, dy: Tensor) -> None:
    rows = slice(64)  # every row is computed alike; fp64 of all of them takes a gigabyte

    def results(f: Activation, x: Tensor, dy: Tensor) -> list[Tensor]:
        y = f(x)
        return [y.detach(), *torch.autograd.grad(y, x, dy)]

    exact = results(sides[EAGER], leaf[rows].detach().double().requires_grad_(), dy[rows].double())
    baseline = results(sides[EAGER], leaf, dy)
    for side, f in sides.items():
        roundings = OUR_ROUNDINGS.get(leaf.dtype, 2) if side == OURS else PEER_ROUNDINGS
        got = results(f, leaf, dy)
        for name, a, b, c in zip(("y", "dx"), got, baseline, exact, strict=True):
            assert_close_to_baseline(
                a[rows], b[rows], c, name=f"{side}: {name}", roundings=roundings
            )
