"""The kernels in CUDA C++, `accel/_CUDA`: registered for CUDA at the first need, or a reason why not.

They come before Triton's, which serve the other ops; `ACCEL_CUDA_KERNELS` (`_kernel_choice`) may ask for
others.
"""

import functools
import re
from pathlib import Path

import torch

from accel.ops import _native
from accel.ops._kernel_choice import VARIABLE, chosen

__all__ = ["built", "reason"]

LIBRARY_PATTERN = "_CUDA*.so"
HOW_TO_BUILD = (
    "build them with `pip install --no-build-isolation .` (needs nvcc of PyTorch's CUDA version)"
)


def reason() -> str | None:
    """Why these kernels do not serve CUDA tensors, or None once they are registered (here, if need be).

    Raises `RuntimeError` where `ACCEL_CUDA_KERNELS=cuda` asks for them and they cannot be had, `ValueError`
    where it asks for what there is not.
    """
    choice = chosen().every
    if choice == "triton":
        return f"{VARIABLE}=triton"
    missing = _missing()
    if missing and choice == "cuda":
        raise RuntimeError(f"{VARIABLE}=cuda: {missing}")
    return missing


def built() -> list[Path]:
    """The library, whether it fits or not; empty where there is none."""
    return sorted(_native.PACKAGE.glob(LIBRARY_PATTERN))


@functools.cache
def _missing() -> str | None:
    libraries = built()
    if not libraries:
        return f"no CUDA C++ kernels in {_native.PACKAGE} ({LIBRARY_PATTERN}); {HOW_TO_BUILD}"
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:
        return f"{libraries[0].name} does not load: {error}; {HOW_TO_BUILD}"
    if mismatch := _native.mismatch(libraries[0].name, torch.ops.accel._cuda_torch_version()):
        return f"{mismatch}; {HOW_TO_BUILD}"
    built_for = torch.ops.accel._cuda_architectures()
    for device in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(device)
        if not _runs_on(built_for, capability):
            return (
                f"{libraries[0].name} was built for {built_for}, GPU {device} is "
                f"{capability[0]}.{capability[1]}: set ACCEL_CUDA_ARCHS; {HOW_TO_BUILD}"
            )
    torch.ops.accel._cuda_register_kernels()
    return None


def _runs_on(architectures: str, capability: tuple[int, int]) -> bool:
    """Whether code for `architectures`, say "80;90a;100+PTX", runs on a GPU of this capability.

    Binaries run within their major version from their minor one on, those with an "a" on nothing else;
    PTX on whatever comes later.
    """
    for major, minor, letter, ptx in re.findall(r"(\d+)(\d)(a?)(\+PTX)?", architectures):
        built_for = int(major), int(minor)
        if built_for == capability or (ptx and not letter and built_for < capability):
            return True
        if not letter and built_for[0] == capability[0] and built_for[1] < capability[1]:
            return True
    return False
