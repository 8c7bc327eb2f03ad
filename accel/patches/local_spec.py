"""Scripts that ask for Transformer Engine run where it is not installed.

``--transformer-impl transformer_engine`` is Megatron's default; without the package stock Megatron
fails while it builds the layer spec. The feature ``te_layers`` serves that spec; with
``--no-accel-te-layers`` the local spec is taken instead, and one line says so. Nothing changes where
that is installed.
"""

from __future__ import annotations

import importlib.util

from accel.feature import Context, Feature
from accel.patches.te_layers import refuse_quantized
from accel.upstream import SUPPORTED_RANGE, te_installed, te_serves


def without_te(context: Context) -> list[str]:
    """Change what only Transformer Engine or Apex could serve; one line for each change.

    Raises:
        ValueError: FP8 or FP4 is asked for, which the local spec would leave out without a word.
    """
    if te_installed():
        return []
    args, notes = context.args, []
    te_asked = getattr(args, "transformer_impl", None) == "transformer_engine"
    if te_asked and getattr(args, "accel_te_layers", None) is False:
        refuse_quantized(args)
        args.transformer_impl = "local"
        notes.append(
            "transformer_engine is not installed, nor are accel's layers wanted in its place: "
            "--transformer-impl local is used instead"
        )
    if not getattr(args, "no_persist_layer_norm", True) and not _apex_installed():
        args.no_persist_layer_norm = True  # the name of an Apex kernel; the mathematics is the same
    return notes


def _apex_installed() -> bool:
    return importlib.util.find_spec("apex") is not None


FEATURE = Feature(
    name="local_spec",
    summary="take the local layer spec where neither Transformer Engine nor te_layers serves the asked one",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    prepare=without_te,
)
