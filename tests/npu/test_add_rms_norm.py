"""A residual addition with RMSNorm on Ascend: fused in fp32, two ops in 16 bits."""

import torch

from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_add_rms_norm

__all__ = ["npu_kernels"]


class TestAddRmsNorm(OnNpu, test_add_rms_norm.TestAddRmsNorm):
    uses = ("npu_add_rms_norm", "npu_rms_norm_backward")

    def uses_inputs(self):
        return self.inputs(torch.float32)

    def test_16_bits_are_two_ops(self):
        for dtype in (torch.bfloat16, torch.float16):
            got = calls_of(self.op, self.inputs(dtype))
            assert got == {"npu_rms_norm", "npu_rms_norm_backward"}
