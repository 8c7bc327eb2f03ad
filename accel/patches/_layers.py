"""Where Megatron's layers are built and run, and what features that change them share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from accel.feature import Setting
from accel.patches._settings import whole_number
from accel.patching import Patch, around

__all__ = [
    "HYBRID_STACKS",
    "MAMBA_LAYER",
    "NUM_LAYERS",
    "TRANSFORMER_LAYER",
    "Altered",
    "FirstLayers",
    "when_a_layer_is_built",
]

TRANSFORMER_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
MAMBA_LAYER = "megatron.core.ssm.mamba_layer:MambaLayer"
HYBRID_STACKS = (
    "megatron.core.models.hybrid.hybrid_block:HybridStack",
    "megatron.core.ssm.mamba_block:MambaStack",  # 0.17's; later the same class
)
"""Blocks of hybrid models, of which a version may lack one."""

_HERE = "accel.patches._layers"


NUM_LAYERS = Setting(
    name="num_layers",
    metavar="LAYERS",
    summary="in the first layers of each rank, its virtual stages in turn (default: all)",
    parse=lambda given: whole_number(given, "layers", least=0),
)


class Altered:
    """A module with other attributes in place of some of its own."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_offsets: list[int] = []
"""Of the hybrid stacks that are being built, which number layers from the model's first, not the stage's."""


def numbering(init: Callable[..., None]) -> Callable[..., None]:
    """``HybridStack.__init__(config, submodules, ..., pp_layer_offset=0, ...)``."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(*args: Any, **kwargs: Any) -> None:
        _offsets.append(signature.bind(*args, **kwargs).arguments.get("pp_layer_offset", 0))
        try:
            init(*args, **kwargs)
        finally:
            _offsets.pop()

    return __init__


_NUMBERING = tuple(
    Patch(
        target=f"{stack}.__init__",
        replacement=f"{_HERE}:numbering",
        how="wrap",
        why="The number of a layer of a hybrid model counts those of earlier stages.",
        optional=True,
    )
    for stack in HYBRID_STACKS
)


class FirstLayers:
    """What ``NUM_LAYERS`` was set to while a feature is on."""

    def __init__(self) -> None:
        self._limits: list[int | None] = []

    def switch_on(self, num_layers: int | None) -> Callable[[], None]:
        """For ``Feature.switch_on``."""
        self._limits.append(num_layers)
        return self._limits.clear

    def has(self, layer: Any, layer_number: int) -> bool:
        """Whether a layer that is being built, the `layer_number`-th of its stage or hybrid model, is one."""
        stages = layer.config.virtual_pipeline_model_parallel_size or 1
        before = _offsets[-1] if _offsets else 0
        turn = (layer_number - 1 - before) * stages + (getattr(layer, "vp_stage", None) or 0)
        (limit,) = self._limits
        return limit is None or turn < limit

    def wrapping(self, then: Callable[[Any], None]) -> Callable[..., Any]:
        """A wrapper of a layer's ``__init__`` that does `then` with each of these layers."""

        @around
        def wrap(
            init: Callable[..., None],
            layer: Any,
            config: Any,
            submodules: Any,
            layer_number: int = 1,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            init(layer, config, submodules, layer_number, *args, **kwargs)
            if self.has(layer, layer_number):
                then(layer)

        return wrap


def when_a_layer_is_built(
    replacement: str, part: str, layers: tuple[str, ...] = (TRANSFORMER_LAYER,)
) -> tuple[Patch, ...]:
    """The patches with such a wrapper, ``module:name``, for a part of a layer."""
    knows = "A layer knows its number when it is built, and so whether it recomputes its"
    return (
        *(
            Patch(
                target=f"{layer}.__init__",
                replacement=replacement,
                how="wrap",
                why=f"{knows} {part}.",
            )
            for layer in layers
        ),
        *_NUMBERING,
    )
