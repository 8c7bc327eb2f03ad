"""Masked softmax on Ascend: sizes that the fused op takes, and all others."""

import pytest
import torch

from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_masked_softmax
from tests.ops.contract import Inputs

__all__ = ["npu_kernels"]


def taken(dtype: torch.dtype, mask_shape: tuple[int, ...] | None, causal: bool = False) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(2, 3, 64, 64 if causal else 96, generator=generator) * 3).to(dtype)
    mask = None if mask_shape is None else torch.rand(mask_shape, generator=generator) > 0.6
    return Inputs([x, mask], {"scale": 0.5, "causal": causal})


class TestMaskedSoftmax(OnNpu, test_masked_softmax.TestMaskedSoftmax):
    uses = ("npu_scaled_masked_softmax", "npu_scaled_masked_softmax_backward")

    def uses_inputs(self):
        return taken(torch.bfloat16, (2, 1, 64, 96))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        "mask_shape", [None, (2, 1, 64, 96), (64, 96), (2, 3, 1, 96), (1, 1, 64, 1)], ids=str
    )
    def test_sizes_of_the_fused_op(self, mask_shape, dtype):
        inputs = taken(dtype, mask_shape)
        self.check(inputs)
        assert bool(calls_of(self.op, inputs)) == (dtype != torch.float16)

    def test_causal(self):
        for dtype in self.dtypes:
            inputs = taken(dtype, None, causal=True)
            self.check(inputs)
            assert bool(calls_of(self.op, inputs)) == (dtype != torch.float16)

    def test_what_the_fused_op_does_not_take_is_plain_pytorch(self):
        assert not calls_of(self.op, self.inputs(torch.bfloat16))
