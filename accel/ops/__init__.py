"""The ops of accel: one file each, with maths, reference, limits and the public function.

An op is defined here for every device and exists with or without native kernels; a kernel is
registered per device under the same name. Importing loads no library and compiles nothing. Nothing
here knows Megatron.

`rms_norm` and `layer_norm` are functions and modules of the same name; the package gives the
functions.
"""

from accel.ops.activation import bias_gelu, geglu, squared_relu, swiglu
from accel.ops.layer_norm import layer_norm, layer_norm_ref
from accel.ops.rms_norm import rms_norm, rms_norm_ref

__all__ = [
    "bias_gelu",
    "geglu",
    "layer_norm",
    "layer_norm_ref",
    "rms_norm",
    "rms_norm_ref",
    "squared_relu",
    "swiglu",
]
