"""The names of `transformer_engine` that Megatron-LM imports, bound to accel's layers.

This is not the package: nothing is put into `sys.modules`, and `import transformer_engine` fails as
before. `modules()` gives module objects for somebody who runs Megatron's wrappers of those names with an
import of their own. FP8 and FP4 are not there yet; whatever would need them raises one line that says so.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from accel.layers import activation, norm, sequence
from accel.layers.attention import DotProductAttention
from accel.layers.base import ExtraState, refuse_options
from accel.layers.grouped_linear import GroupedLinear
from accel.layers.linear import LayerNormLinear, Linear
from accel.layers.transformer_layer import TransformerLayer
from accel.parallel.context import owners

__all__ = ["LayerNorm", "RMSNorm", "modules"]


def no_fp8(*args: Any, **kwargs: Any) -> NoReturn:
    """What is called where a model would compute in FP8 or FP4. Raises NotImplementedError."""
    raise NotImplementedError(
        "FP8 and FP4 need Transformer Engine: accel's layers compute in fp32, bf16 and fp16 so far"
    )


class _Norm(ExtraState):
    """A norm of `accel.layers.norm` with Transformer Engine's arguments; `dtype` is the name that its
    operations have for `params_dtype`."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: Any = None,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        refuse_options(type(self).__name__, options)
        super().__init__(
            normalized_shape,
            eps,
            zero_centered=zero_centered_gamma,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=params_dtype or dtype,
        )
        self.zero_centered_gamma = zero_centered_gamma


class RMSNorm(_Norm, norm.RMSNorm):
    """State dict: `weight [K]`, `_extra_state` (empty)."""


class LayerNorm(_Norm, norm.LayerNorm):
    """State dict: `weight [K]`, `bias [K]`, `_extra_state` (empty)."""


class DelayedScaling:
    """A recipe for FP8: cannot be made."""

    __init__ = no_fp8


class FP8GlobalStateManager:
    """Says that nothing is in FP8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def is_fp8_calibration() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


def check_fp8_support() -> tuple[bool, str]:
    return False, "accel's layers compute in fp32, bf16 and fp16 so far"


def fp8_autocast(enabled: bool = False, **options: Any) -> contextlib.AbstractContextManager[None]:
    """Does nothing, unless FP8 is asked for.

    Raises:
        NotImplementedError: `enabled`.
    """
    if enabled:
        no_fp8()
    return contextlib.nullcontext()


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Where Transformer Engine keeps the FP8 scales of a forward for its repetition: nothing to do."""
    return contextlib.nullcontext()


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """The tokens of a pack that context-parallel rank `rank` of `world_size` holds, int32, in order.

    Args:
        cu_seqlens: `[sequences + 1]`, where the sequences start, padding counted in.
    """
    held = owners(cu_seqlens, total_tokens, world_size) == rank
    return held.nonzero().view(-1).to(torch.int32)


tex = types.SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)
"""Of `transformer_engine_torch`, what Megatron calls besides FP8."""


def modules(
    distributed: Mapping[str, Any], router: Mapping[str, Any]
) -> dict[str, types.ModuleType]:
    """Dotted name -> module.

    Args:
        distributed: what `transformer_engine.pytorch.distributed` gets besides: the class of the random
            number tracker is its user's own.
        router: what `transformer_engine.pytorch.router` gets.
    """
    recipe = _module("common.recipe", DelayedScaling=DelayedScaling)
    common = _module("common", recipe=recipe)
    fp8 = _module(
        "pytorch.fp8",
        FP8GlobalStateManager=FP8GlobalStateManager,
        check_fp8_support=check_fp8_support,
        fp8_autocast=fp8_autocast,
        fp8_model_init=no_fp8,
    )
    ops = _module(
        "pytorch.ops",
        FusibleOperation=sequence.Sequential,
        LayerNorm=LayerNorm,
        RMSNorm=RMSNorm,
        **{name: getattr(sequence, name) for name in sequence.__all__},
        **{name: getattr(activation, name) for name in activation.__all__},
    )
    ranks = _module(
        "pytorch.distributed",
        activation_recompute_forward=activation_recompute_forward,
        checkpoint=no_fp8,
        **distributed,
    )
    pytorch = _module(
        "pytorch",
        DotProductAttention=DotProductAttention,
        GroupedLinear=GroupedLinear,
        LayerNorm=LayerNorm,
        LayerNormLinear=LayerNormLinear,
        Linear=Linear,
        RMSNorm=RMSNorm,
        TransformerLayer=TransformerLayer,
        autocast=no_fp8,
        distributed=ranks,
        fp8=fp8,
        ops=ops,
        quantized_model_init=no_fp8,
    )
    package = _module("", common=common, pytorch=pytorch)
    routing = _module("pytorch.router", **router)
    return {m.__name__: m for m in (package, common, recipe, pytorch, fp8, ops, ranks, routing)}


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(f"transformer_engine.{name}" if name else "transformer_engine")
    vars(module).update(names)
    return module
