"""Adam and AdamW on Ascend."""

import pytest
import torch

from accel.ops import adamw, split_remainder
from tests.npu.harness import OnNpu, npu_kernels
from tests.ops import test_adamw
from tests.ops.contract import run

__all__ = ["npu_kernels"]

BETAS = (0.875, 0.984375)
"""Exact in fp32, as torch-npu's op takes them: with 0.999 it is another Adam, of beta2 0.99900001287."""


class TestAdamw(OnNpu, test_adamw.TestAdamw):
    uses = ("npu_apply_adam_w.out",)

    def inputs(self, dtype, seed=0):
        inputs = super().inputs(dtype, seed)
        return inputs._replace(options={**inputs.options, "betas": BETAS})

    @pytest.mark.parametrize("decoupled", [False, True])
    @pytest.mark.parametrize("bias_correction", [False, True])
    def test_every_variant(self, decoupled, bias_correction):
        inputs = self.inputs(torch.float32)
        options = {"decoupled": decoupled, "bias_correction": bias_correction}
        options["grad_scale"] = torch.tensor(0.25)
        self.check(inputs._replace(options={**inputs.options, **options}))

    def test_usual_betas_are_as_close_as_fp32_has_them(self):
        inputs = self.inputs(torch.float32)
        inputs = inputs._replace(options={**inputs.options, "betas": (0.9, 0.999)})
        got, want = (run(op, inputs, [])[0] for op in (self.op, self.ref))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=3e-5, atol=1e-7)

    def test_remainders_are_the_step_of_the_fp32_weight(self):
        generator = torch.Generator().manual_seed(0)
        w, g, m, v = (torch.randn(50, generator=generator) for _ in range(4))
        v = v.abs()
        hyper = {"lr": 1e-2, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}
        param, remainder = split_remainder(w)
        joined = [t.clone() for t in (m, v)]
        adamw([w], [g], [m], [v], [torch.tensor(3.0)], **hyper)
        rest = [[g], [joined[0]], [joined[1]], [torch.tensor(3.0)], []]
        adamw([param], *rest, [remainder], **hyper)
        for got, want in zip((param, remainder), split_remainder(w), strict=True):
            assert torch.equal(got, want)
