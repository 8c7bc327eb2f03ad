"""Rotary embedding on the CPU: `accel.ops.rope` beside stock Megatron's chain, eager and compiled.

Queries alone, `[S, 1, heads, D]`. Bytes: forward 2 tensors, forward and backward 4; cos and sin are
not counted: they are below 1/16 of q, and ours are computed once per angles, outside the timing, as
in a model of many layers. Stock computes them in every call, and so do its sides here. Not swept:
fp16 (the same traffic as bf16), packed sequences (the same kernel, another table row per token).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from accel.ops import rope, rope_ref
from accel.ops.rope import Layout
from accel.testing import bench
from accel.testing.bench import OURS, Case, input_sets
from accel.testing.tolerance import assert_close_to_baseline
from benchmarks._norm import COMPILE, EAGER

Rotate = Callable[[Tensor], Tensor]

SHAPES: list[tuple[tuple[int, int, int], torch.dtype, Layout]] = [
    ((2048, 32, 128), torch.bfloat16, "half"),  # the queries of a 7B model
    ((2048, 32, 128), torch.bfloat16, "interleaved"),
    ((2048, 32, 128), torch.float32, "half"),
    ((256, 8, 64), torch.bfloat16, "half"),  # fits the caches: the overhead of a call shows
]
QUICK_SHAPES = SHAPES[-1:]


def cases(quick: bool) -> Iterator[Case]:
    for (seq, heads, width), dtype, layout in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        q = torch.randn(seq, 1, heads, width).to(dtype)
        dy = torch.randn_like(q)
        freqs = angles(seq, width, layout)
        sides: dict[str, Rotate] = {
            OURS: lambda x, freqs=freqs, layout=layout: rope(x, freqs, layout=layout)[0],
            EAGER: lambda x, freqs=freqs, layout=layout: rope_ref(x, freqs, layout=layout)[0],
        }
        if not quick:  # compiling takes longer than all the rest
            sides[COMPILE] = torch.compile(sides[EAGER], fullgraph=True, dynamic=False)
        label = f"{seq}x{heads}x{width} {str(dtype).removeprefix('torch.')} {layout}"
        target = (layout, dtype) == ("half", torch.bfloat16) and not quick and seq == 2048

        def check(sides=sides, q=q, dy=dy) -> None:
            _check(sides, q, dy)

        yield Case(
            name=f"forward {label}",
            num_bytes=2 * q.nbytes,
            copy_bytes=q.nbytes,
            check=check,
            sides=sides,
            input_sets=input_sets(q),
            min_over_best=1.5 if target else None,
            min_of_limit=0.75 if target else None,
        )
        yield Case(
            name=f"forward+backward {label}",
            num_bytes=4 * q.nbytes,
            copy_bytes=q.nbytes,
            check=lambda: None,  # the same sides as above
            sides={side: partial(_forward_backward, rotate) for side, rotate in sides.items()},
            input_sets=input_sets(q.clone().requires_grad_(), dy),
        )


def angles(seq: int, width: int, layout: Layout) -> Tensor:
    """`[seq, 1, 1, width]`, as Megatron's RotaryEmbedding makes them."""
    freqs = torch.outer(torch.arange(seq), 10000 ** (-torch.arange(0, width, 2) / width))
    twice = (freqs, freqs)
    freqs = torch.stack(twice, -1).flatten(-2) if layout == "interleaved" else torch.cat(twice, -1)
    return freqs[:, None, None]


def _forward_backward(rotate: Rotate, leaf: Tensor, dy: Tensor) -> object:
    return torch.autograd.grad(rotate(leaf), leaf, dy)


def _check(sides: dict[str, Rotate], q: Tensor, dy: Tensor) -> None:
    def results(rotate: Rotate, q: Tensor) -> list[Tensor]:
        leaf = q.clone().requires_grad_()
        y = rotate(leaf)
        return [y.detach(), *torch.autograd.grad(y, leaf, dy.to(q.dtype))]

    exact = results(sides[EAGER], q.double())
    baseline = results(sides[EAGER], q)
    for side, rotate in sides.items():
        for name, *values in zip(("y", "dq"), results(rotate, q), baseline, exact, strict=True):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=4)


def main(argv: list[str] | None = None) -> int:
    return bench.main("rope", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
