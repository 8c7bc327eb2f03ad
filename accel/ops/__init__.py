"""The ops of accel: one file each, with maths, reference, limits and the public function.

An op is defined here for every device and exists with or without native kernels; a kernel is
registered per device under the same name. Importing loads no library and compiles nothing. Nothing
here knows Megatron.

An op such as `rms_norm` is a function and a module of the same name; the package gives the function.
"""

from accel.ops.activation import bias_gelu, geglu, squared_relu, swiglu
from accel.ops.adamw import adamw, adamw_ref
from accel.ops.add_rms_norm import add_rms_norm, add_rms_norm_ref
from accel.ops.attention import attention, attention_ref
from accel.ops.causal_conv1d import causal_conv1d, causal_conv1d_ref
from accel.ops.cross_entropy import cross_entropy, cross_entropy_ref
from accel.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_ref
from accel.ops.gemm_accumulate import gemm_accumulate, gemm_accumulate_ref
from accel.ops.grouped_gemm import grouped_gemm, grouped_gemm_ref
from accel.ops.layer_norm import layer_norm, layer_norm_ref
from accel.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from accel.ops.masked_softmax import masked_softmax, masked_softmax_ref
from accel.ops.moe_permute import moe_permute, moe_row_map, moe_unpermute
from accel.ops.multi_tensor import l2_norm, l2_norm_ref, scale, scale_ref
from accel.ops.qkv_rope import qkv_rope, qkv_rope_ref
from accel.ops.remainder import join_remainder, split_remainder
from accel.ops.rms_norm import rms_norm, rms_norm_ref
from accel.ops.rope import rope, rope_ref
from accel.ops.split_conv1d_scan import split_conv1d_scan, split_conv1d_scan_ref
from accel.ops.state_space_scan import state_space_scan, state_space_scan_ref
from accel.ops.topk_router import moe_aux_scores, topk_router

__all__ = [
    "adamw",
    "adamw_ref",
    "add_rms_norm",
    "add_rms_norm_ref",
    "attention",
    "attention_ref",
    "bias_gelu",
    "causal_conv1d",
    "causal_conv1d_ref",
    "cross_entropy",
    "cross_entropy_ref",
    "gated_delta_rule",
    "gated_delta_rule_ref",
    "geglu",
    "gemm_accumulate",
    "gemm_accumulate_ref",
    "grouped_gemm",
    "grouped_gemm_ref",
    "join_remainder",
    "l2_norm",
    "l2_norm_ref",
    "layer_norm",
    "layer_norm_ref",
    "linear_cross_entropy",
    "linear_cross_entropy_ref",
    "masked_softmax",
    "masked_softmax_ref",
    "moe_aux_scores",
    "moe_permute",
    "moe_row_map",
    "moe_unpermute",
    "qkv_rope",
    "qkv_rope_ref",
    "rms_norm",
    "rms_norm_ref",
    "rope",
    "rope_ref",
    "scale",
    "scale_ref",
    "split_conv1d_scan",
    "split_conv1d_scan_ref",
    "split_remainder",
    "squared_relu",
    "state_space_scan",
    "state_space_scan_ref",
    "swiglu",
    "topk_router",
]
