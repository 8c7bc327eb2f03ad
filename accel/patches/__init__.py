"""Every feature of accel, in the order of the table of contents. The only package that names
Megatron."""

from __future__ import annotations

from accel.feature import Feature
from accel.patches import (
    cpu_initialization,
    dataset_helpers,
    distributed_optimizer_resume,
    fused_activation,
    fused_norm,
    gradient_accumulation_fusion,
    host_bf16_gemm,
    inplace_activation_grad,
    local_spec,
    masked_softmax_fusion,
    norm,
    optimizer_cpu_offload,
)

__all__ = ["FEATURES"]

FEATURES: tuple[Feature, ...] = (
    dataset_helpers.FEATURE,
    local_spec.FEATURE,
    gradient_accumulation_fusion.FEATURE,
    masked_softmax_fusion.FEATURE,
    distributed_optimizer_resume.FEATURE,
    optimizer_cpu_offload.FEATURE,
    cpu_initialization.FEATURE,
    norm.FEATURE,
    fused_norm.FEATURE,
    fused_activation.FEATURE,
    inplace_activation_grad.FEATURE,
    host_bf16_gemm.FEATURE,
)
