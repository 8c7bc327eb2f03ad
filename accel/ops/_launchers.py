"""Kernels that Python launches, `accel._triton` and `accel._npu`: how a folder of them is registered.

Such a package is a table of contents, `MODULES`; each module's `KERNELS` says for which op each of its
functions is.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from accel.ops import _native

__all__ = ["kernels", "module", "modules", "register", "registered"]


def module(package: str, op: str) -> ModuleType:
    """A package's kernels for one file of `accel/ops`. Raises `ImportError` for what they need."""
    return importlib.import_module(f"{package}.{op}")


def modules(package: str) -> list[ModuleType]:
    """Every file of kernels of a package, imported. Raises `ImportError` for what it needs."""
    return [module(package, name) for name in importlib.import_module(package).MODULES]


def kernels(package: str) -> dict[str, Callable[..., Any]]:
    """The function that serves each op, say "accel::rms_norm_fwd"."""
    return {op: kernel for module in modules(package) for op, kernel in module.KERNELS.items()}


def register(
    package: str, library: torch.library.Library, key: str, *, override: bool = False
) -> None:
    """Let a package's kernels serve a dispatch key, say "CUDA", for as long as `library` lives.

    Args:
        package: "accel._triton" or "accel._npu".
        library: of kind "IMPL" and namespace "accel".
        key: a dispatch key. For Triton's, "CPU" needs `TRITON_INTERPRET=1` from before its first import.
        override: take the place of kernels that are there, until the library is destroyed; else an op
            that has one keeps it.

    Raises:
        ImportError: the package needs what is not installed.
    """
    functions = kernels(package)
    _native.reason()  # loaded later, it would take its place back
    for op, function in functions.items():
        if override or not torch._C._dispatch_has_kernel_for_dispatch_key(op, key):
            library.impl(op, function, key, allow_override=override)


@functools.cache
def registered(package: str, key: str) -> torch.library.Library:
    """The same for good."""
    library = torch.library.Library("accel", "IMPL")
    register(package, library, key)
    return library
