"""CUDA: Megatron's own device. Nothing to redirect."""

from __future__ import annotations

from collections.abc import Sequence

from accel.patching import Applied


def install(audience: Sequence[str]) -> Applied:
    """Change nothing; the empty :class:`Applied` undoes nothing."""
    return Applied()
