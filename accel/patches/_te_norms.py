"""Transformer Engine's norms where Megatron makes one that no layer spec names.

Without the package a block's final norm and those of CLIP are torch's or Megatron's own, and ModelOpt's
``Norm`` asks the package itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from accel.layers import stand_in
from accel.patching import around


@around
def with_final_norm(
    original: Callable[..., Any],
    config: Any,
    spec: Any,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> Any:
    from megatron.core.transformer import transformer_block

    from accel.patches.te_extension import TENorm  # type: ignore[attr-defined]

    submodules = original(config, spec, vp_stage, pp_rank)
    if submodules is not spec and submodules.layer_norm is transformer_block.LayerNormImpl:
        submodules = dataclasses.replace(submodules, layer_norm=TENorm)
    return submodules


def with_te_norm(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        from accel.patches.te_extension import TENorm  # type: ignore[attr-defined]

        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for norm in ("ln_pre_impl", "ln_post_impl"):
            if given.arguments.get(norm) is torch.nn.LayerNorm:
                given.arguments[norm] = TENorm
        original(*given.args, **given.kwargs)

    return init


def by_hidden_size(norm: Callable[..., Any]) -> Callable[..., Any]:
    def make(hidden_size: int, **options: Any) -> Any:
        return norm(hidden_size, **options)

    return make


modelopt_te = types.SimpleNamespace(
    pytorch=types.SimpleNamespace(
        LayerNorm=by_hidden_size(stand_in.LayerNorm), RMSNorm=by_hidden_size(stand_in.RMSNorm)
    )
)
"""Transformer Engine's norms as ModelOpt's `Norm` calls them."""
