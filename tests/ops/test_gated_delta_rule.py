"""The recurrence of gated delta networks: `OpContract`, chunks of any size, segments and states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from accel.ops import gated_delta_rule, gated_delta_rule_ref
from tests.ops.contract import Inputs, OpContract, change_layout
from tests.ops.test_causal_conv1d import segments_of

HEADS, K, V = 3, 4, 5


def problem(
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    seed: int = 0,
    sizes: tuple[int, int, int] = (HEADS, K, V),
) -> list[Tensor]:
    """q, k, v, g, beta and the first state; keys of length 1, as Megatron makes them."""
    heads, keys, values = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    wide = torch.promote_types(dtype, torch.float32)
    q, k = (normalize(normal(batch, tokens, heads, keys), dim=-1).to(dtype) for _ in range(2))
    g = -torch.rand(batch, tokens, heads, generator=generator).to(wide)
    beta = torch.rand(batch, tokens, heads, generator=generator).to(dtype)
    first = normal(batch, heads, keys, values).to(wide)
    return [q, k, normal(batch, tokens, heads, values).to(dtype), g, beta, first]


def rule(*tensors, **options):
    *inputs, first = tensors
    return gated_delta_rule(*inputs, initial_state=first, **options)


def rule_ref(*tensors, **options):
    *inputs, first = tensors
    return gated_delta_rule_ref(*inputs, initial_state=first, **options)


class TestGatedDeltaRule(OpContract):
    op = staticmethod(rule)
    ref = staticmethod(rule_ref)
    # k k, its decay, times beta, in the solve and the product behind it.
    roundings = {torch.float32: 6}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        segments = segments_of(2, 5, 1, 15) if seed == 1 else None
        scale = 0.7 if seed == 2 else None
        options = {"segments": segments, "chunk_size": 8, "scale": scale}
        return Inputs(problem(2, 21, dtype, seed), options)

    def large_inputs(self) -> Inputs:
        return Inputs(problem(2, 300, torch.bfloat16, sizes=(8, 32, 32)))

    def opchecks(self):
        *tensors, first = problem(2, 21, torch.bfloat16)
        forward = torch.ops.accel.gated_delta_rule_fwd.default
        backward = torch.ops.accel.gated_delta_rule_bwd.default
        for segments in (None, segments_of(2, 10, 11)):
            call = (*tensors, segments, first, 0.5, 8)
            yield forward, call
            o, states = forward(*call)
            grads = torch.randn_like(o), torch.randn_like(states[0])
            yield backward, (*grads, *tensors, segments, states, 0.5, 8)

    @given(
        tokens=st.sampled_from([1, 7, 8, 9, 17]),
        chunk_size=st.sampled_from([1, 8, 100]),
        with_state=st.booleans(),
        layout=st.sampled_from(["contiguous", "transposed", "strided"]),
    )
    @settings(max_examples=40, deadline=None)
    def test_chunks_states_and_layouts(self, tokens, chunk_size, with_state, layout):
        *tensors, first = problem(2, tokens, torch.float32, chunk_size)
        laid_out = [change_layout(t, layout) for t in tensors]
        self.check(Inputs([*laid_out, first if with_state else None], {"chunk_size": chunk_size}))

    def test_a_token_that_forgets_all_and_one_that_writes_nothing(self):
        tensors = problem(1, 40, torch.float32)
        tensors[3][:, 9] = -500.0
        tensors[4][:, 11] = 0.0
        self.check(Inputs(tensors, {"chunk_size": 40}))


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_a_decay_of_0_forgets(chunk_size):
    tensors = problem(1, 11, torch.float64)
    tensors[3][:, 5] = -torch.inf
    found = rule(*tensors, chunk_size=chunk_size)
    expected = rule_ref(*tensors, chunk_size=chunk_size)
    torch.testing.assert_close(found, expected)
    leaves = [t.clone().requires_grad_() for t in tensors]
    y, state = rule(*leaves, chunk_size=chunk_size)
    for grad in torch.autograd.grad(y.sum() + state.sum(), leaves):
        assert grad.isfinite().all()


def test_segments_are_sequences():
    *tensors, _ = problem(1, 20, torch.float64)
    for lengths in ((8, 12), (3, 1, 16), (17, 3)):
        o, state = gated_delta_rule(*tensors, segments=segments_of(1, *lengths), chunk_size=8)
        parts = zip(*(t.split(lengths, dim=1) for t in tensors), strict=True)
        apart = [gated_delta_rule(*part) for part in parts]
        torch.testing.assert_close(o, torch.cat([out for out, _ in apart], dim=1))
        torch.testing.assert_close(state, apart[-1][1])


def test_a_sequence_in_two_parts():
    *tensors, first = problem(2, 20, torch.float64)
    o, state = gated_delta_rule(*tensors, initial_state=first, chunk_size=8)
    carried, parts = first, []
    for rows in (slice(0, 13), slice(13, 20)):
        part, carried = gated_delta_rule(*(t[:, rows] for t in tensors), initial_state=carried)
        parts.append(part)
    torch.testing.assert_close(o, torch.cat(parts, dim=1))
    torch.testing.assert_close(state, carried)


def test_no_tokens_leave_the_state():
    leaves = [t.requires_grad_() for t in problem(2, 0, torch.float32)]
    o, state = rule(*leaves)
    assert o.shape == (2, 0, HEADS, V)
    assert torch.equal(state, leaves[5])
    grads = torch.autograd.grad(state.sum() + o.sum(), leaves)
    assert bool((grads[5] == 1).all())


def test_only_the_state_is_differentiated():
    leaves = [t.requires_grad_() for t in problem(2, 20, torch.float64)]
    used = leaves[1:]
    grads = [
        torch.autograd.grad(op(*leaves, chunk_size=8)[1].sin().sum(), used)
        for op in (rule, rule_ref)
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(2, 6, HEADS)}, r"q must be \[B, S, H, K\] of a floating dtype, got"),
        ({"k": torch.randn(2, 6, HEADS, 9)}, r"k must have shape \[2, 6, 3, 4\], got"),
        ({"v": torch.randn(2, 5, HEADS, V)}, r"v must have shape \[2, 6, 3, V\], got"),
        ({"g": torch.rand(2, 6, 1)}, r"g must have shape \[2, 6, 3\], got \[2, 6, 1\]"),
        ({"beta": torch.rand(2, 6)}, r"beta must have shape \[2, 6, 3\], got \[2, 6\]"),
        ({"initial_state": torch.rand(2, HEADS, V, K)}, r"initial_state must have shape"),
        ({"beta": torch.rand(2, 6, HEADS, device="meta")}, "beta is on meta, the tokens are on"),
        ({"segments": torch.zeros(2, 6)}, r"integers of shape \[2, 6\], got .* torch.float32"),
        ({"chunk_size": 0}, "chunk_size must be >= 1, got 0"),
    ],
)
def test_bad_input(change, message):
    names = ("q", "k", "v", "g", "beta", "initial_state")
    call = dict(zip(names, problem(2, 6, torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**call)


def test_second_derivative_is_an_error():
    leaves = [t.requires_grad_() for t in problem(1, 4, torch.float32)]
    (dq,) = torch.autograd.grad(rule(*leaves)[0].sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule_bwd has no derivative"):
        dq.sum().backward()


def test_autocast_changes_nothing():
    """What is computed in fp32 stays so, in both directions."""
    tensors = [t.requires_grad_() for t in problem(2, 21, torch.float32)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = rule(*tensors, chunk_size=8)
            grads = torch.autograd.grad([o.sum() for o in out], tensors)
        results.append([*out, *grads])
    assert all(map(torch.equal, *results))
