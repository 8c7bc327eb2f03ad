"""Cross entropy on Ascend, and of a projection: plain PyTorch, in blocks of rows."""

import sys

import pytest
import torch

from accel._npu import cross_entropy as kernels
from accel.ops import cross_entropy
from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_cross_entropy, test_linear_cross_entropy
from tests.ops.contract import Inputs

__all__ = ["npu_kernels"]


class TestCrossEntropy(OnNpu, test_cross_entropy.TestCrossEntropy):
    uses = ()

    def test_blocks_of_rows(self, monkeypatch):
        monkeypatch.setattr(kernels, "ELEMENTS_AT_A_TIME", 100)
        for dtype in self.dtypes:
            self.check(self.inputs(dtype, 1))

    def test_in_place_is_the_same(self):
        x, target = self.inputs(torch.bfloat16).tensors
        grads = []
        for inplace in (False, True):
            leaf = x.clone().requires_grad_()
            cross_entropy(leaf * 1, target, inplace=inplace).sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)

    def test_targets_outside_the_vocabulary(self):
        with pytest.raises(IndexError, match=r"target 9 .* vocabulary of 9 tokens"):
            cross_entropy(torch.randn(3, 9), torch.tensor([0, 9, 1]))

    def test_rows_without_a_gradient_are_not_looked_at(self):
        x = torch.randn(4, 9)
        x[1] = torch.nan
        self.check_ignored(x, torch.tensor([3, -100, 8, 0]))

    @staticmethod
    def check_ignored(x, target):
        x.requires_grad_()
        loss = cross_entropy(x, target)
        loss.sum().backward()
        assert not loss[1]
        assert not x.grad[1].any()
        assert x.grad[[0, 2, 3]].any(-1).all()


class TestLinearCrossEntropy(OnNpu, test_linear_cross_entropy.TestLinearCrossEntropy):
    uses = ()
    test_pieces_of_any_size = None

    def test_calls_these_ops_of_torch_npu(self, monkeypatch):
        """Its sums, whose op asks on a CPU whether oneDNN has a kernel."""
        module = sys.modules["accel.ops.gemm_accumulate"]  # the package's name is the function
        monkeypatch.setattr(module, "device_reason", lambda device_type: None)
        assert calls_of(self.op, self.inputs(torch.bfloat16)) == {"npu_grouped_matmul_add_"}

    def test_pieces(self):
        for dtype in self.dtypes:
            inputs = self.inputs(dtype)
            self.check(Inputs(inputs.tensors, {**inputs.options, "tokens_per_chunk": 3}))
