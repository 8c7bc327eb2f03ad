"""``--masked-softmax-fusion`` (Megatron's default) without Apex's softmax kernels.

For fp16 and bf16 the local spec's attention decides by shape alone that Apex's kernel is available, then
fails on its import. Without those modules the softmax runs as torch operations, as Megatron itself does
for shapes that the kernels do not take. Nothing changes where they are installed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from accel.feature import Context, Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE

_KERNELS = ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda")


def is_kernel_available(self: Any, mask: Any, b: int, np: int, sq: int, sk: int) -> bool:
    """No: the kernels' modules are missing."""
    return False


def _kernels_installed(context: Context) -> str | None:
    missing = [m for m in _KERNELS if importlib.util.find_spec(m) is None]
    return None if missing else "Apex's softmax kernels are installed"


FEATURE = Feature(
    name="masked_softmax_fusion",
    summary="run --masked-softmax-fusion as torch operations where Apex's kernels are missing",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=_kernels_installed,
    patches=(
        Patch(
            target="megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available",
            replacement="accel.patches.masked_softmax_fusion:is_kernel_available",
            expects=("self", "mask", "b", "np", "sq", "sk"),
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "e6f289693d6c"),
            why="Upstream looks at shapes only and then imports a kernel module that may be missing.",
        ),
    ),
)
