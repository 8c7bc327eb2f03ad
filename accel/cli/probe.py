"""What the doctor asks in a child process: everything that loads native code.

Each probe prints one JSON line, ``[name, fields of accel.cli.facts.Found]``, as soon as it knows,
so that a crash in one does not lose the answers of those before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from accel.cli.facts import NO_GPU, Found

__all__ = ["PROBES", "main"]


def torch() -> Found:
    """Version, build, and whether it sees a GPU."""
    import torch as module

    build = "CPU build"
    if module.version.cuda:
        build = f"CUDA {module.version.cuda} build"
    elif module.version.hip:
        build = f"ROCm {module.version.hip} build"
    seen = "GPU visible" if module.cuda.is_available() else NO_GPU
    return Found(module.__version__, f"{build}, {seen}, {os.path.dirname(module.__file__)}")


def native() -> Found:
    """The native kernels: loaded and with which instruction set, or why not."""
    from accel.ops import _native

    names = ", ".join(file.name for file in sorted(_native.PACKAGE.glob(_native.LIBRARY_PATTERN)))
    missing = _native.reason()
    if missing is not None:
        return Found(None, names, missing)
    return Found(_native.isa(), names)


def gpu() -> Found:
    """The kernels that CUDA tensors would get: CUDA C++ where it was built, Triton for the other ops."""
    import torch as module

    if not module.version.cuda:
        return Found("not needed", "this torch is not built for CUDA")
    from accel.ops import _cuda, _triton

    missing, no_triton = _cuda.reason(), _triton.reason()
    if missing and no_triton:
        return Found(None, error=f"{no_triton}; {missing}")
    kinds = ["CUDA C++"] * (missing is None) + ["Triton"] * (no_triton is None)
    return Found(" and ".join(kinds), missing or no_triton or "")


def device() -> Found:
    """The device runtime that ``import accel.megatron_adaptor`` would install; installs nothing."""
    from accel.device import select

    chosen = select()
    return Found(chosen.name, chosen.reason)


PROBES: dict[str, Callable[[], Found]] = {
    "torch": torch,
    "native": native,
    "gpu": gpu,
    "device": device,
}


def main(names: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that greet on stdout do not mix with the answers
    for name in names:
        try:
            found = PROBES[name]()
        except Exception as error:  # any failure of any library is an answer
            found = Found(error=f"{type(error).__name__}: {error}", broken=True)
        print(json.dumps([name, vars(found)]), file=answers, flush=True)
