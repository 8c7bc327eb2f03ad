"""bf16 matrix products on CPUs without bf16 instructions.

oneDNN multiplies bf16 only where the CPU has AVX-512 BF16 or AMX; elsewhere ATen falls back to a
plain loop, a hundred times slower than its own fp32 product (512 x 512 x 512 on two AVX2 cores: 1.3
against 146 GFLOP/s). Here the four product kernels widen bf16 operands to fp32, which is exact,
multiply with oneDNN or MKL and round once at the end. Every other dtype goes to ATen as before.
Idle on CPUs that multiply bf16 themselves.
"""

from __future__ import annotations

from accel.feature import Context, Feature
from accel.ops import host_gemm
from accel.upstream import SUPPORTED_RANGE


def _native_bf16(context: Context) -> str | None:
    return "this CPU multiplies bf16 natively" if host_gemm.has_native_bf16() else None


FEATURE = Feature(
    name="host_bf16_gemm",
    summary="multiply bf16 matrices through fp32 on CPUs without bf16 instructions",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    idle=_native_bf16,
    switch_on=host_gemm.install,
)
