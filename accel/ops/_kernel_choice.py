"""Whose kernels serve CUDA tensors: what the environment variable `ACCEL_CUDA_KERNELS` asks for.

    ACCEL_CUDA_KERNELS=[auto|cuda|triton][,OP=BACKEND]...

    auto         (unset) CUDA C++ where it was built and fits the GPU, else Triton
    cuda         CUDA C++; that it is missing is an error
    triton       Triton alone
    OP=BACKEND   for one file of `accel/ops`, say rms_norm=liger: triton, or a library of `accel._peers`

An op that is named is served by its back end whatever is asked for all.
"""

import os
from typing import NamedTuple

from accel._peers import LIBRARIES
from accel._triton import MODULES

__all__ = ["VARIABLE", "Choice", "chosen"]

VARIABLE = "ACCEL_CUDA_KERNELS"
ALL = ("auto", "cuda", "triton")


class Choice(NamedTuple):
    """For all ops, and for some of them another."""

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
