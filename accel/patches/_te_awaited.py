"""The spec of BERT's layers, which Megatron's script imports before arguments say whether it is served.

What it imports is an empty spec of a class of its own, which becomes upstream's when ``te_layers`` is on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from accel.patching import Patch, around
from accel.upstream import te_installed

__all__ = ["AWAITING", "give_awaited"]


@functools.cache
def awaited_spec() -> Any:
    """What stands for the spec of BERT's layers until they are there; before, it has nothing but an error."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    fields = {field.name for field in dataclasses.fields(ModuleSpec)}

    class AwaitedSpec(ModuleSpec):
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> Any:
            if name in fields:
                raise ImportError(
                    "Transformer Engine is not installed, and accel's te_layers is not active, which would "
                    "serve the layers that this BERT has by default: leave out --transformer-impl local, or "
                    "give --spec local"
                )
            return super().__getattribute__(name)

    return AwaitedSpec()


@around
def awaiting_layers(original: Callable[[str], Any], name: str) -> Any:
    """Wraps the ``__getattr__`` of BERT's specs, which Megatron's script asks for one when it is imported,
    before any feature is on."""
    try:
        return original(name)
    except ImportError:
        if te_installed():
            raise
        return awaited_spec()


def give_awaited() -> Callable[[], None]:
    """The spec is what was waited for; returns what takes it back."""
    from megatron.core.models.bert import bert_layer_specs

    spec, found = awaited_spec(), bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    before = type(spec)
    spec.__class__ = type(found)
    vars(spec).update(vars(found))

    def take_back() -> None:
        vars(spec).clear()
        spec.__class__ = before

    return take_back


AWAITING = Patch(
    target="megatron.core.models.bert.bert_layer_specs:__getattr__",
    replacement="accel.patches._te_awaited:awaiting_layers",
    how="wrap",
    why="Megatron's BERT script imports a spec, and upstream raises, before arguments say that it is served.",
)
"""For the time before features are chosen."""
