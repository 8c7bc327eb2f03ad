"""The recurrence of gated delta networks on the CPU: `gated_delta_rule` beside Megatron's PyTorch path.

That is what ``--deterministic-mode`` runs, the same chunks by autograd; `fla`'s kernels do not run on a CPU.
FLOPs, for S tokens, H heads with K and V columns and chunks of Q tokens: S H (2 Q (2 K + 3 V / 2) + 6 K V)
forward, three times that with backward. The limit is one fp32 product. Not swept: the size of chunks.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from accel.ops import gated_delta_rule, gated_delta_rule_ref
from accel.ops.gated_delta_rule import CHUNK as Q
from accel.testing import bench
from accel.testing.bench import OURS, Case
from accel.testing.tolerance import assert_close_to_baseline

MEGATRON = "megatron's PyTorch path"
ROUNDINGS = {OURS: 6, MEGATRON: 64}
"""A peer must compute the same thing, but need not keep our tolerance."""

SHAPES = [(2048, 16, 128, 128)]
QUICK_SHAPES = [(200, 2, 16, 16)]
CHECKED = 200
"""Tokens: the reference goes one by one."""

Rule = Callable[..., Tensor]


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
        inputs = [t.requires_grad_() for t in (q, k, v, g, beta)]
        do = torch.randn(1, tokens, heads, values).to(dtype)
        sides: dict[str, Rule] = {OURS: ours, MEGATRON: megatrons}
        per_head = 2 * Q * (2 * keys + 3 * values // 2) + 6 * keys * values
        flops = tokens * heads * per_head
        label = f"{tokens}x{heads} heads {keys} by {values} bfloat16"
        gemm = (tokens, heads * values, heads * values)

        def forward(op: Rule, inputs: list[Tensor] = inputs) -> Tensor:
            with torch.no_grad():
                return op(*inputs)

        def both(op: Rule, inputs: list[Tensor] = inputs, do: Tensor = do) -> object:
            return torch.autograd.grad(op(*inputs), inputs, do)

        yield Case(
            name=f"forward {label}",
            num_flops=flops,
            gemm=gemm,
            gemm_dtype=torch.float32,
            check=lambda sides=sides, inputs=inputs, do=do: _check(sides, inputs, do),
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


def _check(sides: dict[str, Rule], inputs: list[Tensor], do: Tensor) -> None:
    def results(op: Rule, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach()[:, :CHECKED].to(dtype or t.dtype).requires_grad_() for t in inputs]
        o = op(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, do[:, :CHECKED].to(o.dtype))]

    exact, baseline = results(reference, torch.float64), results(reference, None)
    for side, op in sides.items():
        for name, *values in zip(
            ("o", "dq", "dk", "dv", "dg", "dbeta"), results(op, None), baseline, exact, strict=True
        ):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=ROUNDINGS[side])


def main(argv: list[str] | None = None) -> int:
    return bench.main("gated_delta_rule", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
