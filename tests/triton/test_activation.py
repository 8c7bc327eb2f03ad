"""The activations' Triton kernels: the contract, layouts, and ends of blocks wherever they may fall."""

import pytest
import torch
from torch import Tensor

from accel._triton import activation as kernels
from accel.ops import bias_gelu, geglu, squared_relu, swiglu
from tests.ops import test_activation
from tests.ops.contract import LAYOUTS, change_layout
from tests.ops.test_activation import BACKWARD, BACKWARD_INPLACE, DTYPES, FORWARD, GATED
from tests.triton.harness import DEVICE, HAS_GPU, OnTriton, kernels_launched, on_device

SHAPES = [(3, 5, 254), (1, 66), (37, 2)]
EMPTY_SHAPES = [(0, 8), (3, 0), (2, 0, 6)]


class ActivationOnTriton:
    """What the contract of all kinds has on top; it stands in for its larger shapes."""

    @pytest.fixture
    def small_blocks(self, monkeypatch) -> None:
        """Several blocks of rows, of columns and runs of rows, all with ragged ends."""
        monkeypatch.setattr(kernels, "TILE", 64)
        monkeypatch.setattr(kernels, "TILE_OF_SUMS", 32)
        monkeypatch.setattr(kernels, "MIN_BLOCK", 16)
        monkeypatch.setattr(kernels, "RUNS_PER_PROCESSOR", 2)

    @pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtype):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
        for with_bias, with_probs, probs_dtype in [
            (False, False, None),
            (False, True, None),
            (True, True, torch.float32),
        ]:
            self.check(
                self.activation_inputs(
                    x.to(dtype), with_bias, with_probs, probs_dtype, limited=with_probs
                )
            )

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("with_probs", [False, True])
    def test_ends_of_blocks(self, with_probs, with_bias, small_blocks):
        width = 2 * 35 if self.kind in GATED else 35
        x = torch.randn(11, width, generator=torch.Generator().manual_seed(0))
        self.check(self.activation_inputs(x, with_bias, with_probs))

    def test_matches_reference_for_any_layout(self):
        x = torch.randn(3, 4, 34, generator=torch.Generator().manual_seed(0))
        for layout in LAYOUTS:
            inputs = self.activation_inputs(change_layout(x, layout), seed=1)
            tensors = [change_layout(t, layout) for t in inputs.tensors]
            # An expanded bias or probs would be another one.
            self.check(inputs if layout == "expanded" else inputs._replace(tensors=tensors))

    @pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
    def test_empty(self, shape):
        inputs = self.activation_inputs(torch.randn(shape))
        self.check(inputs)
        assert not kernels_launched(lambda: self.op(*inputs.tensors, **inputs.options))


def quick_geglu(*tensors, **options):
    return geglu(*tensors, approximate="quick", **options)


class TestSwiglu(ActivationOnTriton, OnTriton, test_activation.TestSwiglu):
    op = staticmethod(swiglu)


class TestGeglu(ActivationOnTriton, OnTriton, test_activation.TestGeglu):
    op = staticmethod(geglu)
    test_opcheck = None


class TestQuickGeglu(ActivationOnTriton, OnTriton, test_activation.TestQuickGeglu):
    op = staticmethod(quick_geglu)
    test_opcheck = None  # all kinds are the same three ops; a gated one and one that is not will do


class TestBiasGelu(ActivationOnTriton, OnTriton, test_activation.TestBiasGelu):
    op = staticmethod(bias_gelu)


class TestSquaredRelu(ActivationOnTriton, OnTriton, test_activation.TestSquaredRelu):
    op = staticmethod(squared_relu)
    test_opcheck = None


def every_16_bit_number(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[nearly 2^16, 2], each beside 1, and the SiLU of the first column in fp64."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    exact = torch.nn.functional.silu(every.double())
    # Below -88, e^-v overflows and the result, 1e-36 and less, becomes 0. Triton's interpreter has no
    # subnormal numbers of bfloat16.
    usual = every.isfinite() & (every > -88) & (exact.abs() >= torch.finfo(dtype).tiny)
    gate = every[usual].unsqueeze(1)
    return torch.cat([gate, torch.ones_like(gate)], dim=1), exact[usual].unsqueeze(1)


@pytest.mark.usefixtures("triton_kernels")
class TestAccuracy:
    def test_sigmoid_of_every_bfloat16_in_fp32(self):
        """On a GPU both powers of 2 and the quotient may each be 2 eps off."""
        x, exact = every_16_bit_number(torch.bfloat16)
        error = (on_device(swiglu)(x.float()).double() - exact).abs()
        eps = torch.finfo(torch.float32).eps
        assert (error <= (7 if HAS_GPU else 3) * eps * exact.abs()).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sigmoid_of_every_16_bit_number(self, dtype):
        """The shorter exponential costs a fiftieth of a rounding at most."""
        x, exact = every_16_bit_number(dtype)
        error = (on_device(swiglu)(x).double() - exact).abs()
        rounding = torch.finfo(dtype).eps / 2
        if dtype is torch.bfloat16 and not HAS_GPU:
            rounding *= 2  # the interpreter truncates where a GPU rounds
        assert (error <= 1.02 * rounding * exact.abs()).all()


@pytest.mark.usefixtures("triton_kernels")
class TestLaunches:
    """What runs for which call, on a GPU or not."""

    @pytest.mark.parametrize(
        ("with_bias", "with_probs", "kernel"),
        [
            (False, False, "_backward_tile"),
            (False, True, "_backward_rows"),
            (True, False, "_backward_columns"),
            (True, True, "_backward_columns"),
        ],
    )
    def test_one_kernel_each_way(self, with_bias, with_probs, kernel):
        x, dy = torch.randn(6, 64, device=DEVICE), torch.randn(6, 32, device=DEVICE)
        bias = torch.randn(64, device=DEVICE) if with_bias else None
        probs = torch.rand(6, device=DEVICE) if with_probs else None
        arguments = (x, bias, probs, "swiglu", None, 0.0)
        assert kernels_launched(lambda: FORWARD(*arguments, False)) == ["_forward"]
        assert kernels_launched(lambda: BACKWARD(dy, *arguments)) == [kernel]
        assert kernels_launched(lambda: BACKWARD_INPLACE(dy, *arguments)) == [kernel]

    def test_the_kernel_checks_by_itself(self):
        x = torch.ones(2, 8, device=DEVICE)
        for bias, probs, kind, clamp_value in [
            (torch.ones(7, device=DEVICE), None, "swiglu", None),
            (torch.ones(8, device=DEVICE).half(), None, "swiglu", None),
            (None, torch.ones(3, device=DEVICE), "swiglu", None),
            (None, None, "relu", None),
            (None, None, "swiglu", -1.0),
        ]:
            with pytest.raises(ValueError):
                FORWARD(x, bias, probs, kind, clamp_value, 0.0, False)
        with pytest.raises(ValueError, match="dy must be like y"):
            BACKWARD(torch.ones(2, 3, device=DEVICE), x, None, None, "swiglu", None, 0.0)
        dy = torch.ones(8, 1, device=DEVICE)
        with pytest.raises(ValueError, match="x must be contiguous"):
            BACKWARD_INPLACE(dy, x.t(), None, None, "swiglu", None, 0.0)


@pytest.mark.parametrize(
    ("num_cols", "block"), [(14336, 2048), (11008, 1024), (1408, 512), (64, 64), (33, 64)]
)
def test_few_columns_lie_beyond_the_last(num_cols, block):
    blocks = kernels._blocks(num_cols, kernels.TILE)
    assert blocks["BLOCK_F"] == block
    assert blocks["BLOCK_T"] * block == kernels.TILE
