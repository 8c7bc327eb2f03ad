"""The native kernels, `accel/_C`: loaded at the first need, or a reason why they cannot be.

Loading registers kernels under ops that `accel.ops` has already defined; nothing else changes. One
library serves every Python version and CPU of one PyTorch minor version (PyTorch promises no C++
ABI across them).

`ACCEL_CPU_ISA=baseline|avx2|avx512` chooses the instruction set; unset takes the widest that the
CPU has. `ACCEL_NATIVE_LIBRARY=FILE` loads that file instead: `make asan` tests such a build.
"""

import functools
import os
from pathlib import Path

import torch

__all__ = ["isa", "mismatch", "reason"]

LIBRARY_PATTERN = "_C.*so"
PACKAGE = Path(__file__).parent.parent
HOW_TO_BUILD = "build them with `pip install --no-build-isolation .` (needs g++ >= 11)"


@functools.cache
def reason() -> str | None:
    """Why the native kernels are missing, or None once they are loaded (here, if need be)."""
    chosen = os.environ.get("ACCEL_NATIVE_LIBRARY")
    libraries = [Path(chosen)] if chosen else sorted(PACKAGE.glob(LIBRARY_PATTERN))
    if not libraries:
        return f"no native kernels in {PACKAGE} ({LIBRARY_PATTERN}); {HOW_TO_BUILD}"
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:
        return f"{libraries[0].name} does not load: {error}; {HOW_TO_BUILD}"
    if not hasattr(torch.ops.accel, "_native_torch_version"):
        return f"{libraries[0].name} has none of accel's kernels; {HOW_TO_BUILD}"
    if unfit := mismatch(libraries[0].name, torch.ops.accel._native_torch_version()):
        return f"{unfit}; {HOW_TO_BUILD}"
    return None


def mismatch(library: str, built_for: str) -> str | None:
    """Why a library that was built for this version of PyTorch does not fit the one that runs, or None."""
    if _minor(built_for) == _minor(torch.__version__):
        return None
    return f"{library} was built for torch {built_for}, this is torch {torch.__version__}"


def isa() -> str:
    """The instruction set that the CPU kernels run with: "baseline", "avx2" or "avx512".

    Raises `RuntimeError` where the kernels are missing, or where `ACCEL_CPU_ISA` asks for what the
    CPU lacks; `ValueError` where it names no instruction set.
    """
    if missing := reason():
        raise RuntimeError(missing)
    return torch.ops.accel._native_isa()


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
