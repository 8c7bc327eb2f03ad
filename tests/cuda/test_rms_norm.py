"""RMSNorm's CUDA kernels: the contract, layouts, and each kind of rows that the launcher tells apart."""

import contextlib

import pytest
import torch

from tests.cuda.harness import OnCuda, cuda_kernels, without_bulk_copies
from tests.ops import test_rms_norm
from tests.ops.contract import LAYOUTS, change_layout
from tests.ops.norm_contract import DTYPES

__all__ = ["cuda_kernels"]

SHAPES = [
    (4, 64),  # teams of 2 and 4 lanes
    (3, 5, 127),  # leading dimensions, a ragged end
    (1, 33),
    (37, 1),  # teams of one lane
    (129, 24),  # more rows than the blocks of a turn take
    (1025, 40),  # several turns
    (5, 2080),  # the whole block for a row
    (7, 4096),
    (38, 2048),  # several rows of whole teams to a block, several turns
]
EXACT = [(37, 2048), (26, 4096), (13, 8192), (5, 16384)]
"""Of 16 bits; half as long of fp32."""
LONG = [16640, 33000]
"""Beyond what registers hold: of fp32 both ways, of 16 bits backward; of 16 bits both ways."""


def check_exact_rows(op, shape):
    """By a ring and without one; more rows than its stages, and a last turn that not all teams have."""
    for dtypes in DTYPES:
        inputs = op.norm_inputs((shape[0], shape[1] * 2 // dtypes[0].itemsize), dtypes)
        op.check(inputs)
        with without_bulk_copies():
            op.check(inputs)


class TestRmsNorm(OnCuda, test_rms_norm.TestRmsNorm):
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes):
        self.check(self.norm_inputs(shape, dtypes, zero_centered=shape[0] % 2 == 1))

    @pytest.mark.parametrize("dtypes", DTYPES[:2], ids=str)
    @pytest.mark.parametrize("num_cols", LONG)
    def test_rows_longer_than_registers(self, num_cols, dtypes):
        self.check(self.norm_inputs((4, num_cols), dtypes))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(6, 3, 64), (5, 43), (0, 8), (3, 0)], ids=str)
    def test_layouts(self, shape, layout):
        for dtypes in DTYPES:
            x, weight = self.norm_inputs(shape, dtypes).tensors
            x = change_layout(x, layout)
            self.check(self.with_vectors(x, weight.dtype, False))

    @pytest.mark.parametrize("shape", EXACT, ids=str)
    def test_rows_that_fill_their_threads(self, shape):
        check_exact_rows(self, shape)

    @pytest.mark.parametrize("device", [contextlib.nullcontext, without_bulk_copies])
    def test_offset_of_a_tensor_changes_no_bit(self, device):
        """Elements one by one are summed in the order of whole packs."""
        with device():
            self.check_offset_of_a_tensor()

    def check_offset_of_a_tensor(self):
        cases = [((9, 64), 1), ((3, 4096), 1), ((2, 16640), 1), ((37, 2048), 1), ((21, 2048), 2)]
        cases += [
            ((21, 2048), 3),
            ((21, 2048), 4),
            ((9, 8192), 1),
            ((5, 16384), 1),
            ((21, 1024), 0),
        ]
        for shape, dtypes in cases:
            x, weight = self.norm_inputs(shape, DTYPES[dtypes]).tensors
            dy = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)

            def results(x, weight=weight, dy=dy):
                leaf, scale = x.detach().requires_grad_(), weight.clone().requires_grad_()
                y = self.op(leaf, scale)
                return [y.detach(), *torch.autograd.grad(y, (leaf, scale), dy)]

            for a, b in zip(results(x), results(change_layout(x, "offset")), strict=True):
                assert torch.equal(a, b)
