"""The short convolution of a state-space layer: `OpContract`, pieces, segments, and tokens one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import causal_conv1d, causal_conv1d_ref
from accel.ops.causal_conv1d import TOKENS, causal_conv1d_step
from tests.ops.contract import Inputs, OpContract, change_layout


def problem(
    shape: tuple[int, int, int], taps: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape, (shape[2], taps), (shape[2],))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def segments_of(batch: int, *lengths: int) -> torch.Tensor:
    """The same lengths in each sequence of the batch, `[batch, sum(lengths)]`."""
    ids = torch.arange(len(lengths), dtype=torch.int32)
    return ids.repeat_interleave(torch.tensor(lengths)).expand(batch, -1)


class TestCausalConv1d(OpContract):
    op = staticmethod(causal_conv1d)
    ref = staticmethod(causal_conv1d_ref)
    # K products are summed.
    roundings = {torch.float32: 4}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        options = {"segments": segments_of(2, 5, 1, 13), "silu": seed != 1}
        return Inputs(problem((2, 19, 6), 4, dtype, seed), options)

    def large_inputs(self) -> Inputs:
        return Inputs(problem((2, 2 * TOKENS + 5, 64), 4, torch.bfloat16))

    def opchecks(self):
        x, weight, bias = problem((2, 19, 6), 4, torch.bfloat16)
        for segments in (None, segments_of(2, 10, 9)):
            call = (x, weight, bias, segments, True)
            yield torch.ops.accel.causal_conv1d_fwd.default, call
            yield torch.ops.accel.causal_conv1d_bwd.default, (torch.randn_like(x), *call)

    @given(
        tokens=st.sampled_from([1, 2, 3, 17]),
        taps=st.integers(1, 5),
        bias=st.booleans(),
        layout=st.sampled_from(["contiguous", "transposed", "strided", "expanded"]),
    )
    @settings(max_examples=40, deadline=None)
    def test_shapes_and_layouts(self, tokens, taps, bias, layout):
        x, weight, shift = problem((2, tokens, 5), taps, torch.float32, taps)
        self.check(Inputs([change_layout(x, layout), weight, shift if bias else None]))

    @pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS, TOKENS + 1, 2 * TOKENS + 2])
    def test_pieces_meet(self, tokens):
        cut = TOKENS - 2  # a segment that begins just before a piece ends
        for segments in (None, segments_of(1, cut, tokens - cut)):
            tensors = problem((1, tokens, 3), 4, torch.float32)
            self.check(Inputs(tensors, {"segments": segments}))

    @pytest.mark.parametrize("silu", [False, True])
    @pytest.mark.parametrize("bad", [torch.inf, torch.nan])
    def test_what_is_not_finite_stays_in_its_segment(self, bad, silu):
        x, weight, bias = problem((1, 12, 3), 4, torch.float32)
        options = {"segments": segments_of(1, 5, 7), "silu": silu}
        last_is_bad, dy = x.clone(), torch.ones(1, 12, 3)
        last_is_bad[0, 4] = dy[0, 5] = bad
        y = causal_conv1d(last_is_bad, weight, bias, **options)
        assert torch.equal(y[:, 5:], causal_conv1d(x, weight, bias, **options)[:, 5:])
        assert not y[:, 4].isfinite().all()
        leaf = x.requires_grad_()
        (dx,) = torch.autograd.grad(causal_conv1d(leaf, weight, bias, **options), leaf, dy)
        assert dx[:, :5].isfinite().all()
        assert not dx[:, 5].isfinite().all()

    def test_taps_see_no_other_segment(self):
        x, weight, bias = problem((1, 12, 3), 4, torch.float64)
        packed = causal_conv1d(x, weight, bias, segments=segments_of(1, 5, 7))
        apart = [causal_conv1d(part, weight, bias) for part in x.split([5, 7], dim=1)]
        torch.testing.assert_close(packed, torch.cat(apart, dim=1))


@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 3, 4)])
def test_nothing_in_nothing_out(shape):
    leaves = [t.requires_grad_() for t in problem(shape, 4, torch.float32)]
    y = causal_conv1d(*leaves)
    assert y.shape == shape
    grads = torch.autograd.grad(y.sum(), leaves)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("width", [3, 4, 6])
@pytest.mark.parametrize("at_once", [1, 3])
def test_tokens_one_by_one(width, at_once):
    x, weight, bias = problem((3, 9, 4), 4, torch.float64)
    state = torch.zeros(3, 4, width, dtype=torch.float64)
    rows = [causal_conv1d_step(part, state, weight, bias) for part in x.split(at_once, dim=1)]
    torch.testing.assert_close(torch.cat(rows, dim=1), causal_conv1d(x, weight, bias))
    assert torch.equal(state, x[:, -width:].transpose(1, 2))


def test_slots_padding_and_the_states_on_the_way():
    x, weight, bias = problem((3, 2, 4), 4, torch.float32)
    state = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(1))
    before, after = state.clone(), torch.zeros(5, 2, 4, 4)
    slots = torch.tensor([4, -1, 0], dtype=torch.int32)
    y = causal_conv1d_step(x, state, weight, bias, slots=slots, states_after=after)
    assert not y[1].any()
    assert torch.equal(state[1:4], before[1:4])
    for sequence, slot in ((0, 4), (2, 0)):
        seen = torch.cat([before[slot], x[sequence].T], dim=1)
        assert torch.equal(state[slot], seen[:, 2:])
        assert torch.equal(after[slot, 0], seen[:, 1:5])
        assert torch.equal(after[slot, 1], state[slot])
        own = before[slot : slot + 1].clone()
        alone = causal_conv1d_step(x[sequence : sequence + 1], own, weight, bias)
        assert torch.equal(y[sequence], alone[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 3)}, r"x must be \[B, S, C\] of a floating dtype, got \[2, 3\]"),
        ({"x": torch.ones(2, 3, 4, dtype=torch.int64)}, "torch.int64"),
        ({"weight": torch.randn(5, 4)}, r"weight must have shape \[4, K\] .* got \[5, 4\]"),
        ({"weight": torch.randn(4, 0)}, r"K >= 1, got \[4, 0\]"),
        ({"bias": torch.randn(3)}, r"bias must have shape \[4\], got \[3\]"),
        ({"bias": torch.randn(4, device="meta")}, "bias is on meta, x on cpu"),
        (
            {"segments": torch.zeros(2, 3)},
            r"integers of shape \[2, 3\], got \[2, 3\] torch.float32",
        ),
        ({"segments": torch.zeros(3, dtype=torch.int32)}, r"got \[3\] torch.int32"),
    ],
)
def test_bad_input(change, message):
    call = {"x": torch.randn(2, 3, 4), "weight": torch.randn(4, 4), **change}
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**call)


def test_a_state_too_narrow_for_the_taps():
    x, weight, bias = problem((1, 1, 4), 4, torch.float32)
    with pytest.raises(ValueError, match=r"W >= 3, got \[1, 4, 2\]"):
        causal_conv1d_step(x, torch.zeros(1, 4, 2), weight, bias)
