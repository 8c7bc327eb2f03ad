"""The Triton kernels, `accel._triton`: registered for CUDA at the first need, or a reason why not.

They serve the ops that have no kernel there yet: those in CUDA C++ (`accel.ops._cuda`) come first, for the
measured reasons in `_kernel_choice`. After both come the kernels that somebody asked for op by op, Triton's
or another library's.
What Triton needs to start (its import, its compiler) is paid by the first op on a CUDA tensor.
"""

import functools
import logging

import torch

from accel.ops import _cuda, _launchers, _native, _peers
from accel.ops._kernel_choice import VARIABLE, Choice, chosen

__all__ = ["PACKAGE", "reason"]

PACKAGE = "accel._triton"


@functools.cache
def reason() -> str | None:
    """Why the Triton kernels are missing, or None once they are registered (here, if need be).

    Raises `RuntimeError` for what was asked for by name and cannot be had.
    """
    _native.reason()  # the gradients in C++, which are worth having here too
    unfit = _cuda.reason()  # asked before Triton's kernels take its ops
    if unfit and _cuda.built():
        level = logging.INFO if chosen().every == "triton" else logging.WARNING
        logging.getLogger("accel").log(level, "Triton's kernels serve CUDA: %s", unfit)
    try:
        _launchers.registered(PACKAGE, "CUDA")
    except ImportError as error:
        missing = f"Triton cannot be imported: {error}; install it with `pip install triton`"
        if by_op := chosen().by_op:  # other libraries' kernels leave to it what they do not take
            raise RuntimeError(f"{VARIABLE}: {', '.join(by_op)}: {missing}") from error
        return missing
    _by_op(chosen())
    return None


_ASKED: list[torch.library.Library] = []
"""What holds the kernels that were asked for op by op, for as long as the process lives."""


def _by_op(choice: Choice) -> None:
    library = torch.library.Library("accel", "IMPL")
    for op in choice.asked_of("triton"):
        for part, kernel in _launchers.module(PACKAGE, op).KERNELS.items():
            library.impl(part, kernel, "CUDA", allow_override=True)
    _peers.register(choice, library, "CUDA")
    _ASKED.append(library)
