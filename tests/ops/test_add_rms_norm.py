"""Residual addition with RMSNorm: see `OpContract`; beyond that, the bits of the two steps."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.log import log_once
from accel.ops import add_rms_norm, add_rms_norm_ref, rms_norm
from accel.ops.add_rms_norm import unsupported_reason
from tests.ops.contract import LAYOUTS, Inputs, OpContract, change_layout, needs_native, run
from tests.ops.norm_contract import DTYPES, SHAPES


def fused(x, residual, weight, bias=None, **options):
    return add_rms_norm(x, residual, weight, bias=bias, **options)


def reference(x, residual, weight, bias=None, **options):
    return add_rms_norm_ref(x, residual, weight, bias=bias, **options)


def two_steps(x, residual, weight, bias=None, **options):
    """What `fused` must equal: Megatron's order of additions, then our norm."""
    total = residual + (x if bias is None else x + bias)
    return rms_norm(total, weight, **options), total


def draw(
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    seed: int = 0,
    with_bias: bool = True,
    zero_centered: bool = False,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, *shape, generator=generator).to(dtypes[0]).unbind(0)
    weight, bias = torch.randn(2, shape[-1], generator=generator) * 0.5 + 0.5
    bias = bias.to(dtypes[0]) if with_bias else None
    return Inputs(
        [x.clone(), residual.clone(), weight.to(dtypes[1]), bias],
        {"zero_centered": zero_centered},
    )


def assert_same_bits(inputs: Inputs) -> None:
    got, want = run(fused, inputs), run(two_steps, inputs)
    for a, b in zip((*got[0], *got[1].values()), (*want[0], *want[1].values()), strict=True):
        assert torch.equal(a, b)


class TestAddRmsNorm(OpContract):
    op = staticmethod(fused)
    ref = staticmethod(reference)
    # fp32 computes in the dtype of its result: two sums, then the norm's 8 (see `NormContract`).
    roundings = {torch.float32: 10}

    def check(self, inputs):
        super().check(inputs)
        assert_same_bits(inputs)

    def inputs(self, dtype, seed=0):
        options = {"with_bias": seed % 3 != 1, "zero_centered": seed % 2 == 1}
        return draw((6, 3, 43), (dtype, dtype), seed=seed, **options)

    def large_inputs(self):
        return draw((1025, 264), DTYPES[1])

    def test_gradients_accumulate_over_micro_batches(self, monkeypatch):
        """PyTorch gives both sides of an addition the same gradient tensor; views of leaves, as the
        contract hands them, then accumulate into it twice. torch's own `+` does that too."""
        monkeypatch.setattr(
            type(self),
            "op",
            staticmethod(
                lambda x, residual, *args, **options: fused(x * 1, residual * 1, *args, **options)
            ),
        )
        super().test_gradients_accumulate_over_micro_batches()

    def opchecks(self):
        x, residual, weight, bias = draw((3, 5, 24), DTYPES[2]).tensors
        forward = torch.ops.accel.add_rms_norm_fwd.default
        backward = torch.ops.accel.add_rms_norm_bwd.default
        leaves = [t.clone().requires_grad_() for t in (x, residual, bias, weight)]
        yield forward, (*leaves, 1e-5, True)
        yield forward, (x, residual, None, weight, 1e-5, False)
        _, total, rstd = forward(x, residual, bias, weight, 1e-5, True)
        for dtotal in (None, torch.randn_like(x)):
            yield backward, (torch.randn_like(x), dtotal, total, weight, rstd, True)


@needs_native
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_the_two_steps(shape, dtypes, with_bias):
    for zero_centered in (False, True):
        assert_same_bits(draw(shape, dtypes, with_bias=with_bias, zero_centered=zero_centered))


@needs_native
@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 7, 17, 32, 67]), min_size=1, max_size=3),
    dtypes=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
)
def test_bits_for_any_shape_and_layout(shape, dtypes, layouts):
    inputs = draw(tuple(shape), dtypes)
    x, residual, *rest = inputs.tensors
    x, residual = (change_layout(t, way) for t, way in zip((x, residual), layouts, strict=True))
    assert_same_bits(inputs._replace(tensors=[x, residual, *rest]))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_past_the_caches(dtype):
    """Outputs of 16 MiB and more are streamed."""
    assert_same_bits(draw((2056, 4096), (dtype, dtype)))


@needs_native
@pytest.mark.parametrize("used", [[0], [1]], ids=["norm", "total"])
def test_one_output_used(used):
    def some(op):
        return lambda *args, **options: [op(*args, **options)[i] for i in used]

    inputs = draw((5, 24), DTYPES[1])
    wanted = [0, 1, 3] if used == [1] else [0, 1, 2, 3]
    (_, got), (_, want) = run(some(fused), inputs, wanted), run(some(two_steps), inputs, wanted)
    for p in wanted:
        assert torch.equal(got[p], want[p])


@needs_native
def test_nan_and_inf_stay_visible():
    for dtypes in DTYPES:
        inputs = draw((2, 19), dtypes)
        for bad in (torch.nan, torch.inf):
            inputs.tensors[0][1, 7] = bad
            for a, b in zip(fused(*inputs.tensors), reference(*inputs.tensors), strict=True):
                assert torch.equal(a.isnan(), b.isnan())


@needs_native
def test_second_derivative_is_an_error():
    x, *others = draw((2, 8), DTYPES[0]).tensors
    x.requires_grad_()
    (dx,) = torch.autograd.grad(fused(x, *others)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_bwd"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 8, dtype=torch.int64)}, "floating dtype, got torch.int64"),
        ({"residual": torch.ones(2, 7)}, r"residual must be like x.* \[2, 8\] .* \[2, 7\]"),
        ({"residual": torch.ones(2, 8).half()}, "residual must be like x.* got torch.float16"),
        ({"residual": torch.ones(8)}, r"residual must be like x.* got .* \[8\]"),
        ({"weight": torch.ones(7)}, r"weight must have shape \[8\]"),
        ({"bias": torch.ones(7)}, r"bias must have shape \[8\]"),
        (
            {
                "x": torch.ones(2, 8).half(),
                "residual": torch.ones(2, 8).half(),
                "bias": torch.ones(8),
            },
            "bias must be torch.float16 like x, got torch.float32",
        ),
    ],
)
def test_rejects(change, message):
    call = {"x": torch.ones(2, 8), "residual": torch.ones(2, 8), "weight": torch.ones(8)} | change
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**call)


@needs_native
def test_the_kernel_checks_again():
    x, weight = torch.ones(2, 8), torch.ones(8)
    for residual, bias in ((torch.ones(2, 7), None), (x, torch.ones(7)), (x.half(), None)):
        with pytest.raises(ValueError, match="add_rms_norm: "):
            torch.ops.accel.add_rms_norm_fwd(x, residual, bias, weight, 1e-5, False)
    with pytest.raises(ValueError, match="dtotal must be"):
        torch.ops.accel.add_rms_norm_bwd(x, torch.ones(1, 8), x, weight, torch.ones(2), False)


def test_unsupported_dtype_falls_back_and_says_so_once(caplog):
    inputs = draw((4, 8), (torch.float64, torch.float64))
    reason = unsupported_reason(*inputs.tensors[:3])
    assert "float64" in reason
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            results = zip(fused(*inputs.tensors), reference(*inputs.tensors), strict=True)
            assert all(torch.equal(a, b) for a, b in results)
    assert [r.message for r in caplog.records] == [f"add_rms_norm: using plain PyTorch: {reason}"]


def test_reference_adds_in_megatrons_order():
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused

    x, residual, weight, bias = draw((64, 48), DTYPES[1]).tensors
    for b in (bias, None):
        want: Tensor = bias_dropout_add_unfused(True)((x, b), residual, 0.0)
        assert torch.equal(reference(x, residual, weight, b)[1], want)
