"""Who is asking?

Megatron must be told that there is a CUDA device; everybody else must hear the truth: PyTorch
itself, transformers or Triton would otherwise try to use one. The callables that differ ask
:func:`addressed`, which looks at the module of the calling frame.
"""

from __future__ import annotations

import sys

__all__ = ["AUDIENCE", "addressed"]

AUDIENCE: set[str] = set()
"""Top-level package names that see a cuda device; filled by ``accel.device.cpu.install``."""


def addressed() -> bool:
    """Whether the caller's caller belongs to the audience."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in AUDIENCE
