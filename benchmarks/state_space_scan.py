"""The scan of Mamba-2 on the CPU: `accel.ops.state_space_scan` beside the same by autograd.

The peer computes the products of all chunks at once and leaves the gradients to autograd, as the listing in
the Mamba-2 paper does; `mamba_ssm`'s kernels do not run on a CPU. FLOPs, for S tokens, H heads of P columns,
R of them to a group, states of N columns and chunks of Q tokens: S H (2 Q (N / R + P) + 4 P N) forward, three
times that with backward. The limit is one fp32 product. Not swept: the size of chunks (see `CHUNK`).
"""

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops import state_space_scan, state_space_scan_ref
from accel.ops.state_space_scan import CHUNK
from accel.testing import bench
from accel.testing.bench import OURS, Case
from benchmarks import _recurrence

Q = CHUNK["cpu"]
SHAPES = [(2048, 32, 64, 8, 128)]
QUICK_SHAPES = [(256, 4, 16, 2, 16)]
CHECKED = 192  # whole chunks


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
        per_head = 2 * Q * (state * groups / heads + columns) + 4 * columns * state
        problem = _recurrence.Problem(
            label=f"{tokens}x{heads}x{columns} groups {groups} state {state} bfloat16",
            inputs=(x, dt, a, b, c, d, z),
            names=("x", "dt", "a", "b", "c", "d", "z"),
            dy=torch.randn(1, tokens, heads, columns).to(dtype),
            num_flops=int(tokens * heads * per_head),
            gemm=(tokens, heads * columns, heads * columns),
        )
        sides = {OURS: ours, "autograd, all chunks at once": at_once}
        yield from _recurrence.cases(problem, sides, reference, checked_tokens=CHECKED, roundings=4)


def main(argv: list[str] | None = None) -> int:
    return bench.main("state_space_scan", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
