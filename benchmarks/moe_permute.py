"""Tokens to experts and back on the CPU: `moe_permute`, `moe_unpermute` beside Megatron's unfused path.

Peers compute what `megatron.core.transformer.moe.moe_utils` computes without Transformer Engine: argsort of
the routing map, `index_select`, and `scatter_add_` into zeros.

Bytes, for T tokens of N columns and P = T topk rows: permute reads x and writes y, T N + P N elements;
unpermute reads y and writes its result, the same. Backward is each other's forward. The map and the
probabilities are below 1 % and not counted. Not swept: fp16 (the traffic of bf16).
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from accel.ops import moe_permute, moe_row_map, moe_unpermute
from accel.testing import bench
from accel.testing.bench import OURS, Case, input_sets

EAGER, COMPILE = "torch eager", "torch.compile"

SHAPES = [
    (4096, 4096, 8, 2, torch.bfloat16),  # Mixtral 8x7B, one sequence of 4096
    (4096, 2048, 64, 6, torch.bfloat16),  # DeepSeek-V2-Lite
]
QUICK_SHAPES = [(256, 512, 8, 2, torch.bfloat16)]
TARGET = SHAPES[0]

Permute = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Unpermute = Callable[[Tensor, Tensor, int], Tensor]


def ours_permute(x: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row_map = moe_row_map(routing_map, num_rows(routing_map))
    y, w = moe_permute(x, row_map, probs)
    assert w is not None
    return y, w, row_map


def eager_permute(x: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    routed = routing_map.T.contiguous()
    order = routed.reshape(-1).argsort(descending=True, stable=True)[: num_rows(routing_map)]
    indices = order % x.shape[0]
    return x.index_select(0, indices), probs.T.contiguous().reshape(-1)[order], indices


def eager_unpermute(y: Tensor, indices: Tensor, num_tokens: int) -> Tensor:
    out = torch.zeros(num_tokens, y.shape[1], dtype=y.dtype)
    return out.scatter_add_(0, indices.unsqueeze(1).expand(-1, y.shape[1]), y)


def num_rows(routing_map: Tensor) -> int:
    return routing_map.shape[0] * TOPK[routing_map.shape[1]]


TOPK = {experts: topk for _, _, experts, topk, _ in SHAPES + QUICK_SHAPES}


def cases(quick: bool) -> Iterator[Case]:
    for shape in QUICK_SHAPES if quick else SHAPES:
        num_tokens, num_cols, num_experts, topk, dtype = shape
        torch.manual_seed(0)
        x = torch.randn(num_tokens, num_cols, dtype=dtype)
        indices = torch.randn(num_tokens, num_experts).topk(topk, dim=1).indices
        routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(
            1, indices, True
        )
        probs = torch.rand(num_tokens, num_experts) * routing_map
        permutes: dict[str, Permute] = {OURS: ours_permute, EAGER: eager_permute}
        unpermutes: dict[str, Unpermute] = {OURS: moe_unpermute, EAGER: eager_unpermute}
        if not quick:  # compiling takes longer than all the rest
            permutes[COMPILE] = torch.compile(eager_permute, fullgraph=True, dynamic=False)
            unpermutes[COMPILE] = torch.compile(eager_unpermute, fullgraph=True, dynamic=False)
        label = f"{num_tokens}x{num_cols} {num_experts} experts top {topk} " + str(
            dtype
        ).removeprefix("torch.")
        y, _, row_map = ours_permute(x, probs, routing_map)
        data = _Data(x, probs, routing_map, y, row_map)
        target = shape == TARGET
        yield from _cases(label, data, permutes, unpermutes, target)


class _Data:
    def __init__(self, x: Tensor, probs: Tensor, routing_map: Tensor, y: Tensor, rows: Tensor):
        self.x, self.probs, self.routing_map, self.y = x, probs, routing_map, y
        self.indices = rows % len(x)
        self.row_map = {OURS: rows}

    def map_for(self, side: str) -> Tensor:
        return self.row_map.get(side, self.indices)


def _cases(
    label: str,
    data: _Data,
    permutes: dict[str, Permute],
    unpermutes: dict[str, Unpermute],
    target: bool,
) -> Iterator[Case]:
    num_bytes = data.x.nbytes + data.y.nbytes
    goals = {"min_of_limit": 0.75, "min_over_best": 1.2} if target else {}

    def check_permute() -> None:
        want = eager_permute(data.x, data.probs, data.routing_map)
        for side, permute in permutes.items():
            got = permute(data.x, data.probs, data.routing_map)
            assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True)), side

    def check_unpermute() -> None:
        exact = eager_unpermute(data.y.double(), data.indices, len(data.x))
        baseline = eager_unpermute(data.y, data.indices, len(data.x))
        worst = (baseline.double() - exact).abs().max()
        for side, unpermute in unpermutes.items():
            got = unpermute(data.y, data.map_for(side), len(data.x))
            assert (got.double() - exact).abs().max() <= worst, side

    yield Case(
        name=f"permute {label}",
        num_bytes=num_bytes,
        copy_bytes=data.y.nbytes,
        check=check_permute,
        sides=permutes,
        input_sets=input_sets(data.x, data.probs, data.routing_map),
        **goals,
    )
    yield Case(
        name=f"unpermute {label}",
        num_bytes=num_bytes,
        copy_bytes=data.y.nbytes,
        check=check_unpermute,
        sides={
            side: lambda y, f=unpermute, s=side: f(y, data.map_for(s), len(data.x))
            for side, unpermute in unpermutes.items()
        },
        input_sets=input_sets(data.y),
        **goals,
    )


def main(argv: list[str] | None = None) -> int:
    return bench.main("moe_permute", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
