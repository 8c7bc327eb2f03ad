"""Megatron's files that import Transformer Engine, executed again with an import that finds accel's layers.

Only code that is given this import sees them: nothing goes into ``sys.modules`` under the package's name, and
``import transformer_engine`` fails for everybody else.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from accel.layers import stand_in
from accel.patches._te_versions import EXTENSION, UTILS, VERSIONS, utils_that_tell
from accel.patches._told import told
from accel.patching import around

__all__ = ["QUANTIZED", "UNQUANTIZED", "execute", "import_with_layers", "importing_layers"]

QUANTIZED = ("fp8", "fp4")

UNQUANTIZED = (
    "FP8 and FP4 need Transformer Engine; accel's layers compute in fp32, bf16 and fp16 so far"
)


@functools.cache
def execute(name: str) -> types.ModuleType:
    """A module of Megatron's as it is when its import of Transformer Engine succeeds.

    It is no copy that anybody imports, but it is listed with Megatron's modules, under a name that no import
    finds, so that what it has copied from them is patched with theirs.
    """
    spec = importlib.util.find_spec(name)
    loader: Any = spec and spec.loader
    code = loader.get_code(name)
    module = types.ModuleType(name)  # the name says to whom its code belongs: Megatron
    vars(module).update(
        __package__=name.rpartition(".")[0],
        __file__=code.co_filename,
        __builtins__={**vars(builtins), "__import__": import_with_layers},
    )
    exec(code, vars(module))
    if name == EXTENSION:
        arguments = "_get_extra_te_kwargs"
        vars(module)[arguments] = without_fp8(vars(module)[arguments])
    sys.modules[f"{name} (accel)"] = module
    return module


@around
def without_fp8(original: Callable[[Any], dict[str, Any]], config: Any) -> dict[str, Any]:
    """What every layer with weights asks for the arguments that follow from its config."""
    for name in QUANTIZED:
        if getattr(config, name, None):
            raise ValueError(f"{name}={getattr(config, name)!r}: {UNQUANTIZED}")
    return original(config)


def import_with_layers(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: tuple[str, ...] | None = (),
    level: int = 0,
) -> Any:
    """``__import__`` that finds accel's layers as Transformer Engine's, for the code it is given to."""
    package = name.partition(".")[0]
    if name == EXTENSION and fromlist:
        return execute(EXTENSION)
    if name == UTILS and fromlist:
        asks = str((globals or {}).get("__name__"))
        return utils_that_tell(VERSIONS.get(asks, VERSIONS[EXTENSION]))
    if package == "transformer_engine":
        found = _modules().get(name if fromlist else package)
        if found is None:
            raise ModuleNotFoundError(f"accel's layers have no {name}", name=name)
        return found
    return builtins.__import__(name, globals, locals, fromlist or (), level)


@around
def importing_layers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The package itself is imported where there is one after all."""
    there = "transformer_engine" in sys.modules
    return told(original, {} if there else _modules())(*args, **kwargs)


@functools.cache
def _modules() -> dict[str, types.ModuleType]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    from accel.patches import moe_fusion

    router = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
    return stand_in.modules(
        distributed={"CudaRNGStatesTracker": CudaRNGStatesTracker},
        router={n: getattr(moe_fusion, n) for n in (*router, "fused_topk_with_score_function")},
    )
