"""Causal attention on the CPU: `accel.ops.attention` beside what stock Megatron runs and torch's SDPA.

FLOPs: two products of S x S x D for each head, of which a causal mask leaves half: 2 B H S^2 D
forward, 2.5 times that backward (five products). All sides get Megatron's layout [S, B, H, D] and
give [S, B, H D]. Not swept: fp32, dropout, windows, packs.
"""

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops import attention
from accel.testing import bench
from accel.testing.tolerance import assert_close_to_baseline

EAGER, SDPA, COMPILE = "Megatron eager", "torch SDPA", "torch.compile"
# A peer must compute the same thing, but need not keep our tolerance.
PEER_ROUNDINGS = 64
GEMM = (2048, 2048, 2048)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    tokens: int
    batch: int
    heads: int
    kv_heads: int
    width: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.batch} {self.heads}/{self.kv_heads}x{self.width} bfloat16"

    def num_flops(self) -> int:
        return 2 * self.batch * self.heads * self.tokens**2 * self.width


TARGET = Shape(tokens=4096, batch=1, heads=8, kv_heads=8, width=128)
SHAPES = [TARGET, Shape(tokens=1024, batch=2, heads=16, kv_heads=4, width=64)]
QUICK_SHAPES = [Shape(tokens=256, batch=1, heads=4, kv_heads=2, width=64)]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)[0].flatten(2)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The steps of `megatron.core.transformer.dot_product_attention`, which stores all scores."""
    (tokens, batch, heads, width), kv_heads = q.shape, k.shape[2]
    if heads > kv_heads:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
    q, k, v = (t.reshape(tokens, batch * heads, width).transpose(0, 1) for t in (q, k, v))
    scores = q.new_empty(batch * heads, tokens, tokens)
    scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(width))
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    probs = torch.softmax(scores.masked_fill_(mask, -10000.0), dim=-1)
    return torch.bmm(probs, v).transpose(0, 1).reshape(tokens, batch, heads * width)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1]
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def cases(quick: bool) -> Iterator[bench.Case]:
    for shape in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        leaves = [
            torch.randn(shape.tokens, shape.batch, h, shape.width).bfloat16().requires_grad_()
            for h in heads
        ]
        dout = torch.randn(shape.tokens, shape.batch, shape.heads * shape.width).bfloat16()
        sides: dict[str, Attention] = {bench.OURS: ours, EAGER: eager, SDPA: sdpa}
        if not quick:  # compiling takes longer than all the rest
            sides[COMPILE] = torch.compile(eager, fullgraph=True)
        targets = {"min_of_limit": 0.55} if shape == TARGET else {}

        def check(sides=sides, leaves=leaves, dout=dout) -> None:
            _check(sides, leaves, dout)

        yield bench.Case(
            name=f"forward {shape}",
            num_flops=shape.num_flops(),
            gemm=GEMM,
            check=check,
            sides={side: _forward(f, leaves) for side, f in sides.items()},
            min_over_best=2.5 if shape == TARGET else None,
            **targets,
        )
        yield bench.Case(
            name=f"forward+backward {shape}",
            num_flops=shape.num_flops() * 7 // 2,
            gemm=GEMM,
            check=lambda: None,  # the same sides as above
            sides={side: _forward_backward(f, leaves, dout) for side, f in sides.items()},
            min_over_best=2.0 if shape == TARGET else None,
            **targets,
        )


def _forward(f: Attention, leaves: list[Tensor]) -> Callable[[], Tensor]:
    constants = [leaf.detach() for leaf in leaves]
    return lambda: f(*constants)


def _forward_backward(f: Attention, leaves: list[Tensor], dout: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(f(*leaves), leaves, dout)


def _check(sides: dict[str, Attention], leaves: list[Tensor], dout: Tensor) -> None:
    """All sides on the first key-value head and the heads that share it."""
    group = leaves[0].shape[2] // leaves[1].shape[2]
    few = [leaf.detach()[:, :1, : group if leaf is leaves[0] else 1] for leaf in leaves]
    dout = dout[:, :1, : group * leaves[2].shape[3]]

    def results(f: Attention, dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in few]
        out = f(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))]

    exact = results(eager, torch.float64)
    baseline = results(eager, torch.bfloat16)
    for side, f in sides.items():
        roundings = 1 if side == bench.OURS else PEER_ROUNDINGS
        for name, *values in zip(
            ("out", "dq", "dk", "dv"), results(f, torch.bfloat16), baseline, exact, strict=True
        ):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=roundings)


def main(argv: list[str] | None = None) -> int:
    return bench.main("attention", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
