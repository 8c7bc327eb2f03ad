"""The activations on Ascend: with and without a clamp, which changes what is called."""

import pytest
import torch

from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_activation

__all__ = ["npu_kernels"]


class OnNpuWithoutClamp(OnNpu):
    """`uses` is what is called without a clamp; `clamped` with one."""

    clamped: tuple[str, ...] = ()

    def uses_inputs(self):
        return self.inputs(torch.bfloat16, seed=1)

    def test_what_a_clamp_calls(self):
        assert calls_of(self.op, self.inputs(torch.bfloat16)) == set(self.clamped)

    @pytest.mark.parametrize("dtype", test_activation.DTYPES, ids=str)
    @pytest.mark.parametrize("limited", [False, True])
    @pytest.mark.parametrize("parts", [(False, False), (True, False), (False, True), (True, True)])
    def test_matches_reference(self, parts, limited, dtype):
        x = torch.randn(3, 5, 46, generator=torch.Generator().manual_seed(1)).to(dtype)
        for probs_dtype in (None, torch.float32):
            self.check(self.activation_inputs(x, *parts, probs_dtype, limited))


class TestSwiglu(OnNpuWithoutClamp, test_activation.TestSwiglu):
    uses = ("npu_swiglu", "npu_swiglu_backward")
    clamped = ("npu_clipped_swiglu",)


class TestGeglu(OnNpuWithoutClamp, test_activation.TestGeglu):
    uses = ("npu_geglu", "npu_geglu_grad")


class TestQuickGeglu(OnNpuWithoutClamp, test_activation.TestQuickGeglu):
    uses = ()
    clamped = ("npu_clipped_swiglu",)


class TestBiasGelu(OnNpuWithoutClamp, test_activation.TestBiasGelu):
    uses = clamped = ("npu_gelu", "npu_gelu_backward")


class TestSquaredRelu(OnNpuWithoutClamp, test_activation.TestSquaredRelu):
    uses = ()
