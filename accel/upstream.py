"""Which Megatron: the versions that accel is tested against, and the one that would be imported; how it
spells its flags; and whether Transformer Engine is beside it.

Needs neither torch nor Megatron.
"""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "SUPPORTED_MEGATRON",
    "SUPPORTED_RANGE",
    "flag_of",
    "fused_adam_installed",
    "fused_adam_library",
    "megatron_folder",
    "megatron_version",
    "others_norm",
    "te_checkpoints",
    "te_has_its_own",
    "te_installed",
    "te_kernel_for",
    "te_layers_asked",
    "te_serves",
]

SUPPORTED_MEGATRON = ("0.17.1", "0.18.2", "0.19.2")
"""Oldest first; every patch contract holds on each of them. Older ones have remote-code-execution
holes in checkpoint loading."""

SUPPORTED_RANGE = ">=0.17.1,<0.20"
"""PEP 440 range that spans them, for features that hold on all."""


def flag_of(name: str) -> str:
    """The flag of an attribute of Megatron's arguments."""
    return "--" + name.replace("_", "-")


def megatron_folder() -> Path | None:
    """The folder of the megatron-core that ``import megatron.core`` would find; it is not imported."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def megatron_version() -> str | None:
    """Its public version, or ``None`` without a Megatron.

    Read from the package itself rather than from the installed distributions, so that a source
    checkout on ``PYTHONPATH`` counts. Without the local part: Megatron appends the commit of whatever
    git repository its folder lies in, be it the user's own around a virtual environment.
    """
    folder = megatron_folder()
    if folder is None:
        return None
    version = str(runpy.run_path(str(folder / "package_info.py"))["__version__"])
    return version.partition("+")[0]


def te_installed() -> bool:
    """Whether ``import transformer_engine`` would find something."""
    return importlib.util.find_spec("transformer_engine") is not None


def te_serves(context: object) -> str | None:
    """For ``Feature.idle``: why there is nothing to do for a feature that fills in for it."""
    return "transformer_engine is installed" if te_installed() else None


def te_checkpoints(context: object) -> str | None:
    """For ``Feature.unavailable``: that Transformer Engine computes outputs again, where it is."""
    return (
        "where Transformer Engine is installed it computes again, not accel"
        if te_installed()
        else None
    )


def te_layers_asked(args: Any) -> bool:
    """Whether the layers are Transformer Engine's under Megatron's arguments."""
    impl = getattr(args, "transformer_impl", None)
    return te_installed() and impl in ("transformer_engine", "inference_optimized")


def te_has_its_own(context: Any) -> str | None:
    """For ``Feature.aside``: that the layers which Megatron's arguments ask for do without a feature."""
    theirs = te_layers_asked(context.args)
    return "not in Transformer Engine's layers, which have their own" if theirs else None


def te_kernel_for(flag: str) -> Callable[[Any], str | None]:
    """For ``Feature.aside``: that a flag of Megatron's takes Transformer Engine's kernel."""

    def told(context: Any) -> str | None:
        theirs = te_installed() and getattr(context.args, flag, False)
        return f"not for {flag_of(flag)}, whose kernel is Transformer Engine's" if theirs else None

    return told


def others_norm(context: Any) -> str | None:
    """For ``Feature.aside``: that a norm is Transformer Engine's, or Apex's where layers are not."""
    layer_norm = getattr(context.args, "normalization", None) == "LayerNorm"
    apexs = "not in LayerNorm, which is Apex's" if layer_norm and _apex_installed() else None
    return te_has_its_own(context) or apexs


def fused_adam_library() -> str | None:
    """Whose Adam and whose gradient clipping Megatron takes, if they are not torch's and its own."""
    return "Transformer Engine" if te_installed() else "Apex" if _apex_installed() else None


def fused_adam_installed(context: object) -> str | None:
    """For ``Feature.aside``: that Megatron's Adam is another library's."""
    library = fused_adam_library()
    return f"not in the steps of {library}'s FusedAdam" if library else None


def _apex_installed() -> bool:
    return importlib.util.find_spec("apex") is not None
