"""What the tests of both norms share: the inputs to try, and the fp64 truth to compare with."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from accel.ops import _native
from accel.testing.tolerance import assert_close_to_baseline

needs_native = pytest.mark.skipif(
    _native.reason() is not None, reason=f"no native kernels: {_native.reason()}"
)

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]

SHAPES = [
    (4, 64),  # whole vectors
    (3, 5, 127),  # leading dimensions, a ragged tail in every instruction set
    (1, 33),  # one row: two AVX-512 vectors and one lane
    (37, 1),  # one column: all tail
    (129, 24),  # rows that fill neither their block nor their run
    (1025, 40),  # several runs
    (160, 4096),  # rows of a real model, several threads
]

# fp32 computes in the dtype of its result. From x to y: the last steps of the sum, mean, + eps,
# sqrt, reciprocal, three products. In bf16 and fp16 all that is below the one rounding at the end.
ROUNDINGS = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}

Norm = Callable[..., Tensor]


def make_inputs(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], num_vectors: int, seed: int = 0
) -> tuple[Tensor, list[Tensor], Tensor]:
    """x, its [N] vectors, and dy."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x = (draw(*shape) * 2 + 0.5).to(dtypes[0])
    vectors = [(draw(shape[-1]) * 0.5 + 0.5).to(dtypes[1]) for _ in range(num_vectors)]
    return x, vectors, draw(*shape).to(dtypes[0])


def run(norm: Norm, x: Tensor, vectors: list[Tensor], dy: Tensor, **options) -> list[Tensor]:
    """[y, dx, one gradient per vector]"""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *vectors)]
    y = norm(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_matches(ours: Norm, ref: Norm, x: Tensor, vectors: list[Tensor], dy: Tensor, **options):
    """y and all gradients of `ours` are within twice the error of `ref` in the same dtypes."""
    got = run(ours, x, vectors, dy, **options)
    plain = run(ref, x, vectors, dy, **options)
    in_fp64 = [v.double() for v in vectors]
    exact = run(ref, x.double(), in_fp64, dy.double(), **options)
    magnitudes = _magnitudes(ref, x.double(), in_fp64, dy.double(), **options)
    names = ["y", "dx", "dweight", "dbias"]
    for name, a, b, c, magnitude in zip(names, got, plain, exact, magnitudes, strict=False):
        assert_close_to_baseline(
            a, b, c, name=name, magnitude=magnitude, roundings=ROUNDINGS[a.dtype]
        )


def _magnitudes(ref: Norm, x: Tensor, vectors: list[Tensor], dy: Tensor, **options) -> list[float]:
    """The size of the terms that cancel: r g in dx, which is 0 for N = 1, and in column sums."""
    if x.numel() == 0:
        return [0.0] * (2 + len(vectors))
    eps, zero_centered = 1e-5, options.get("zero_centered", False)
    scale = vectors[0] + 1 if zero_centered else vectors[0]
    centred = x - x.mean(-1, keepdim=True) if len(vectors) == 2 else x
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    hidden = centred.abs() + (x.abs() if len(vectors) == 2 else 0)
    y = (hidden * rstd * scale).abs().max() + (vectors[1].abs().max() if len(vectors) == 2 else 0)
    dx = (rstd * dy * scale).abs().max() * (hidden * rstd).abs().max().clamp(min=1)
    rows = tuple(range(x.ndim - 1))
    columns = [(dy * hidden * rstd).abs().sum(rows).max(), dy.abs().sum(rows).max()]
    return [float(m) for m in (y, dx, *columns[: len(vectors)])]


@st.composite
def laid_out(draw) -> Tensor:
    """[T, N] or [A, B, N], contiguous or one of the ways in which it may not be."""
    num_cols = draw(st.sampled_from([0, 1, 2, 7, 16, 31, 64, 67]))
    shape = (
        *draw(st.lists(st.sampled_from([0, 1, 2, 5, 13, 17]), min_size=1, max_size=2)),
        num_cols,
    )
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    match draw(st.sampled_from(["contiguous", "transposed", "strided", "offset", "expanded"])):
        case "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case "strided":
            return torch.stack([x, -x], dim=-1)[..., 0]
        case "offset":  # contiguous, but not where an allocation starts
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape)
        case "expanded":
            return x[:1].expand(shape) if shape[0] else x
    return x


def run_with_isa(isa: str, script: str) -> subprocess.CompletedProcess:
    """Run Python source in a process of its own: ACCEL_CPU_ISA is read once per process."""
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ACCEL_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
