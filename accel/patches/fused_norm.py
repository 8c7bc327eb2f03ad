"""RMSNorm and LayerNorm as one kernel each, forward and backward.

The norm modules of the feature ``norm`` call the kernels in ``accel.ops`` instead of torch's chains
of element-wise passes. Forward reads the input once and writes the output once; backward reads the
input and the output's gradient once. Sums are fp32 and the result is rounded once, so it is closer
to the exact value than torch's own; every gradient stays within twice the error of torch in the
same dtype.
"""

from __future__ import annotations

from accel.feature import Feature
from accel.patches._kernels import kernels
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE, others_norm

_WHY = "One kernel that reads its input once, in place of torch's chain of element-wise passes."


FEATURE = Feature(
    name="fused_norm",
    summary="run RMSNorm and LayerNorm as one kernel each",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    aside=others_norm,
    requires=("norm",),
    benchmarks=("rms_norm", "layer_norm"),
    unavailable=kernels("rms_norm_fwd", "layer_norm_fwd"),
    patches=(
        Patch(
            target="accel.layers.norm:rms_norm",
            replacement="accel.ops:rms_norm",
            expects=("x", "weight", "eps", "zero_centered"),
            why=_WHY,
        ),
        Patch(
            target="accel.layers.norm:layer_norm",
            replacement="accel.ops:layer_norm",
            expects=("x", "weight", "bias", "eps", "zero_centered"),
            why=_WHY,
        ),
    ),
)
