"""Softmax of masked attention scores on the CPU: `accel.ops.masked_softmax` beside torch's own.

Bytes, with x of B H Q K elements: the forward reads x and writes p, the backward reads p and dp and
writes dx. The mask, one byte for each query and key, is shared by all heads and not counted.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from accel.ops import masked_softmax, masked_softmax_ref
from accel.testing import bench
from accel.testing.tolerance import assert_close_to_baseline

EAGER, COMPILE = "torch eager", "torch.compile"
# A peer must compute the same thing, but need not keep our tolerance.
PEER_ROUNDINGS = 64

Softmax = Callable[[Tensor, Tensor], Tensor]


def cases(quick: bool) -> Iterator[bench.Case]:
    shapes = [(1, 2, 512, 512)] if quick else [(1, 8, 2048, 2048)]
    for shape in shapes:
        torch.manual_seed(0)
        x = torch.randn(shape).bfloat16().requires_grad_()
        dprobs = torch.randn(shape).bfloat16()
        # Three documents: what --reset-attention-mask makes of a sequence.
        document = torch.arange(shape[-1]) * 3 // shape[-1]
        mask = (document[:, None] != document) | torch.ones(shape[2:], dtype=torch.bool).triu(1)
        sides: dict[str, Softmax] = {bench.OURS: masked_softmax, EAGER: masked_softmax_ref}
        if not quick:  # compiling takes longer than all the rest
            sides[COMPILE] = torch.compile(masked_softmax_ref, fullgraph=True, dynamic=False)

        def check(sides=sides, x=x, mask=mask, dprobs=dprobs) -> None:
            _check(sides, x, mask, dprobs)

        label = "x".join(map(str, shape)) + " bfloat16"
        yield bench.Case(
            name=f"forward {label}",
            num_bytes=2 * x.nbytes,
            copy_bytes=x.nbytes,
            check=check,
            sides={side: partial(_forward, f, mask) for side, f in sides.items()},
            input_sets=bench.input_sets(x.detach()),
        )
        yield bench.Case(
            name=f"forward+backward {label}",
            num_bytes=5 * x.nbytes,
            copy_bytes=x.nbytes,
            check=lambda: None,  # the same sides as above
            sides={side: partial(_forward_backward, f, mask) for side, f in sides.items()},
            input_sets=bench.input_sets(x, dprobs),
        )


def _forward(f: Softmax, mask: Tensor, x: Tensor) -> Tensor:
    return f(x, mask)


def _forward_backward(f: Softmax, mask: Tensor, x: Tensor, dprobs: Tensor) -> object:
    return torch.autograd.grad(f(x, mask), x, dprobs)


def _check(sides: dict[str, Softmax], x: Tensor, mask: Tensor, dprobs: Tensor) -> None:
    def results(f: Softmax, dtype: torch.dtype) -> list[Tensor]:
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        probs = f(leaf, mask)
        return [probs.detach(), *torch.autograd.grad(probs, leaf, dprobs.to(dtype))]

    exact, baseline = (results(masked_softmax_ref, d) for d in (torch.float64, torch.bfloat16))
    for side, f in sides.items():
        roundings = 1 if side == bench.OURS else PEER_ROUNDINGS
        for name, *values in zip(
            ("probs", "dx"), results(f, torch.bfloat16), baseline, exact, strict=True
        ):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=roundings)


def main(argv: list[str] | None = None) -> int:
    return bench.main("masked_softmax", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
