"""Context parallelism: sequences that are split over ranks, without Megatron; groups come in as arguments."""

from accel.parallel.context.attention import context_attention
from accel.parallel.context.documents import documents_of
from accel.parallel.context.groups import ContextGroups
from accel.parallel.context.parts import Attention
from accel.parallel.context.ring import Ring, RingSettings, ring_settings
from accel.parallel.context.ring import switch_on as switch_on_ring
from accel.parallel.context.zigzag import owners

__all__ = [
    "Attention",
    "ContextGroups",
    "Ring",
    "RingSettings",
    "context_attention",
    "documents_of",
    "owners",
    "ring_settings",
    "switch_on_ring",
]
