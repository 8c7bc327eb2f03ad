"""The ops of accel: one file each, with maths, reference, limits and the public function.

An op is defined here for every device and exists with or without native kernels; a kernel is
registered per device under the same name. Importing loads no library and compiles nothing. Nothing
here knows Megatron.

An op such as `rms_norm` is a function and a module of the same name; the package gives the function.
"""

from accel.ops.attention import attention, attention_ref
from accel.ops.layer_norm import layer_norm, layer_norm_ref
from accel.ops.masked_softmax import masked_softmax, masked_softmax_ref
from accel.ops.rms_norm import rms_norm, rms_norm_ref

__all__ = [
    "attention",
    "attention_ref",
    "layer_norm",
    "layer_norm_ref",
    "masked_softmax",
    "masked_softmax_ref",
    "rms_norm",
    "rms_norm_ref",
]
