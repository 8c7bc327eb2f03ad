"""GEGLU (tanh) on the CPU: `accel.ops.geglu` beside the same in eager and compiled PyTorch.

Stock Megatron runs it compiled. Bytes: see `activation_cases`. All sides use one allocator that reuses
pages. Not swept: fp16 (the same traffic as bf16), bias, probabilities, other thread counts (set
OMP_NUM_THREADS).
"""

import sys
from collections.abc import Iterator

from accel.ops import geglu
from accel.testing import bench
from benchmarks._activation import activation_cases


def cases(quick: bool) -> Iterator[bench.Case]:
    return activation_cases(geglu, "geglu", quick)


def main(argv: list[str] | None = None) -> int:
    return bench.main("geglu", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
