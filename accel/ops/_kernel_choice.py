"""Whose kernels serve CUDA tensors: what the environment variable `ACCEL_CUDA_KERNELS` asks for.

    ACCEL_CUDA_KERNELS=[auto|cuda|triton][,OP=BACKEND]...

    auto         (unset) CUDA C++ where it was built and fits the GPU, else Triton
    cuda         CUDA C++; that it is missing is an error
    triton       Triton alone
    OP=BACKEND   for one file of `accel/ops`, say rms_norm=liger: triton, or a library of `accel._peers`

An op that is named is served by its back end whatever is asked for all.

Why C++ is first, for every shape: in each row that was measured with both it takes less of the host's time,
which is what small shapes wait for, and of the GPU's at most 6 % more (GEGLU's backward) and up to 60 % less
(RMSNorm's backward, rows of 16384). It is not always the faster: in 8 of the 18 rows, of LayerNorm, SwiGLU,
GEGLU and the sum before a norm, Triton takes 2 to 6 % less of the GPU. From which size on that would outweigh
the host is not known. All bf16, on an H200 (benchmarks/results/h200), each side in a session of its own;
of adamw, multi_tensor, moe_permute, bias_gelu and squared_relu only one was measured: they follow the others.

    op                    shape                      GPU, us          host, us
                                                     C++      Triton  C++  Triton
    rms_norm forward      16384 x 4096                  67.4    68.5      18   75
    rms_norm backward     16384 x 4096                 101.5   125.1     146  341
    layer_norm forward    16384 x 4096                  72.4    69.3      20   84
    layer_norm backward   16384 x 4096                 126.7   131.4     135  376
    add_rms_norm forward  16384 x 4096                 131.9   133.7      33   85
    rms_norm forward      8192 x 8192                   67.4    67.6      23   49
    rms_norm backward     8192 x 8192                  101.8   106.3     113  287
    layer_norm forward    8192 x 8192                   77.5    74.0      31   60
    layer_norm backward   8192 x 8192                  113.5   111.6     175  324
    add_rms_norm forward  8192 x 8192                  135.8   132.4      31   83
    rms_norm forward      4096 x 16384                  67.6    70.1      24   68
    rms_norm backward     4096 x 16384                 106.4   263.3     123  305
    swiglu forward        8192 x 14336                 169.1   163.6      20   69
    swiglu backward       8192 x 14336                 286.4   275.4      92  210
    geglu forward         8192 x 14336                 169.0   164.1      24   82
    geglu backward        8192 x 14336                 292.3   275.8      81  219
    rope forward          S=8192, 32+8 heads of 128     43.7    43.8      26  170
    cross_entropy both    T=8192, V=131072            1565.1  1822.5     496  860
"""

import os
from typing import NamedTuple

from accel._peers import LIBRARIES
from accel._triton import MODULES

__all__ = ["VARIABLE", "Choice", "chosen"]

VARIABLE = "ACCEL_CUDA_KERNELS"
ALL = ("auto", "cuda", "triton")


class Choice(NamedTuple):
    """The back end that is asked for: one for every op, and others for some of them."""

    every: str
    by_op: dict[str, str]

    def asked_of(self, backend: str) -> list[str]:
        """The ops that are to be served by this back end, by name."""
        return [op for op, name in self.by_op.items() if name == backend]


OPS = {
    op: (*["triton"] * (op in MODULES), *(name for name, own in LIBRARIES.items() if op in own))
    for op in sorted({*MODULES, *(op for own in LIBRARIES.values() for op in own)} - {"attention"})
}
"""What may serve each. Attention has a variable of its own: `_attention_backends`."""


def chosen() -> Choice:
    """What is asked for.

    Raises:
        ValueError: a back end or an op that there is not, or one op twice.
    """
    every, by_op = "auto", {}
    entries = [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",")]
    for at, entry in enumerate(entries):
        op, given, backend = entry.partition("=")
        if not given:
            if at > 0 or entry not in ("", *ALL):
                what = f"one of {', '.join(ALL)}, and then OP=BACKEND, separated by commas"
                raise ValueError(f"{VARIABLE} must be {what}, got {entry!r}")
            every = entry or every
        elif op == "attention":
            raise ValueError(f"{VARIABLE}: {entry!r}: set ACCEL_ATTENTION_BACKEND for attention")
        elif op not in OPS:
            raise ValueError(f"{VARIABLE}: {entry!r} names no op; there are {', '.join(OPS)}")
        elif backend not in OPS[op]:
            there = ", ".join(OPS[op])
            raise ValueError(f"{VARIABLE}: {entry!r}: {op} can be served by {there}")
        elif op in by_op:
            raise ValueError(f"{VARIABLE} names {op} twice")
        else:
            by_op[op] = backend
    return Choice(every, by_op)
