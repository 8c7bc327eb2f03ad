"""Every feature of accel, in the order of the table of contents. The only package that names
Megatron."""

from __future__ import annotations

from accel.feature import Feature
from accel.patches import (
    cpu_initialization,
    dataset_helpers,
    distributed_optimizer_resume,
    fused_activation,
    fused_adamw,
    fused_attention,
    fused_cross_entropy,
    fused_moe_permute,
    fused_norm,
    fused_rope,
    fused_softmax,
    fused_topk_router,
    fused_weight_gradient,
    gradient_accumulation_fusion,
    grouped_gemm,
    host_bf16_gemm,
    host_half_collectives,
    host_shared_memory_collectives,
    inplace_activation_grad,
    linear_cross_entropy,
    local_spec,
    masked_softmax_fusion,
    moe_fusion,
    norm,
    optimizer_cpu_offload,
    rope_fusion,
    spec_checkpoints,
    te_layers,
)

__all__ = ["FEATURES"]

FEATURES: tuple[Feature, ...] = (
    dataset_helpers.FEATURE,
    te_layers.FEATURE,
    local_spec.FEATURE,
    gradient_accumulation_fusion.FEATURE,
    masked_softmax_fusion.FEATURE,
    moe_fusion.FEATURE,
    rope_fusion.FEATURE,
    spec_checkpoints.FEATURE,
    distributed_optimizer_resume.FEATURE,
    optimizer_cpu_offload.FEATURE,
    cpu_initialization.FEATURE,
    norm.FEATURE,
    fused_norm.FEATURE,
    fused_weight_gradient.FEATURE,
    fused_attention.FEATURE,
    fused_cross_entropy.FEATURE,
    linear_cross_entropy.FEATURE,
    fused_adamw.FEATURE,
    grouped_gemm.FEATURE,
    fused_moe_permute.FEATURE,
    fused_topk_router.FEATURE,
    fused_softmax.FEATURE,
    fused_rope.FEATURE,
    fused_activation.FEATURE,
    inplace_activation_grad.FEATURE,
    host_bf16_gemm.FEATURE,
    host_half_collectives.FEATURE,
    host_shared_memory_collectives.FEATURE,
)
