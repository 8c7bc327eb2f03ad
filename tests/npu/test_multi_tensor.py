"""Norm and scaling of many tensors on Ascend."""

from tests.npu.harness import OnNpu, npu_kernels
from tests.ops import test_multi_tensor

__all__ = ["npu_kernels"]


class TestL2Norm(OnNpu, test_multi_tensor.TestL2Norm):
    uses = ()


class TestScale(OnNpu, test_multi_tensor.TestScale):
    uses = ()
