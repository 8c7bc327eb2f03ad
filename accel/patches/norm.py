"""RMSNorm and LayerNorm of the local spec with every flag that stock Megatron reserves for Apex.

Without Apex, Megatron builds its norms by ``WrappedTorchNorm``, which refuses
``--sequence-parallel``, persistent norms, ``--apply-layernorm-1p`` (zero-centred weights) and
memory-efficient norms. The modules here are torch's own ``LayerNorm`` and ``RMSNorm`` with the
missing parts: parameters are marked ``sequence_parallel`` so that Megatron all-reduces their
gradients over the tensor-parallel group, and zero-centred weights start at 0 and scale by ``1 +
weight``. Where stock Megatron runs at all the numbers are bit-identical. State-dict keys are
torch's: ``weight``, and ``bias`` for LayerNorm.

``WrappedTorchNorm.__new__`` is the one seam: every spec, the final norm and the q/k norms go
through it. Persistent and memory-efficient norms are names of Apex kernels, not other mathematics;
they are accepted as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.feature import Context, Feature
from accel.layers.norm import LayerNorm, RMSNorm
from accel.patching import Patch, replaced_by
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE, others_norm

_PROVIDER = "megatron.core.models.backends:LocalSpecProvider.layer_norm"


def _made_by_others(context: Context) -> str | None:
    """Liger's patch of the local spec gives RMSNorms that never come to Megatron's own class."""
    wanted = {"normalization": "RMSNorm", "transformer_impl": "local"}
    if any(getattr(context.args, name, None) != value for name, value in wanted.items()):
        return None
    other = replaced_by(_PROVIDER)
    return f"{other} has replaced {_PROVIDER} and makes the RMSNorms" if other else None


FEATURE = Feature(
    name="norm",
    summary="sequence-parallel, zero-centred and persistent norms in the local spec without Apex",
    preset="exact",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    aside=others_norm,
    idle=_made_by_others,
    patches=(
        Patch(
            target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            replacement="accel.patches.norm:new_norm",
            expects=(
                "cls",
                "config",
                "hidden_size",
                "eps",
                "persist_layer_norm",
                "zero_centered_gamma",
                "normalization",
            ),
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "b54d62a62531"),
            why="Upstream's wrapper of torch's norms refuses sequence parallelism and zero-centred weights.",
        ),
    ),
)


def new_norm(
    cls: type,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """``WrappedTorchNorm(config, hidden_size, eps)``; as upstream, only ``config`` decides the kind
    of norm."""
    if config.normalization == "L2Norm":
        from megatron.core.transformer.torch_norm import L2Norm

        return L2Norm(hidden_size, eps=eps)
    kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.normalization not in kinds:
        raise ValueError(
            f"normalization={config.normalization!r}: use LayerNorm, RMSNorm or L2Norm"
        )
    return kinds[config.normalization](
        hidden_size,
        eps,
        zero_centered=config.layernorm_zero_centered_gamma,
        sequence_parallel=config.sequence_parallel,
    )
