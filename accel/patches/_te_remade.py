"""Specs of hybrid models, and lists of types, that hold the mocks of Transformer Engine's classes by value.

They are made when their module is imported, and no patch of a class reaches them: so the modules are
reloaded, and copies of their specs replaced wherever Megatron or the script holds one.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from accel.patching import AUDIENCE, aliases

__all__ = ["MOCKS_BY_VALUE", "make_again"]

MOCKS_BY_VALUE = (
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.models.mamba.mamba_layer_specs",  # 0.17
    "megatron.core.post_training.modelopt.hybrid.model_specs",  # of the first's
    "megatron.training.activation_logging",  # the types of layers that it logs
    "megatron.training.dgrad_logging",
)
"""The modules, each behind those it takes from."""


def make_again() -> Callable[[], None]:
    """They are made once more, specs also for the modules that have copied them. Returns what brings the old
    ones back."""
    modules = [m for m in map(sys.modules.get, MOCKS_BY_VALUE) if m is not None]
    before = _names_of(modules)

    def undo() -> None:
        made = _names_of(modules)
        for module, names in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(names)
        _replace_copies(made, before)

    try:
        for module in modules:
            importlib.reload(module)
        _replace_copies(before, _names_of(modules))
    except BaseException:
        undo()
        raise
    return undo


def _names_of(modules: Sequence[types.ModuleType]) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in modules]


def _replace_copies(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> None:
    """Whoever holds a spec of the `old` modules, under any name, gets that of the `new`."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    swaps = {
        id(spec): (spec, after[name])
        for before, after in zip(old, new, strict=True)
        for name, spec in before.items()
        if isinstance(spec, ModuleSpec) and name in after
    }
    for module, name, (_, spec) in list(aliases(swaps, AUDIENCE)):
        setattr(module, name, spec)
