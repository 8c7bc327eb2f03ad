"""RMSNorm on the CPU: `accel.ops.rms_norm` beside eager and compiled `F.rms_norm`.

Bytes: forward 2 T N elements, forward and backward 5 T N (see `norm_cases`). All sides use one
allocator that reuses pages. Not swept: fp16 (the same traffic as bf16), zero_centered (one addition
per weight), other thread counts (set OMP_NUM_THREADS).
"""

import sys
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from accel.ops import rms_norm
from accel.testing import bench
from benchmarks._norm import Targets, norm_cases


def eager(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def cases(quick: bool) -> Iterator[bench.Case]:
    return norm_cases(rms_norm, eager, 1, Targets((0.7, 0.6), (1.3, 2.0)), quick)


def main(argv: list[str] | None = None) -> int:
    return bench.main("rms_norm", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
