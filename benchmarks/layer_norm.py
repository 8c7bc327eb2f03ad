"""LayerNorm on the CPU: `accel.ops.layer_norm` beside eager and compiled `F.layer_norm`.

Eager is itself one fused and vectorised kernel here, unlike `F.rms_norm`, so there is little to win
and no target. Bytes: forward 2 T N elements, forward and backward 5 T N (see `norm_cases`). All
sides use one allocator that reuses pages. Not swept: fp16 (the same traffic as bf16), zero_centered
(one addition per weight), other thread counts (set OMP_NUM_THREADS).
"""

import sys
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from accel.ops import layer_norm
from accel.testing import bench
from benchmarks._norm import Targets, norm_cases


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def cases(quick: bool) -> Iterator[bench.Case]:
    return norm_cases(layer_norm, eager, 2, Targets(), quick)


def main(argv: list[str] | None = None) -> int:
    return bench.main("layer_norm", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
