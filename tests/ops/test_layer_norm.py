"""LayerNorm: see `NormContract` and `OpContract`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import layer_norm, layer_norm_ref
from accel.ops.layer_norm import unsupported_reason
from tests.ops.contract import laid_out, needs_native
from tests.ops.norm_contract import DTYPES, NormContract


class TestLayerNorm(NormContract):
    op = staticmethod(layer_norm)
    ref = staticmethod(layer_norm_ref)
    unsupported_reason = staticmethod(unsupported_reason)
    num_vectors = 2

    def opchecks(self):
        leaves = [t.requires_grad_() for t in self.norm_inputs((3, 5, 24), DTYPES[2]).tensors]
        fwd, bwd = torch.ops.accel.layer_norm_fwd.default, torch.ops.accel.layer_norm_bwd.default
        yield fwd, (*leaves, 1e-5, True)
        x, weight, bias = (t.detach() for t in leaves)
        yield bwd, (torch.randn_like(x), x, weight, *fwd(x, weight, bias, 1e-5, True)[1:], True)


@needs_native
@settings(deadline=None, max_examples=100)
@given(x=laid_out(), dtypes=st.sampled_from(DTYPES), zero_centered=st.booleans())
def test_matches_reference_for_any_layout(x, dtypes, zero_centered):
    case = TestLayerNorm()
    case.check(case.with_vectors(x.to(dtypes[0]), dtypes[1], zero_centered))


def test_reference_is_pytorch():
    x, weight, bias = TestLayerNorm().norm_inputs((8, 48), DTYPES[1]).tensors
    want = torch.nn.functional.layer_norm(x, (48,), weight, bias, eps=1e-6)
    assert torch.equal(layer_norm_ref(x, weight, bias, 1e-6), want)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.ones(2, 8), torch.ones(9), r"bias must have shape \[8\], .* got \[9\]"),
        (torch.ones(2, 8).half(), torch.ones(8).half(), "bias must be torch.float32 like weight"),
    ],
)
def test_rejects_bias(x, bias, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(x, torch.ones(8), bias)
