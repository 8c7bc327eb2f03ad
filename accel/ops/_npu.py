"""The Ascend kernels, `accel._npu`: registered for torch-npu's tensors at the first need, or a reason
why not.

PyTorch keeps the dispatch key "PrivateUse1" for a backend from outside, and torch-npu takes it.
"""

import functools
import importlib

from accel.ops import _launchers, _native

__all__ = ["PACKAGE", "reason"]

PACKAGE = "accel._npu"


@functools.cache
def reason() -> str | None:
    """Why the Ascend kernels are missing, or None once they are registered (here, if need be)."""
    _native.reason()  # the gradients in C++, which are worth having here too
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        return f"torch_npu cannot be imported: {error}; install the one that goes with this torch and CANN"
    _launchers.registered(PACKAGE, "PrivateUse1")
    return None
