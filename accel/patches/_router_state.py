"""What routers and indexers count in a forward pass, left as it is while a layer is computed again, and the
copies of experts that were planned ahead for it.

A router adds up tokens for each expert, for the global auxiliary loss over the micro-batches so far, and logs
its losses, as sparse attention's indexer does. Megatron's own recomputation has its first pass without
gradients, where none of this is done; a pass that records gradients has done it all when the layer runs
again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from accel.memory.recompute import Restorer

__all__ = ["router_state", "unlogged_indexer"]

_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"


def router_state(layer: Any) -> Restorer:
    """Of a transformer layer, before it runs: enters what its router held, logs nothing, and leaves what it
    holds now. To be entered once."""
    router = getattr(getattr(layer, "mlp", None), "router", None)
    if router is None:
        return contextlib.nullcontext
    before = {name: buffer.clone() for name, buffer in _buffers(router).items()}
    copies: list[frozenset[Any]] = []
    layer.mlp.accel_note_copies = copies.append  # the first run's plan, which it may make itself

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        now = _buffers(router)
        router._buffers.update(before)
        try:
            with _unlogged(), _planned(layer.mlp, copies):
                yield
        finally:
            router._buffers.update(now)

    return restored


@contextlib.contextmanager
def _planned(mlp: Any, copies: list[frozenset[Any]]) -> Iterator[None]:
    """With the copies of the first run, if it had a plan: that of a later micro-batch may be another."""
    ahead = getattr(mlp, "accel_ahead", None)
    if ahead is None or not copies:
        yield
        return
    now, ahead.copies = ahead.copies, copies[0]
    try:
        yield
    finally:
        ahead.copies = now


def _buffers(router: Any) -> dict[str, Any]:
    return {name: buffer for name, buffer in router._buffers.items() if buffer is not None}


class _NoTracker:
    def record(self, *args: Any, **kwargs: Any) -> None:
        """As ``MoEMetricsTracker.record``."""


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    from megatron.core.transformer.moe import router

    silent = {
        "get_moe_metrics_tracker": _NoTracker,
        "save_to_aux_losses_tracker": _NoTracker().record,  # before Megatron 0.18
    }
    there = {name: getattr(router, name) for name in silent if hasattr(router, name)}
    for name in there:
        setattr(router, name, silent[name])
    try:
        yield
    finally:
        for name, tracker in there.items():
            setattr(router, name, tracker)


@contextlib.contextmanager
def unlogged_indexer() -> Iterator[None]:
    """Sparse attention's indexer adds no loss to what Megatron logs."""
    helper: Any = getattr(sys.modules.get(_DSA), "DSAIndexerLossLoggingHelper", None)
    if helper is None:
        yield
        return
    save = vars(helper)["save_loss_to_tracker"]
    helper.save_loss_to_tracker = staticmethod(lambda *args, **kwargs: None)
    try:
        yield
    finally:
        helper.save_loss_to_tracker = save
