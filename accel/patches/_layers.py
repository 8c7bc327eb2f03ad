"""Features that serve the first layers of each rank: their setting, and which layers these are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accel.feature import Setting
from accel.patching import Patch

__all__ = ["NUM_LAYERS", "FirstLayers", "when_a_layer_is_built"]


def parse_layers(given: Any) -> int:
    """A number of layers."""
    try:
        number = int(str(given))
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"{given!r} is no number of layers: give 0 or more")
    return number


NUM_LAYERS = Setting(
    name="num_layers",
    metavar="LAYERS",
    summary="in the first layers of each rank, its virtual stages in turn (default: all)",
    parse=parse_layers,
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
        """Whether a ``TransformerLayer`` that is being built, the `layer_number`-th of its stage, is one."""
        stages = layer.config.virtual_pipeline_model_parallel_size or 1
        turn = (layer_number - 1) * stages + (getattr(layer, "vp_stage", None) or 0)
        (limit,) = self._limits
        return limit is None or turn < limit

    def wrapping(self, then: Callable[[Any], None]) -> Callable[..., Any]:
        """A wrapper of ``TransformerLayer.__init__`` that does `then` with each of these layers."""

        def wrap(init: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(init)
            def __init__(
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

            return __init__

        return wrap


def when_a_layer_is_built(replacement: str, part: str) -> Patch:
    """The patch with such a wrapper, ``module:name``, for a part of a layer."""
    return Patch(
        target="megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        replacement=replacement,
        how="wrap",
        why=f"A layer knows its number when it is built, and so whether it recomputes its {part}.",
    )
