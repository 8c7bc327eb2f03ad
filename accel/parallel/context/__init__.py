"""Context parallelism: sequences that are split over ranks, without Megatron; groups come in as arguments."""

from accel.parallel.context.attention import context_attention
from accel.parallel.context.documents import documents_of
from accel.parallel.context.groups import ContextGroups
from accel.parallel.context.parts import Attention
from accel.parallel.context.ring import RING, Ring, RingSettings, ring_settings
from accel.parallel.context.zigzag import owners

__all__ = [
    "RING",
    "Attention",
    "ContextGroups",
    "Ring",
    "RingSettings",
    "context_attention",
    "documents_of",
    "owners",
    "ring_settings",
]
