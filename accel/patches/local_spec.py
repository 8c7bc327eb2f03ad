"""Scripts that ask for Transformer Engine run where it is not installed.

``--transformer-impl transformer_engine`` is Megatron's default; without the package stock Megatron
fails while it builds the layer spec. The feature ``te_layers`` serves that spec; with
``--no-accel-te-layers`` the local spec is taken instead, and one line says so. ``--save-dgrads-interval``
and ``--save-activations-interval`` work in either spec: without the package Megatron's lists of the layers
that are saved hold mocks, at which they stop. On GPUs two flags that need the package are errors at the
start, where Megatron stops once the model is built or trained for some steps: ``--optimizer-cuda-graph``,
and ``--cuda-graph-impl transformer_engine``, for which ``local`` is there. Nothing changes where Transformer
Engine is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature
from accel.patches.te_layers import refuse_quantized
from accel.upstream import SUPPORTED_RANGE, te_installed, te_serves


def without_te(context: Context) -> list[str]:
    """Change what only Transformer Engine or Apex could serve; one line for each change.

    Raises:
        ValueError: FP8 or FP4 is asked for, which the local spec would leave out without a word; or graphs
            that only Transformer Engine makes.
    """
    if te_installed():
        return []
    args, notes = context.args, []
    if context.device != "cpu":  # which has none (`cuda_graphs`)
        _refuse_graphs(args)
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


def _refuse_graphs(args: Any) -> None:
    te_asked = getattr(args, "cuda_graph_impl", None) == "transformer_engine"
    if te_asked or getattr(args, "external_cuda_graph", False):
        flag = "--cuda-graph-impl transformer_engine" if te_asked else "--external-cuda-graph"
        raise ValueError(
            f"{flag}: Transformer Engine, which captures these graphs, is not installed: use "
            "--cuda-graph-impl local"
        )
    if getattr(args, "optimizer_cuda_graph", False):
        raise ValueError(
            "--optimizer-cuda-graph: without Transformer Engine Megatron reads the norm of the gradients on "
            "the host, for which a graph cannot wait: leave it out"
        )


LISTS_OF_TYPES = {
    "megatron.training.activation_logging": ("LINEAR_TYPES", "_GROUPED_LINEAR_TYPES"),
    "megatron.training.dgrad_logging": ("LINEAR_TYPES",),
}
"""Modules of Megatron's -> their lists of layers, where mocks stand for those of Transformer Engine's."""


def without_mocks() -> Callable[[], None]:
    """Leave what is no type, and so no layer's, out of the lists. Returns what brings it back."""
    before = [
        (vars(module), name, vars(module)[name])
        for module, names in ((sys.modules.get(m), names) for m, names in LISTS_OF_TYPES.items())
        for name in names
        if module is not None
    ]
    for owner, name, kinds in before:
        owner[name] = tuple(kind for kind in kinds if isinstance(kind, type))

    def undo() -> None:
        for owner, name, kinds in before:
            owner[name] = kinds

    return undo


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
    switch_on=without_mocks,
)
