"""Megatron's Transformer Engine extension, executed with accel's layers (see ``te_layers``).

Importing this executes it; the classes are the attributes of this module.
"""

from __future__ import annotations

from megatron.core.extensions import transformer_engine_spec_provider as upstream

from accel.patches._te_execution import execute, import_with_layers
from accel.patches._te_versions import EXTENSION
from accel.patches.te_layers import CLASSES

_EXECUTED = execute(EXTENSION)
globals().update({name: vars(_EXECUTED)[name] for name in CLASSES if hasattr(_EXECUTED, name)})

TELayerNormColumnParallelLinearGathered = vars(
    execute("megatron.core.transformer.heterogeneous.linear_replacements")
)["TELayerNormColumnParallelLinearGathered"]
te = import_with_layers("transformer_engine")


class TESpecProvider(upstream.TESpecProvider):
    """Upstream's own, whose module is given the classes above; an object that undo can tell apart."""
