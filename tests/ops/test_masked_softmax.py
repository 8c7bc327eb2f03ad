"""Masked softmax: see `OpContract`. Here: broadcast masks, layouts, rows that see nothing, bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import masked_softmax, masked_softmax_ref
from accel.ops.masked_softmax import unsupported_reason
from tests.ops.contract import LAYOUTS, Inputs, OpContract, change_layout, needs_native


class TestMaskedSoftmax(OpContract):
    op = staticmethod(masked_softmax)
    ref = staticmethod(masked_softmax_ref)
    # fp32 computes in the dtype of its result: scale, exponent, sum, quotient. dx is made of the
    # probabilities as they were rounded.
    roundings = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(2, 3, 37, 53, generator=generator) * 3).to(dtype)
        mask = torch.rand(2, 1, 37, 53, generator=generator) > 0.7
        mask[0, 0, 5] = True
        return Inputs([x, mask], {"scale": 0.5})

    def large_inputs(self) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 4, 300, 300, generator=generator).bfloat16()
        return Inputs([x, None], {"causal": True})

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """dx = scale p (dp - dot): the terms that cancel are as large as dp, a standard normal."""
        return {"gradient 0": 3 * inputs.options.get("scale", 1.0)}

    def opchecks(self):
        x, mask = self.inputs(torch.bfloat16).tensors
        fwd, bwd = (
            torch.ops.accel.masked_softmax_fwd.default,
            torch.ops.accel.masked_softmax_bwd.default,
        )
        yield fwd, (x.requires_grad_(), mask, 0.5, False)
        probs = fwd(x.detach(), mask, 0.5, False)
        yield bwd, (torch.randn_like(probs), probs, mask, 0.5, False)


CASE = TestMaskedSoftmax()


@needs_native
@settings(deadline=None, max_examples=100)
@given(
    shape=st.tuples(*[st.sampled_from(s) for s in ((0, 1, 2), (1, 3), (0, 1, 5), (1, 16, 31, 67))]),
    kept=st.tuples(*[st.booleans()] * 4),
    kind=st.sampled_from(["mask", "none", "causal"]),
    dtype=st.sampled_from(CASE.dtypes),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_shape_mask_and_layout(shape, kept, kind, dtype, layout):
    generator = torch.Generator().manual_seed(1)
    if kind == "causal":
        shape = (*shape[:2], shape[3], shape[3])
    x = change_layout(torch.randn(shape, generator=generator).to(dtype), layout)
    mask = None
    if kind == "mask":
        mask_shape = [n if k else 1 for n, k in zip(shape, kept, strict=True)]
        mask = torch.rand(mask_shape, generator=generator) > 0.5
    CASE.check(Inputs([x, mask], {"scale": 0.7, "causal": kind == "causal"}))


@needs_native
def test_a_query_that_sees_nothing_spreads_evenly_and_has_no_gradient():
    x = torch.randn(1, 1, 2, 8, requires_grad=True)
    mask = torch.tensor([[True] * 8, [False] * 8])
    probs = masked_softmax(x, mask)
    assert torch.equal(probs[0, 0, 0], torch.full((8,), 1 / 8))
    (dx,) = torch.autograd.grad(probs[..., 0].sum(), x)
    assert not dx[0, 0, 0].any()
    assert dx[0, 0, 1].any()


@needs_native
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_stay_visible(bad):
    x, mask = CASE.inputs(torch.bfloat16).tensors
    x[1, 2, 3, 4], mask[1, 0, 3, 4] = bad, False
    got, want = masked_softmax(x, mask), masked_softmax_ref(x, mask)
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())


@needs_native
def test_second_derivative_is_an_error():
    x = torch.randn(1, 1, 3, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(masked_softmax(x)[..., 0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="masked_softmax_bwd has no derivative"):
        dx.sum().backward()


X = torch.ones(2, 3, 5, 5)


@pytest.mark.parametrize(
    ("x", "mask", "causal", "message"),
    [
        (
            torch.ones(3, 5, 5),
            None,
            False,
            r"x must be floating, \[B, H, Q, K\], got .*\[3, 5, 5\]",
        ),
        (X.int(), None, False, "x must be floating"),
        (X, torch.ones(5, 5), False, "mask must be bool .* got torch.float32"),
        (X, torch.ones(4, 5).bool(), False, r"broadcastable to \[2, 3, 5, 5\], got .*\[4, 5\]"),
        (X, torch.ones(1, 2, 3, 5, 5).bool(), False, "broadcastable"),
        (X, torch.ones(5, 5, device="meta").bool(), False, "mask must be on cpu .* got meta"),
        (X, torch.ones(5, 5).bool(), True, "causal takes no mask"),
        (X[:, :, :4], None, True, "as many queries as keys"),
    ],
)
def test_rejects(x, mask, causal, message):
    with pytest.raises(ValueError, match=message):
        masked_softmax(x, mask, causal=causal)


def test_unsupported_dtype_takes_the_reference():
    assert "float64" in unsupported_reason(X.double())
    assert torch.equal(masked_softmax(X.double()), masked_softmax_ref(X.double()))
