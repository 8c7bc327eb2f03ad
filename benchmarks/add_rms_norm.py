"""Residual addition with RMSNorm on the CPU: `accel.ops.add_rms_norm` beside the two steps in eager
and compiled torch, and beside torch's addition with `accel.ops.rms_norm`.

Bytes, with x of T N elements: the forward reads x and residual and writes the sum and its norm, 4 T N;
the backward reads dy, dsum and the sum and writes dx, 4 T N. Not swept: fp16 (the same traffic as bf16),
bias (a vector).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from accel.ops import add_rms_norm, add_rms_norm_ref, rms_norm
from accel.testing import bench
from accel.testing.bench import OURS, Case, input_sets
from accel.testing.tolerance import assert_close_to_baseline
from benchmarks._norm import COMPILE, EAGER, PEER_ROUNDINGS, QUICK_SHAPES, SHAPES

TWO_STEPS = "add, then rms_norm"

AddNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def two_steps(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm(total, weight), total


def cases(quick: bool) -> Iterator[Case]:
    for (num_rows, num_cols), dtype in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        x, residual, dy, dtotal = torch.randn(4, num_rows, num_cols).to(dtype).unbind(0)
        weight = torch.randn(num_cols, dtype=dtype)
        inputs = [x.clone(), residual.clone(), weight]
        leaves = [t.clone().requires_grad_() for t in inputs]
        dys = [dy.clone(), dtotal.clone()]
        sides: dict[str, AddNorm] = {
            OURS: add_rms_norm,
            TWO_STEPS: two_steps,
            EAGER: add_rms_norm_ref,
        }
        if not quick:  # compiling takes longer than all the rest
            sides[COMPILE] = torch.compile(add_rms_norm_ref, fullgraph=True, dynamic=False)
        label = f"{num_rows}x{num_cols} {str(dtype).removeprefix('torch.')}"

        def check(sides=sides, leaves=leaves, dys=dys) -> None:
            _check(sides, leaves, dys)

        yield Case(
            name=f"forward {label}",
            num_bytes=4 * x.nbytes,
            copy_bytes=x.nbytes,
            check=check,
            sides=sides,
            input_sets=input_sets(*inputs),
        )
        yield Case(
            name=f"forward+backward {label}",
            num_bytes=8 * x.nbytes,
            copy_bytes=x.nbytes,
            check=lambda: None,  # the same sides as above
            sides={side: partial(_forward_backward, op) for side, op in sides.items()},
            input_sets=input_sets(*leaves, *dys),
        )


def _forward_backward(op: AddNorm, *leaves_and_dys: Tensor) -> object:
    *leaves, dy, dtotal = leaves_and_dys
    return torch.autograd.grad(op(*leaves), leaves, [dy, dtotal])


def _check(sides: dict[str, AddNorm], leaves: list[Tensor], dys: list[Tensor]) -> None:
    def results(op: AddNorm, leaves: list[Tensor]) -> list[Tensor]:
        outputs = op(*leaves)
        grads = torch.autograd.grad(outputs, leaves, [dy.to(leaves[0].dtype) for dy in dys])
        return [*(t.detach() for t in outputs), *grads]

    exact = results(add_rms_norm_ref, [t.detach().double().requires_grad_() for t in leaves])
    baseline = results(add_rms_norm_ref, leaves)
    names = ["y", "total", "dx", "dresidual", "dweight"]
    for side, op in sides.items():
        roundings = PEER_ROUNDINGS if side in (EAGER, COMPILE) else 1
        for name, *values in zip(names, results(op, leaves), baseline, exact, strict=True):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=roundings)


def main(argv: list[str] | None = None) -> int:
    return bench.main("add_rms_norm", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
