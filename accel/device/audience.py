"""Who is asking?

Megatron must be told that there is a CUDA device; everybody else must hear the truth: PyTorch
itself, transformers or Triton would otherwise try to use one. The callables that differ ask
:func:`addressed` or :func:`addressed_fuser`, which look at the module of the calling frame.
"""

from __future__ import annotations

import sys

__all__ = ["AUDIENCE", "addressed", "addressed_fuser"]

AUDIENCE: set[str] = set()
"""Top-level package names that see a cuda device; filled by a device's ``install``."""


def addressed() -> bool:
    """Whether the caller's caller belongs to the audience."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in AUDIENCE


def addressed_fuser() -> bool:
    """Whether the caller's caller is a package of the audience, and no script that compiles its model."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name != "__main__" and name.partition(".")[0] in AUDIENCE
