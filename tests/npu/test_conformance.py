"""That the tests of this folder can fail: wrong calls are errors, missing kernels are seen."""

import pytest
import torch

from accel.ops import _dispatch, _npu
from accel.ops._launchers import kernels
from tests.npu import conformance, schemas

pytestmark = pytest.mark.skipif(schemas.missing() is not None, reason=str(schemas.missing()))


@pytest.fixture(autouse=True)
def npu_ops():
    conformance.define()


X, GAMMA = torch.ones(2, 8), torch.ones(8)
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attend(**changes):
    call = {"scale": 1.0, "atten_mask": MASK, "sparse_mode": 2} | changes
    q, k, v = (torch.ones(4, 1, 8) for _ in range(3))
    return torch.ops.npu.npu_fusion_attention(q, k, v, 2, "SBH", **call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.ops.npu.npu_rms_norm(X, GAMMA, eps=1e-5), "Unknown keyword argument 'eps'"),
        (lambda: torch.ops.npu.npu_rms_norm(X, 1e-5, GAMMA), "argument 'gamma'"),
        (lambda: torch.ops.npu.npu_rms_norm(X, GAMMA.half()), "x torch.float32 with gamma"),
        (lambda: torch.ops.npu.npu_rms_norm(GAMMA, GAMMA), "2 to 8 dimensions"),
        (lambda: torch.ops.npu.npu_swiglu(X.t()), "contiguous"),
        (lambda: torch.ops.npu.npu_swiglu(X[:0]), "not empty"),
        (lambda: attend(sparse_mode=3.0), "argument 'sparse_mode'"),
        (lambda: attend(atten_mask=MASK.float()), "mask torch.float32"),
        (lambda: attend(atten_mask=MASK[:4, :4]), r"mask torch.Size\(\[4, 4\]\)"),
        (lambda: attend(atten_mask=~MASK), "above the diagonal"),
        (lambda: attend(atten_mask=None), "sparse_mode 2 without a mask"),
        (lambda: attend(actual_seq_qlen=[4]), "lengths go with TND"),
        (lambda: attend(keep_prob=0.9), "keep_prob=0.9"),
        (
            lambda: torch.ops.npu.npu_rotary_mul(torch.ones(2, 1, 1, 8), *[torch.ones(2, 8)] * 2),
            "cos and sin",
        ),
    ],
)
def test_wrong_calls_are_errors(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


def test_what_torch_npu_does_not_have():
    with pytest.raises(KeyError):
        schemas.schema_of("npu_rms_norm_of_tomorrow")
    with pytest.raises(AttributeError):
        torch.ops.npu.npu_ops_without_a_reference  # noqa: B018
    assert not schemas.has_kernel(torch.ops.aten.linalg_eig.default)
    assert schemas.has_kernel(torch.ops.aten.mm.default)
    assert schemas.has_kernel(torch.ops.aten.index_add_.default)
    assert not schemas.has_kernel(torch.ops.aten._linalg_det.default)


def test_the_wheel_goes_with_this_torch():
    assert schemas.version().split(".")[:2] == torch.__version__.split(".")[:2]


def test_every_op_that_has_a_cuda_kernel_has_one_here():

    assert set(kernels("accel._triton")) <= set(kernels(_npu.PACKAGE))


def test_without_torch_npu_there_is_a_reason():
    """In a process of its own it would be the same: torch_npu is not installed beside the tests."""
    _npu.reason.cache_clear()
    _dispatch.forget()
    try:
        assert "torch_npu cannot be imported" in _dispatch.missing_kernel("accel::rope", "npu")
    finally:
        _npu.reason.cache_clear()
        _dispatch.forget()
