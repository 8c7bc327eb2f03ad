"""Megatron's Transformer Engine extension, executed with accel's layers (see ``te_layers``).

Importing this executes it; the classes are the attributes of this module.
"""

from __future__ import annotations

from megatron.core.extensions import transformer_engine_spec_provider as upstream

from accel.patches.te_layers import CLASSES, execute_extension

EXTENSION = execute_extension()
globals().update({name: vars(EXTENSION)[name] for name in CLASSES if hasattr(EXTENSION, name)})


class TESpecProvider(upstream.TESpecProvider):
    """Upstream's own, whose module is given the classes above; an object that undo can tell apart."""
