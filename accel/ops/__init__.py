"""The ops of accel: one file each, with maths, reference, limits and the public function.

An op is defined here for every device and exists with or without native kernels; a kernel is
registered per device under the same name. Importing loads no library and compiles nothing. Nothing
here knows Megatron.

A function and its module share their name, as `rms_norm` does; the package gives the function.
"""

from accel.ops.grouped_gemm import grouped_gemm, grouped_gemm_ref
from accel.ops.layer_norm import layer_norm, layer_norm_ref
from accel.ops.moe_permute import moe_permute, moe_row_map, moe_unpermute
from accel.ops.rms_norm import rms_norm, rms_norm_ref
from accel.ops.topk_router import moe_aux_scores, topk_router

__all__ = [
    "grouped_gemm",
    "grouped_gemm_ref",
    "layer_norm",
    "layer_norm_ref",
    "moe_aux_scores",
    "moe_permute",
    "moe_row_map",
    "moe_unpermute",
    "rms_norm",
    "rms_norm_ref",
    "topk_router",
]
