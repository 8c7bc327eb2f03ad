"""Megatron's Transformer Engine extension, executed with accel's layers (see ``te_layers``).

Importing this executes it; the classes are the attributes of this module.
"""

from __future__ import annotations

from megatron.core.extensions import transformer_engine_spec_provider as upstream

from accel.layers import stand_in
from accel.patches.te_layers import CLASSES, EXTENSION, execute

_EXECUTED = execute(EXTENSION)
globals().update({name: vars(_EXECUTED)[name] for name in CLASSES if hasattr(_EXECUTED, name)})

TELayerNormColumnParallelLinearGathered = vars(
    execute("megatron.core.transformer.heterogeneous.linear_replacements")
)["TELayerNormColumnParallelLinearGathered"]
FP8GlobalStateManager = stand_in.FP8GlobalStateManager
activation_recompute_forward = stand_in.activation_recompute_forward
fp8_autocast = stand_in.fp8_autocast
tex = stand_in.tex


class TESpecProvider(upstream.TESpecProvider):
    """Upstream's own, whose module is given the classes above; an object that undo can tell apart."""
