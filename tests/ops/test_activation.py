"""SwiGLU, GEGLU, GELU and squared ReLU: see `OpContract`."""

import logging
import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel.log import log_once
from accel.ops import bias_gelu, geglu, squared_relu, swiglu
from accel.ops.activation import GATED, _nearest, activation_ref, unsupported_reason
from tests.ops.contract import Inputs, OpContract, laid_out, needs_native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = {
    "swiglu": swiglu,
    "geglu": geglu,
    "quick_geglu": partial(geglu, approximate="quick"),
    "gelu": bias_gelu,
    "squared_relu": squared_relu,
}
FORWARD = torch.ops.accel.activation_fwd.default
BACKWARD = torch.ops.accel.activation_bwd.default
BACKWARD_INPLACE = torch.ops.accel.activation_bwd_inplace.default


class ActivationContract(OpContract):
    """`op(x, bias, probs, ...)`; the reference is `activation_ref` of the same kind."""

    kind: str
    # fp32 computes in the dtype of its result. From x to dx of geglu: bias, the cubic (3), exp (3), 1 +,
    # the quotient, v s, 1 - s, its slope (3), the sum, and two products.
    roundings = {torch.float32: 16}

    def op(self, *tensors, **options):
        return OPS[self.kind](*tensors, **options)

    def ref(self, *tensors, inplace_grad=False, **options):
        return activation_ref(self.kind, *tensors, **options)

    def activation_inputs(
        self,
        x,
        with_bias=True,
        with_probs=True,
        probs_dtype=None,
        limited=True,
        seed=0,
        **options,
    ):
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(x.shape[-1], generator=generator).to(x.dtype) if with_bias else None
        probs = None
        if with_probs:
            probs = torch.rand(x.shape[:-1].numel(), 1, generator=generator)
            probs = probs.to(probs_dtype or x.dtype)
        if limited and self.kind in GATED:
            options |= {"clamp_value": 1.5, "offset": 0.5}
        return Inputs([x, bias, probs], options)

    def inputs(self, dtype, seed=0):
        width = 86 if self.kind in GATED else 43
        x = torch.randn(6, 3, width, generator=torch.Generator().manual_seed(seed)) * 2
        # Every optional part in one seed, none of them in another.
        return self.activation_inputs(
            x.to(dtype), seed != 1, seed != 1, torch.float32, seed != 1, seed
        )

    def large_inputs(self):
        x = torch.randn(1025, 528, generator=torch.Generator().manual_seed(0)).bfloat16()
        return self.activation_inputs(x)

    def magnitudes(self, inputs):
        """The size of the terms in the sums over rows and columns, where they cancel."""
        x, bias, probs = (None if t is None else t.detach().double() for t in inputs.tensors)
        if x.numel() == 0:
            return {}
        x.requires_grad_()
        options = {k: v for k, v in inputs.options.items() if k != "inplace_grad"}
        y = activation_ref(self.kind, x, bias, None, **options)
        # As `run` does: the dy of every dtype.
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).double()
        factor = 1 if probs is None else probs.reshape(*x.shape[:-1], 1)
        (dx,) = torch.autograd.grad(y, x, dy * factor)
        rows = tuple(range(x.ndim - 1))
        sizes = {
            "gradient 1": dx.abs().sum(rows).max(),
            "gradient 2": (dy * y.detach()).abs().sum(-1).max(),
        }
        return {name: float(size) for name, size in sizes.items()}

    def opchecks(self):
        for with_options in (False, True):
            inputs = self.inputs(torch.bfloat16, seed=0 if with_options else 1)
            tensors = [None if t is None else t.requires_grad_() for t in inputs.tensors]
            limits = (inputs.options.get("clamp_value"), inputs.options.get("offset", 0.0))
            yield FORWARD, (*tensors, self.kind, *limits, False)
            x, *others = (None if t is None else t.detach() for t in tensors)
            dy = torch.randn_like(FORWARD(x, *others, self.kind, *limits, False))
            yield BACKWARD, (dy, x, *others, self.kind, *limits)
            yield BACKWARD_INPLACE, (dy, x, *others, self.kind, *limits)

    @needs_native
    @pytest.mark.parametrize("probs_dtype", [None, torch.float32])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "shape",
        [(4, 64), (3, 5, 254), (1, 66), (37, 2), (1025, 48), (96, 4096)],
        ids=str,
    )
    def test_matches_reference(self, shape, dtype, probs_dtype):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
        for limited in (False, True):
            self.check(
                self.activation_inputs(x.to(dtype), probs_dtype=probs_dtype, limited=limited)
            )
        self.check(self.activation_inputs(x.to(dtype), False, False, limited=False))

    @needs_native
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_nan_and_inf_stay_visible(self, bad, dtype):
        x = torch.randn(2, 38).to(dtype)
        x[1, 7] = bad
        x.requires_grad_()
        for limited in (False, True):
            options = self.activation_inputs(x, limited=limited).options
            y, want = self.op(x, **options), self.ref(x, **options)
            assert torch.equal(y.isnan(), want.isnan())
            (dx,) = torch.autograd.grad(y.sum(), x)
            assert dx[0].isfinite().all()
            if bad is torch.nan and not limited:
                assert dx[1, 7].isnan()

    @needs_native
    def test_gradient_in_place_is_the_same_bits_in_the_memory_of_x(self):
        tensors, options, _ = self.inputs(torch.bfloat16)
        x, bias, probs = (t.to(self.device).requires_grad_() for t in tensors)
        op = OPS[self.kind]
        y = op(x, bias, probs, **options)
        dy = torch.randn_like(y)
        want = torch.autograd.grad(y, (x, bias, probs), dy)
        fc1 = x * 1
        y = op(fc1, bias, probs, inplace_grad=True, **options)
        got = torch.autograd.grad(y, (fc1, bias, probs), dy)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert got[0].data_ptr() == fc1.data_ptr()

    @needs_native
    def test_gradient_in_place_of_what_is_not_contiguous_is_a_copy(self):
        fc1 = torch.randn(38, 6, requires_grad=True, device=self.device).t() * 1
        kept = fc1.detach().clone()
        y = OPS[self.kind](fc1, inplace_grad=True)
        (got,) = torch.autograd.grad(y, fc1, torch.ones_like(y), retain_graph=True)
        (again,) = torch.autograd.grad(y, fc1, torch.ones_like(y))
        assert torch.equal(got, again)
        assert torch.equal(fc1, kept)

    @needs_native
    def test_gradient_in_place_is_never_silently_wrong(self):
        op = OPS[self.kind]
        x = torch.randn(4, 38, requires_grad=True, device=self.device)
        with pytest.raises(ValueError, match="would overwrite x, which is a leaf"):
            op(x, inplace_grad=True)
        for leaf in (x, torch.nn.Parameter(x.detach().clone())):
            with pytest.raises(ValueError, match=r"x, which is a leaf .* \(or a view of one\)"):
                op(leaf[:2], inplace_grad=True)
        with pytest.raises(ValueError, match="would overwrite x, which is a leaf"):
            op(x.detach()[:2].requires_grad_(), inplace_grad=True)  # and a view

        y = op(x * 1, inplace_grad=True)
        y.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="inplace_grad=True has overwritten"):
            y.sum().backward()

        identity = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with identity:  # hooks go past PyTorch's own check of versions
            y = op(x * 1, inplace_grad=True)
        y.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="inplace_grad=True has overwritten"):
            y.sum().backward()

        fc1 = x * 1
        squares = fc1 * fc1  # saves fc1 too
        op(fc1, inplace_grad=True).sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()

        with pytest.raises(RuntimeError, match="cannot be combined with create_graph"):
            torch.autograd.grad(op(x * 1, inplace_grad=True).sum(), x, create_graph=True)

    @needs_native
    def test_second_derivative_is_an_error(self):
        x = torch.randn(2, 8, requires_grad=True)
        (dx,) = torch.autograd.grad(self.op(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="activation_bwd"):
            dx.sum().backward()

    @pytest.mark.parametrize(
        ("x", "bias", "probs", "message"),
        [
            (torch.ones(2, 8, dtype=torch.int64), None, None, "floating dtype, got torch.int64"),
            (torch.tensor(1.0), None, None, r"x must have shape \[\.\.\..*got \[\]"),
            (torch.ones(2, 8), torch.ones(7), None, r"bias must .* \[8\], .* got \[7\]"),
            (torch.ones(2, 8), torch.ones(8).half(), None, "bias must be torch.float32 .*float16"),
            (
                torch.ones(2, 8),
                torch.ones(8).to("meta"),
                None,
                "bias must be on (cpu|cuda:0) .* got meta",
            ),
            (
                torch.ones(2, 8),
                None,
                torch.ones(8),
                r"probs must .* \[2\] or \[2, 1\], .*got \[8\]",
            ),
            (torch.ones(2, 8), None, torch.ones(2).half(), "probs must be .* got torch.float16"),
            (
                torch.ones(2, 8),
                None,
                torch.ones(2).to("meta"),
                "probs must be on (cpu|cuda:0) .* got meta",
            ),
        ],
    )
    def test_rejects(self, x, bias, probs, message):
        with pytest.raises(ValueError, match=message):
            self.op(x, bias, probs)

    @pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3), (2, 3, 1)])
    def test_takes_one_probability_per_row_in_any_of_these_shapes(self, shape):
        x, probs = torch.randn(2, 3, 8), torch.rand(6)
        want = self.ref(x, None, probs)
        torch.testing.assert_close(self.op(x, None, probs.view(shape)), want)

    def test_unsupported_dtype_falls_back_and_says_so_once(self, caplog):
        inputs = self.activation_inputs(torch.randn(4, 8).double())
        reason = unsupported_reason(inputs.tensors[0])
        assert "float64" in reason
        want = self.ref(*(t.to(self.device) for t in inputs.tensors), **inputs.options).cpu()
        log_once.cache_clear()
        with caplog.at_level(logging.WARNING, logger="accel"):
            for _ in range(2):
                got = self.op(*inputs.tensors, **inputs.options)
                assert torch.equal(got, want)
        (record,) = caplog.records
        assert record.message.endswith(f"using plain PyTorch: {reason}")


class GatedContract(ActivationContract):
    @needs_native
    @pytest.mark.parametrize("clamp_value", [0.0, 1.3, 1.5, 1.7, 7.0])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradient_at_the_clamp_value_is_torchs(self, dtype, clamp_value):
        limit = torch.tensor([clamp_value, -clamp_value], dtype=dtype)
        values = torch.cat((limit, torch.nextafter(limit, limit * 0), limit * 1.25, limit / 2))
        pairs = torch.cartesian_prod(values, values)  # each gate with each linear half
        x = torch.cat((pairs[:, 0], pairs[:, 1])).reshape(1, -1).requires_grad_()
        options = {"clamp_value": clamp_value, "offset": 0.5}
        (got,) = torch.autograd.grad(self.op(x.to(self.device), **options).sum(), x)
        (want,) = torch.autograd.grad(self.ref(x, **options).sum(), x)
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.01)

    @needs_native
    def test_clamp_value_that_x_cannot_hold_compiles_as_one_graph(self):
        def op(x):
            return self.op(x, clamp_value=1.7)

        x = torch.linspace(-3, 3, 64).bfloat16().reshape(2, 32).to(self.device)
        torch._dynamo.reset()
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), op(x))


class TestSwiglu(GatedContract):
    kind = "swiglu"


class TestGeglu(GatedContract):
    kind = "geglu"


class TestQuickGeglu(GatedContract):
    kind = "quick_geglu"


class TestBiasGelu(ActivationContract):
    kind = "gelu"


class TestSquaredRelu(ActivationContract):
    kind = "squared_relu"


@given(
    value=st.floats(0, allow_nan=False, allow_subnormal=True) | st.floats(0, 4),
    dtype=st.sampled_from(DTYPES),
)
def test_nearest_is_what_torch_rounds_to(value, dtype):
    assume(value <= torch.finfo(dtype).max)
    assert (
        _nearest(value, dtype) == torch.tensor(value, dtype=torch.float64).float().to(dtype).item()
    )


def test_nearest_leaves_what_is_beyond_the_range():
    assert _nearest(1e6, torch.float16) == 1e6
    assert _nearest(math.inf, torch.float32) == math.inf


KINDS = {
    cls.kind: cls for cls in (TestSwiglu, TestGeglu, TestQuickGeglu, TestBiasGelu, TestSquaredRelu)
}


@needs_native
@settings(deadline=None, max_examples=150)
@given(
    x=laid_out(),
    kind=st.sampled_from(list(OPS)),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    with_probs=st.booleans(),
    limited=st.booleans(),
)
def test_matches_reference_for_any_layout(x, kind, dtype, with_bias, with_probs, limited):
    case = KINDS[kind]()
    if kind in GATED and x.shape[-1] % 2:
        with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., 2F\]"):
            case.op(x)
        return
    case.check(case.activation_inputs(x.to(dtype), with_bias, with_probs, limited=limited))


@needs_native
def test_sigmoid_of_every_bfloat16():
    """Through SiLU in fp32 beside u = 1: all that the exponential may be given, its ends included."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    gate = every[every.isfinite()].float().unsqueeze(1)
    got = swiglu(torch.cat([gate, torch.ones_like(gate)], dim=1)).double()
    exact = torch.nn.functional.silu(gate.double())
    error = (got - exact).abs()
    usual = gate.double() > -88  # below, e^-v overflows and the result, 1e-36 and less, becomes 0
    assert (error[usual] <= 3 * torch.finfo(torch.float32).eps * exact[usual].abs()).all()
    assert (error[~usual] < 1e-36).all()


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sigmoid_of_every_16_bit_number(dtype):
    """The shorter exponential of these dtypes costs a fiftieth of their rounding at most."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    gate = every[every.isfinite() & (every > -88)].unsqueeze(1)  # below, e^-v overflows: see above
    got = swiglu(torch.cat([gate, torch.ones_like(gate)], dim=1)).double()
    exact = torch.nn.functional.silu(gate.double())
    rounding = torch.finfo(dtype).eps / 2 * exact.abs().clamp_min(torch.finfo(dtype).tiny)
    assert ((got - exact).abs() <= 1.02 * rounding).all()


@needs_native
def test_streaming_stores_change_no_bit():
    """Large results go past the caches; those of a part of the rows do not."""
    x = torch.randn(8192, 2 * 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    dy = torch.randn(8192, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()

    def y_dx(rows):
        return (
            FORWARD(x[rows], None, None, "swiglu", None, 0.0, False),
            BACKWARD(dy[rows], x[rows], None, None, "swiglu", None, 0.0)[0],
        )

    whole = y_dx(slice(None))
    for first in range(0, 8192, 512):
        rows = slice(first, first + 512)
        assert all(torch.equal(a[rows], b) for a, b in zip(whole, y_dx(rows), strict=True))


def test_bad_options():
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"clamp_value must not be negative, got -1\.0"):
        swiglu(x, clamp_value=-1.0)
    with pytest.raises(ValueError, match=r"approximate must be one of .*got 'none'"):
        geglu(x, approximate="none")
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., 2F\], got \[2, 7\]"):
        swiglu(x[:, :7])


@needs_native
def test_the_kernel_checks_by_itself():
    """No call from Python may read past a buffer, whichever way it takes."""
    x = torch.ones(2, 8)
    for bias, probs, kind, clamp_value in [
        (torch.ones(7), None, "swiglu", None),
        (torch.ones(8).half(), None, "swiglu", None),
        (None, torch.ones(3), "swiglu", None),
        (None, None, "relu", None),
        (None, None, "swiglu", -1.0),
    ]:
        with pytest.raises(ValueError):
            FORWARD(x, bias, probs, kind, clamp_value, 0.0, False)
    with pytest.raises(ValueError, match="dy must be like y"):
        BACKWARD(torch.ones(2, 3), x, None, None, "swiglu", None, 0.0)
    with pytest.raises(ValueError, match="x must be contiguous"):
        BACKWARD_INPLACE(torch.ones(8, 1), x.t(), None, None, "swiglu", None, 0.0)


def test_references_are_pytorch():
    x = torch.randn(3, 8)
    gate, up = x.chunk(2, -1)
    assert torch.equal(activation_ref("swiglu", x), torch.nn.functional.silu(gate) * up)
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    assert torch.equal(activation_ref("geglu", x), gelu(gate) * up)
    assert torch.equal(activation_ref("gelu", x), gelu(x))
    assert torch.equal(activation_ref("squared_relu", x), x.relu() ** 2)
    assert torch.equal(activation_ref("quick_geglu", x), gate * torch.sigmoid(1.702 * gate) * up)
