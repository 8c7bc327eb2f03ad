"""Scripts that ask for Transformer Engine run where it is not installed.

``--transformer-impl transformer_engine`` is Megatron's default; without the package stock Megatron
fails while it builds the layer spec. The local spec is taken instead, and one line says so. Nothing
changes where that is installed.
"""

from __future__ import annotations

import importlib.util

from accel.feature import Context, Feature
from accel.upstream import SUPPORTED_RANGE


def without_te(context: Context) -> list[str]:
    """Change what only Transformer Engine or Apex could serve; one line for each change."""
    if _te_installed():
        return []
    args, notes = context.args, []
    if getattr(args, "transformer_impl", None) == "transformer_engine":
        args.transformer_impl = "local"
        notes.append(
            "transformer_engine is not installed: --transformer-impl local is used instead"
        )
    if not getattr(args, "no_persist_layer_norm", True) and not _apex_installed():
        args.no_persist_layer_norm = True  # the name of an Apex kernel; the mathematics is the same
    return notes


def _te_installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _apex_installed() -> bool:
    return importlib.util.find_spec("apex") is not None


def _te_serves(context: Context) -> str | None:
    return "transformer_engine is installed" if _te_installed() else None


FEATURE = Feature(
    name="local_spec",
    summary="take Megatron's local layer spec where Transformer Engine is asked for but not installed",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=_te_serves,
    prepare=without_te,
)
