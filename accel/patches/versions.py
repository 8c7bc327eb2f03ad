"""The megatron-core versions that accel is tested against: every patch contract, on each of them."""

from __future__ import annotations

__all__ = ["SUPPORTED_MEGATRON", "SUPPORTED_RANGE"]

SUPPORTED_MEGATRON = ("0.17.1", "0.18.2", "0.19.2")
"""Oldest first. Older ones have remote-code-execution holes in checkpoint loading."""

SUPPORTED_RANGE = ">=0.17.1,<0.20"
"""PEP 440 range that spans them, for features that hold on all."""
