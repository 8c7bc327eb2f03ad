"""The scan of Mamba-2 on the CPU: `accel.ops.state_space_scan` beside the same by autograd.

The peer computes the products of all chunks at once and leaves the gradients to autograd, as the listing in
the Mamba-2 paper does; `mamba_ssm`'s kernels do not run on a CPU. FLOPs, for S tokens, H heads of P columns,
R of them to a group, states of N columns and chunks of Q tokens: S H (2 Q (N / R + P) + 4 P N) forward, three
times that with backward. The limit is one fp32 product. Not swept: the size of chunks (see `CHUNK`).
"""

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops import state_space_scan, state_space_scan_ref
from accel.ops.state_space_scan import CHUNK
from accel.testing import bench
from accel.testing.bench import OURS, Case
from accel.testing.tolerance import assert_close_to_baseline

AT_ONCE = "autograd, all chunks at once"
ROUNDINGS = {OURS: 4, AT_ONCE: 64}
"""A peer must compute the same thing, but need not keep our tolerance."""

Q = CHUNK["cpu"]
SHAPES = [(2048, 32, 64, 8, 128)]
QUICK_SHAPES = [(256, 4, 16, 2, 16)]
CHECKED = 192
"""Tokens: the reference goes one by one."""

Scan = Callable[..., Tensor]


def at_once(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
    """Whole chunks only."""
    groups = b.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    u = (x.to(wide) * dt.unsqueeze(-1)).unflatten(1, (-1, Q)).unflatten(3, (groups, -1))
    keys, queries = (t.to(wide).unflatten(1, (-1, Q)) for t in (b, c))
    s = (dt * a).unflatten(1, (-1, Q)).unflatten(3, (groups, -1)).cumsum(2)
    hidden = torch.ones(Q, Q, dtype=torch.bool).triu(1)
    by_head = s.permute(0, 1, 3, 4, 2)
    between = (by_head.unsqueeze(-1) - by_head.unsqueeze(-2)).masked_fill(hidden, -torch.inf).exp()
    scores = torch.einsum("bzign,bzjgn->bzgij", queries, keys).unsqueeze(3) * between
    y = torch.einsum("bzgrij,bzjgrp->bzigrp", scores, u)
    left = (s[:, :, -1:] - s).exp()
    added = torch.einsum("bzjgn,bzjgr,bzjgrp->bzgrpn", keys, left, u)
    state, before = torch.zeros_like(added[:, 0]), []
    for i in range(added.shape[1]):
        before.append(state)
        state = s[:, i, -1].exp()[..., None, None] * state + added[:, i]
    states = torch.stack(before, dim=1)
    y = y + torch.einsum("bzign,bzgrpn,bzigr->bzigrp", queries, states, s.exp())
    y = y.flatten(1, 2).flatten(2, 3) + d[:, None] * x.to(wide)
    return (y * F.silu(z.to(wide))).to(x.dtype)


def ours(*tensors: Tensor) -> Tensor:
    return state_space_scan(*tensors)[0]


def reference(*tensors: Tensor) -> Tensor:
    return state_space_scan_ref(*tensors)[0]


def cases(quick: bool) -> Iterator[Case]:
    for tokens, heads, columns, groups, state in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        dtype = torch.bfloat16
        x, z = (torch.randn(1, tokens, heads, columns).to(dtype) for _ in range(2))
        b, c = (torch.randn(1, tokens, groups, state).to(dtype) for _ in range(2))
        dt, a, d = (
            torch.rand(1, tokens, heads) * 0.1,
            -1 - 15 * torch.rand(heads),
            torch.ones(heads),
        )
        inputs = [t.requires_grad_() for t in (x, dt, a, b, c, d, z)]
        dy = torch.randn(1, tokens, heads, columns).to(dtype)
        sides: dict[str, Scan] = {OURS: ours, AT_ONCE: at_once}
        per_head = 2 * Q * (state * groups / heads + columns) + 4 * columns * state
        flops = int(tokens * heads * per_head)
        label = f"{tokens}x{heads}x{columns} groups {groups} state {state} bfloat16"
        gemm = (tokens, heads * columns, heads * columns)

        def forward(op: Scan, inputs: list[Tensor] = inputs) -> Tensor:
            with torch.no_grad():
                return op(*inputs)

        def both(op: Scan, inputs: list[Tensor] = inputs, dy: Tensor = dy) -> object:
            return torch.autograd.grad(op(*inputs), inputs, dy)

        yield Case(
            name=f"forward {label}",
            num_flops=flops,
            gemm=gemm,
            gemm_dtype=torch.float32,
            check=lambda sides=sides, inputs=inputs, dy=dy: _check(sides, inputs, dy),
            sides={side: lambda f=op: forward(f) for side, op in sides.items()},
        )
        yield Case(
            name=f"forward+backward {label}",
            num_flops=3 * flops,
            gemm=gemm,
            gemm_dtype=torch.float32,
            check=lambda: None,  # the same sides as above
            sides={side: lambda f=op: both(f) for side, op in sides.items()},
        )


def _check(sides: dict[str, Scan], inputs: list[Tensor], dy: Tensor) -> None:
    def results(op: Scan, dtype: torch.dtype | None) -> list[Tensor]:
        cut = [t.detach() if t.ndim == 1 else t.detach()[:, :CHECKED] for t in inputs]
        leaves = [t.to(dtype or t.dtype).requires_grad_() for t in cut]
        y = op(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[:, :CHECKED].to(y.dtype))]

    exact, baseline = results(reference, torch.float64), results(reference, None)
    names = ("y", "dx", "ddt", "da", "db", "dc", "dd", "dz")
    for side, op in sides.items():
        for name, *values in zip(names, results(op, None), baseline, exact, strict=True):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=ROUNDINGS[side])


def main(argv: list[str] | None = None) -> int:
    return bench.main("state_space_scan", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
