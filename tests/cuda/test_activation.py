"""The activations' CUDA kernels: the contract of each kind, tiles of columns, and every 16-bit number."""

import pytest
import torch

from accel.ops import swiglu
from tests.cuda.harness import OnCuda, cuda_kernels, needs_kernels, on_device, same_bits
from tests.ops import test_activation
from tests.ops.contract import LAYOUTS, change_layout

__all__ = ["cuda_kernels"]

SHAPES = [
    (4, 64),  # several rows to a warp
    (3, 5, 254),  # leading dimensions, ragged ends
    (37, 2),
    (325, 48),  # several turns
    (5, 1088),  # a block to a row
    (3, 8448),  # several tiles to a row
]


class OnCudaOfKind(OnCuda):
    @pytest.mark.parametrize("dtype", test_activation.DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtype):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
        for with_bias in (False, True):
            for probs_dtype in (None, dtype, torch.float32):
                self.check(
                    self.activation_inputs(x, with_bias, probs_dtype is not None, probs_dtype)
                )
        self.check(self.activation_inputs(x, False, False, limited=False))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(6, 3, 64), (5, 86), (0, 8), (3, 0)], ids=str)
    def test_layouts(self, shape, layout):
        for dtype in test_activation.DTYPES:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            self.check(self.activation_inputs(change_layout(x, layout)))

    def test_offset_of_a_tensor_changes_no_bit(self):
        x = torch.randn((9, 8448), generator=torch.Generator().manual_seed(0)).bfloat16()

        def shifted(x, *others, **options):
            return self.op(change_layout(x, "offset"), *others, **options)

        same_bits(self.op, shifted, self.activation_inputs(x))


class TestSwiglu(OnCudaOfKind, test_activation.TestSwiglu):
    pass


class TestGeglu(OnCudaOfKind, test_activation.TestGeglu):
    pass


class TestQuickGeglu(OnCudaOfKind, test_activation.TestQuickGeglu):
    pass


class TestBiasGelu(OnCudaOfKind, test_activation.TestBiasGelu):
    pass


class TestSquaredRelu(OnCudaOfKind, test_activation.TestSquaredRelu):
    pass


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestSigmoid:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_of_every_16_bit_number(self, dtype):
        """What the shorter exponential and division of these dtypes cost is little of their rounding."""
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        gate = every[every.isfinite() & (every > -87)].unsqueeze(1)  # below, it is 1e-36: 0 here
        x = torch.cat([gate, torch.ones_like(gate)], dim=1)
        got = on_device(swiglu)(x).double()
        exact = torch.nn.functional.silu(gate.double())
        rounding = torch.finfo(dtype).eps / 2 * exact.abs().clamp_min(torch.finfo(dtype).tiny)
        assert ((got - exact).abs() <= 1.02 * rounding).all()
