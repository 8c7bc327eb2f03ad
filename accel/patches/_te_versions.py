"""What each module of Megatron's is told of Transformer Engine: that it is there, and in which version.

Megatron asks one function for the version, at gates that guard different things. So the answer goes by the
module that asks, which is found on the stack; ``is_te_min_version`` asks on behalf of its caller.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

from packaging.version import Version

from accel.patching import Patch

__all__ = [
    "EXPERTS",
    "EXTENSION",
    "UTILS",
    "VERSION",
    "VERSIONS",
    "at_least",
    "flagged",
    "utils_that_tell",
]

HAVE_TE = True

_HERE = "accel.patches._te_versions"
EXTENSION = "megatron.core.extensions.transformer_engine"
EXPERTS = "megatron.core.transformer.moe.experts"
UTILS = "megatron.core.utils"

VERSIONS = {
    EXTENSION: "2.9.0",
    f"{EXTENSION}_spec_provider": "2.9.0",
    "megatron.core.models.gpt.gpt_layer_specs": "2.9.0",
    "megatron.core.models.bert.bert_model": "2.9.0",
    "megatron.core.models.backends": "2.9.0",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": "2.9.0",
    "megatron.core.models.mimo.partition.utils": "2.9.0",
    "megatron.core.models.multimodal.llava_model": "2.9.0",
    "megatron.core.datasets.t5_dataset": "2.9.0",
    "megatron.core.ssm.mamba_context_parallel": "2.9.0",
    UTILS: "2.9.0",  # itself, for packs under context parallelism in 0.17
    EXPERTS: "2.14.0",
    "megatron.core.transformer.attention": "2.2.0",  # its gates behind that are FP8's and FP4's
    "megatron.core.transformer.transformer_config": "2.9.0",
    "megatron.training.arguments": "2.9.0",
}
"""Module, or top-level package -> the version of Transformer Engine that it is told; others are told 0.
The router and permutation of 2.7 and 2.12 are the feature ``moe_fusion``, through other names."""


@functools.cache
def utils_that_tell(version: str) -> types.ModuleType:
    """Megatron's module of that name, for code that is executed with an import of its own."""
    utils = types.ModuleType(UTILS)
    vars(utils).update(vars(importlib.import_module(UTILS)))
    vars(utils).update(
        get_te_version=lambda: Version(version),
        is_te_min_version=functools.partial(_is_at_least, version),
    )
    return utils


def _is_at_least(ours: str, version: str, check_equality: bool = True) -> bool:
    wanted = Version(version)
    return Version(ours) >= wanted if check_equality else Version(ours) > wanted


def get_version(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def get_te_version() -> Any:
        asks = _asking()
        ours = VERSIONS.get(asks) or VERSIONS.get(asks.partition(".")[0])
        return original() if ours is None else Version(ours)

    return get_te_version


def at_least(
    version: str, modules: Collection[str], original: Callable[[], Any]
) -> Callable[[], Any]:
    """A `get_te_version` that tells `modules` no less than `version`."""

    @functools.wraps(original)
    def get_te_version() -> Any:
        found = original()
        return max(found, Version(version)) if _asking() in modules else found

    return get_te_version


def _asking() -> str:
    """The module of Megatron's that asks the wrapper which calls this, whatever wraps that one."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _module_name(frame) == __name__:
        frame = frame.f_back
    if _module_name(frame) == UTILS and frame is not None:
        frame = frame.f_back  # is_te_min_version, on behalf of its own caller
    return _module_name(frame)


def _module_name(frame: types.FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


VERSION = Patch(
    target=f"{UTILS}:get_te_version",
    replacement=f"{_HERE}:get_version",
    how="wrap",
    expects=(),
    why="Each gate is told what accel's layers can do.",
)


def flagged(module: str, flag: str) -> Patch:
    return Patch(
        target=f"{module}:{flag}",
        replacement=f"{_HERE}:HAVE_TE",
        why="There it guards names that are bound now.",
        optional=True,
    )
