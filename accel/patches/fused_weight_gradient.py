"""Weight gradients as one bf16 product that sums into the fp32 ``main_grad``.

Under ``--gradient-accumulation-fusion`` (Megatron's default) every linear layer adds its weight
gradient straight into ``main_grad``. Without this feature the operands are copied to fp32 first and
multiplied in fp32; here bf16 operands are multiplied as they are, with fp32 products and sums, as
Apex does on a GPU: no copies, and more than twice as fast on CPUs that multiply bf16. The sum's order
differs from fp32's; nothing is rounded to bf16 in between.

Beside ``main_grad`` upstream's layers return a gradient for the hooks of data parallelism, memory of the
weight's size that nobody reads. That of the output layer is at the peak of a step, 1 GiB for Llama 3 8B; with
tied embeddings it is zeros that stay until the words' own gradient is there. Here it takes no memory, except
in CUDA graphs and on devices without sparse tensors.
"""

from __future__ import annotations

from accel.feature import Context, Feature
from accel.ops import gemm_accumulate
from accel.ops.gemm_accumulate import device_reason
from accel.patches import _linear
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

__all__ = ["gemm_accumulate"]


def _kernel_missing(context: Context) -> str | None:
    return device_reason(context.device)


FEATURE = Feature(
    name="fused_weight_gradient",
    summary="sum bf16 weight gradients into the fp32 main_grad without fp32 copies",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("gemm_accumulate",),
    requires=("gradient_accumulation_fusion",),
    unavailable=_kernel_missing,
    switch_on=_linear.switch_on,
    patches=(
        _linear.LINEAR,
        Patch(
            target="accel.parallel.linear:accumulate",
            replacement="accel.patches.fused_weight_gradient:gemm_accumulate",
            expects=("out_MN", "a_KM", "b_KN"),
            why="One product of bf16 operands with an fp32 sum, in place of two copies and an fp32 product.",
        ),
    ),
)
