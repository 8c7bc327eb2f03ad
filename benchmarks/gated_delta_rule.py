"""The recurrence of gated delta networks on the CPU: `gated_delta_rule` beside Megatron's PyTorch path.

That is what ``--deterministic-mode`` runs, the same chunks by autograd; `fla`'s kernels do not run on a CPU.
FLOPs, for S tokens, H heads with K and V columns and chunks of Q tokens: S H (2 Q (2 K + 3 V / 2) + 6 K V)
forward, three times that with backward. The limit is one fp32 product. Not swept: the size of chunks.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from accel.ops import gated_delta_rule, gated_delta_rule_ref
from accel.ops.gated_delta_rule import CHUNK as Q
from accel.testing import bench
from accel.testing.bench import OURS, Case
from benchmarks import _recurrence

SHAPES = [(2048, 16, 128, 128)]
QUICK_SHAPES = [(200, 2, 16, 16)]
CHECKED = 200  # a ragged end


def ours(*tensors: Tensor) -> Tensor:
    return gated_delta_rule(*tensors)[0]


def reference(*tensors: Tensor) -> Tensor:
    return gated_delta_rule_ref(*tensors)[0]


def megatrons(*tensors: Tensor) -> Tensor:
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(*tensors)[0]


def cases(quick: bool) -> Iterator[Case]:
    for tokens, heads, keys, values in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        dtype = torch.bfloat16
        q, k = (normalize(torch.randn(1, tokens, heads, keys), dim=-1).to(dtype) for _ in range(2))
        v = torch.randn(1, tokens, heads, values).to(dtype)
        g, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads).to(dtype)
        per_head = 2 * Q * (2 * keys + 3 * values // 2) + 6 * keys * values
        problem = _recurrence.Problem(
            label=f"{tokens}x{heads} heads {keys} by {values} bfloat16",
            inputs=(q, k, v, g, beta),
            names=("q", "k", "v", "g", "beta"),
            dy=torch.randn(1, tokens, heads, values).to(dtype),
            num_flops=tokens * heads * per_head,
            gemm=(tokens, heads * values, heads * values),
        )
        sides = {OURS: ours, "megatron's PyTorch path": megatrons}
        yield from _recurrence.cases(problem, sides, reference, checked_tokens=CHECKED, roundings=6)


def main(argv: list[str] | None = None) -> int:
    return bench.main("gated_delta_rule", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
