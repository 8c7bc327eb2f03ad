"""What every test of the Triton kernels may use, and how they round where they are interpreted."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from accel.ops import _dispatch, _launchers, _triton
from tests.triton.harness import HAS_GPU


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits, uint16, of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, nearest).astype(np.uint16)


@pytest.fixture(scope="class")
def triton_kernels() -> Iterator[None]:
    """Triton's kernels serve CPU tensors, interpreted; on a GPU they take the place of CUDA C++."""
    library = torch.library.Library("accel", "IMPL")
    _dispatch.forget()
    try:
        if HAS_GPU:
            _triton.reason()  # what is registered last would win
        key = "CUDA" if HAS_GPU else "CPU"
        _launchers.register(_triton.PACKAGE, library, key, override=True)
        yield
    finally:
        library._destroy()
        _dispatch.forget()


@pytest.fixture(scope="class", autouse=True)
def nearest_bf16() -> Iterator[None]:
    """Roundings to bfloat16 as a GPU makes them: Triton's interpreter cuts the digits off."""
    if HAS_GPU:
        yield
        return
    convert = interpreter._convert_float

    def rounded(x: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bf16(x)
        return convert(x, source, target, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
