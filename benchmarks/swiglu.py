"""SwiGLU on the CPU: `accel.ops.swiglu` beside the same in eager and compiled PyTorch.

Stock Megatron runs it compiled. Bytes: see `activation_cases`. All sides use one allocator that reuses
pages. Not swept: fp16 (the same traffic as bf16), bias, probabilities, other thread counts (set
OMP_NUM_THREADS).
"""

import sys
from collections.abc import Iterator

from accel.ops import swiglu
from accel.testing import bench
from benchmarks._activation import activation_cases


def cases(quick: bool) -> Iterator[bench.Case]:
    return activation_cases(swiglu, "swiglu", quick, min_of_limit=(0.60, 0.55), min_over_best=1.8)


def main(argv: list[str] | None = None) -> int:
    return bench.main("swiglu", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
