"""RMSNorm: see `NormContract` and `OpContract`."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import rms_norm, rms_norm_ref
from accel.ops.rms_norm import unsupported_reason
from tests.ops.contract import laid_out, needs_native
from tests.ops.norm_contract import DTYPES, NormContract


class TestRmsNorm(NormContract):
    op = staticmethod(rms_norm)
    ref = staticmethod(rms_norm_ref)
    unsupported_reason = staticmethod(unsupported_reason)
    num_vectors = 1

    def opchecks(self):
        x, weight = (t.requires_grad_() for t in self.norm_inputs((3, 5, 24), DTYPES[2]).tensors)
        fwd, bwd = torch.ops.accel.rms_norm_fwd.default, torch.ops.accel.rms_norm_bwd.default
        yield fwd, (x, weight, 1e-5, True)
        x, weight = x.detach(), weight.detach()
        yield bwd, (torch.randn_like(x), x, weight, fwd(x, weight, 1e-5, True)[1], True)


@needs_native
@settings(deadline=None, max_examples=100)
@given(x=laid_out(), dtypes=st.sampled_from(DTYPES), zero_centered=st.booleans())
def test_matches_reference_for_any_layout(x, dtypes, zero_centered):
    case = TestRmsNorm()
    case.check(case.with_vectors(x.to(dtypes[0]), dtypes[1], zero_centered))


def test_reference_is_pytorch():
    x, weight = TestRmsNorm().norm_inputs((8, 48), DTYPES[1]).tensors
    want = torch.nn.functional.rms_norm(x, (48,), weight, eps=1e-6)
    assert torch.equal(rms_norm_ref(x, weight, 1e-6), want)
