"""`accel.ops.l2_norm` and `scale`: one call over lists of any length and any shapes."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.log import log_once
from accel.ops import l2_norm, l2_norm_ref, scale, scale_ref
from tests.ops.contract import Inputs, OpContract, needs_native

SHAPES = st.lists(st.sampled_from([(), (0,), (1,), (5, 7), (2, 0), (31,), (1025,)]), max_size=6)


def drawn(shapes, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


class TestL2Norm(OpContract):
    op = staticmethod(lambda *tensors: l2_norm(tensors))
    ref = staticmethod(lambda *tensors: l2_norm_ref(tensors))

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        tensors = drawn([(7, 43), (), (0,), (33,), (20000,)], dtype, seed)
        return Inputs(tensors, constants=range(len(tensors)))

    def large_inputs(self) -> Inputs:
        tensors = drawn([(300, 333), (5,), (70001,)], torch.bfloat16)
        return Inputs(tensors, constants=range(len(tensors)))

    def opchecks(self):
        yield torch.ops.accel.l2_norm.default, ([torch.rand(5), torch.rand(3, 2)],)

    test_gradients_accumulate_over_micro_batches = None  # there are none


class TestScale(OpContract):
    @staticmethod
    def op(*tensors: Tensor) -> list[Tensor]:
        targets = [t.clone() for t in tensors]
        scale(tensors, targets, 0.37)
        return targets

    @staticmethod
    def ref(*tensors: Tensor) -> list[Tensor]:
        targets = [t.clone() for t in tensors]
        scale_ref(tensors, targets, 0.37)
        return targets

    inputs = TestL2Norm.inputs
    large_inputs = TestL2Norm.large_inputs

    def opchecks(self):
        yield torch.ops.accel.scale_.default, ([torch.rand(5)], [torch.rand(5)], 0.5)

    test_gradients_accumulate_over_micro_batches = None  # there are none


@needs_native
@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, dtype=st.sampled_from(OpContract.dtypes), seed=st.integers(0, 99))
@example(
    shapes=[(1025,)], dtype=torch.float32, seed=49
)  # lanes summed in fp32: two roundings too far
def test_norm_of_any_shapes(shapes, dtype, seed):
    tensors = drawn(shapes, dtype, seed)
    norm = l2_norm(tensors)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    if tensors:
        TestL2Norm().check(Inputs(tensors, constants=range(len(tensors))))
    else:
        assert norm == 0


@needs_native
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", OpContract.dtypes)
def test_one_bad_element_shows_in_the_norm(bad, dtype):
    for where in (0, 16383, 16384, 40002):
        tensors = [torch.ones(7, dtype=dtype), torch.ones(40003, dtype=dtype)]
        tensors[1][where] = bad
        assert not l2_norm(tensors).isfinite()


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES,
    target=st.sampled_from(OpContract.dtypes),
    factor=st.sampled_from([1.0, 0.37, 0.0, 1e10]),
    aliased=st.booleans(),
)
def test_scale_of_fp32_is_torchs_bit_for_bit(shapes, target, factor, aliased):
    sources = drawn(shapes, torch.float32)
    want = [torch.empty(s.shape, dtype=target) for s in sources]
    scale_ref(sources, want, factor)
    if aliased and target == torch.float32:
        targets = sources = [s.clone() for s in sources]
    else:
        targets = [torch.empty(s.shape, dtype=target) for s in sources]
    versions = [t._version for t in targets]
    scale(sources, targets, factor)
    assert all(torch.equal(a, b) for a, b in zip(targets, want, strict=True))
    assert [t._version for t in targets] == [v + 1 for v in versions]


@needs_native
def test_norm_of_several_dtypes(caplog):
    log_once.cache_clear()
    tensors = [t for dtype in OpContract.dtypes for t in drawn([(1025,), (7, 3)], dtype)]
    norm = l2_norm(tensors[::-1])
    exact = torch.cat([t.double().flatten() for t in tensors]).norm()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    assert "l2_norm" not in caplog.text


@needs_native
def test_what_the_kernels_cannot_take_runs_on_torch_and_says_so(caplog):
    log_once.cache_clear()
    assert l2_norm([torch.ones(4, dtype=torch.float64)]) == 2
    assert "l2_norm: using plain PyTorch: dtypes" in caplog.text
    strided = torch.ones(8)[::2]
    scale([strided], [strided], 0.5)
    assert strided.tolist() == [0.5] * 4
    assert "scale: using plain PyTorch: a tensor that is not contiguous" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: l2_norm([torch.ones(2, dtype=torch.int32)]),
            r"l2_norm: tensors\[0\] must be float",
        ),
        (
            lambda: l2_norm([torch.ones(2), torch.ones(2, device="meta")]),
            r"tensors\[1\] .* on meta",
        ),
        (lambda: l2_norm([torch.ones(2, requires_grad=True)]), r"tensors\[0\] requires a gradient"),
        (lambda: scale([torch.ones(2)], [], 1.0), r"scale: targets must have the shapes"),
        (lambda: scale([torch.ones(2)], [torch.ones(3)], 1.0), r"\[\[2\]\], got \[\[3\]\]"),
        (lambda: scale([torch.ones(2)], [torch.ones(2, device="meta")], 1.0), "must be on cpu"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@needs_native
def test_the_kernels_check_again():
    ops = torch.ops.accel
    for call in (
        lambda: ops.l2_norm([torch.ones(2), torch.ones(2).bfloat16()]),
        lambda: ops.l2_norm([torch.ones(4)[::2]]),
        lambda: ops.l2_norm([torch.ones(4, dtype=torch.float64)]),
        lambda: ops.scale_([torch.ones(2)], [torch.ones(3)], 1.0),
        lambda: ops.scale_([torch.ones(2)], [], 1.0),
        lambda: ops.scale_([torch.ones(2)], [torch.ones(2, dtype=torch.int32)], 1.0),
    ):
        with pytest.raises(ValueError):
            call()
