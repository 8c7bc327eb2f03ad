"""The Triton kernels, `accel._triton`: registered for CUDA at the first need, or a reason why not.

They serve the ops that have no kernel there yet: those in CUDA C++ (`accel.ops._cuda`) come first.
What Triton needs to start (its import, its compiler) is paid by the first op on a CUDA tensor.
"""

import functools
import logging

from accel.ops import _cuda, _launchers, _native

__all__ = ["PACKAGE", "reason"]

PACKAGE = "accel._triton"


@functools.cache
def reason() -> str | None:
    """Why the Triton kernels are missing, or None once they are registered (here, if need be)."""
    _native.reason()  # the gradients in C++, which are worth having here too
    unfit = _cuda.reason()  # asked before Triton's kernels take its ops
    if unfit and _cuda.built():
        level = logging.INFO if _cuda.chosen() == "triton" else logging.WARNING
        logging.getLogger("accel").log(level, "Triton's kernels serve CUDA: %s", unfit)
    try:
        _launchers.registered(PACKAGE, "CUDA")
    except ImportError as error:
        return f"Triton cannot be imported: {error}; install it with `pip install triton`"
    return None
