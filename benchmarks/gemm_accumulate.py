"""Weight gradients on the CPU: `accel.ops.gemm_accumulate` beside the ways that torch has.

FLOPs: 2 M N K; the limit is torch's own product of bf16 matrices, 2048^3. Peers: what Megatron does
without the fusion (a bf16 product, rounded to bf16, then added; less exact), and with it (both
operands copied to fp32). Shapes: M, N of the second end-to-end model's linear layers, K its tokens.
Not swept: other K (pieces of 512 sum up), fp32 (there is no kernel).
"""

import sys
from collections.abc import Iterator

import torch

from accel.ops import gemm_accumulate, gemm_accumulate_ref
from accel.testing import bench
from accel.testing.tolerance import assert_close_to_baseline

SHAPES = [(5632, 1024, 1024), (32000, 1024, 1024)]  # fc1 and the output layer; M, N, K


def rounded(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    out.add_(a.t() @ b)


def cases(quick: bool) -> Iterator[bench.Case]:
    for m, n, k in [(64, 128, 256)] if quick else SHAPES:
        torch.manual_seed(0)
        a, b = torch.randn(k, m).bfloat16(), torch.randn(k, n).bfloat16()
        out = torch.randn(m, n)

        def check(out=out, a=a, b=b) -> None:
            ours, plain = out.clone(), out.clone()
            gemm_accumulate(ours, a, b)
            gemm_accumulate_ref(plain, a, b)
            exact = out.double() + a.double().t() @ b.double()
            assert_close_to_baseline(ours, plain, exact, roundings=16)

        yield bench.Case(
            name=f"{m}x{n} += {k}x{m}^T {k}x{n} bfloat16",
            num_flops=2 * m * n * k,
            gemm=(2048, 2048, 2048),
            check=check,
            sides={
                bench.OURS: lambda out=out, a=a, b=b: gemm_accumulate(out, a, b),
                "bf16 product, then add": lambda out=out, a=a, b=b: rounded(out, a, b),
                "fp32 copies": lambda out=out, a=a, b=b: gemm_accumulate_ref(out, a, b),
            },
            min_over_best=1.0,
        )


def main(argv: list[str] | None = None) -> int:
    return bench.main("gemm_accumulate", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
