"""The scan of Mamba-2: `OpContract`, chunks of any size, segments, states, and tokens one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.ops import state_space_scan, state_space_scan_ref
from accel.ops.state_space_scan import state_space_step
from tests.ops.contract import Inputs, OpContract, change_layout
from tests.ops.test_causal_conv1d import segments_of

HEADS, COLUMNS, GROUPS, STATE = 4, 5, 2, 3


def problem(
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    sizes: tuple[int, int, int, int] = (HEADS, COLUMNS, GROUPS, STATE),
) -> list[Tensor]:
    """x, dt, a, b, c, d, z and the first state; steps and decays as Megatron's first weights have them."""
    heads, columns, groups, state = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    wide = torch.promote_types(dtype, torch.float32)
    dt = torch.rand(batch, tokens, heads, generator=generator).to(wide) * 0.2
    a = -1 - 15 * torch.rand(heads, generator=generator).to(wide)
    x, z = normal(batch, tokens, heads, columns), normal(batch, tokens, heads, columns)
    b, c = normal(batch, tokens, groups, state), normal(batch, tokens, groups, state)
    first = normal(batch, heads, columns, state).to(wide)
    return [x, dt, a, b, c, normal(heads), z, first]


def scan(x, dt, a, b, c, d, z, first, **options):
    return state_space_scan(x, dt, a, b, c, d, z, initial_state=first, **options)


def scan_ref(x, dt, a, b, c, d, z, first, **options):
    return state_space_scan_ref(x, dt, a, b, c, d, z, initial_state=first, **options)


class TestStateSpaceScan(OpContract):
    op = staticmethod(scan)
    ref = staticmethod(scan_ref)
    # c b, its decay, times u, summed with what the state gives.
    roundings = {torch.float32: 4}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        segments = segments_of(2, 5, 1, 15) if seed == 1 else None
        return Inputs(problem(2, 21, dtype, seed), {"segments": segments, "chunk_size": 8})

    def large_inputs(self) -> Inputs:
        return Inputs(problem(2, 300, torch.bfloat16, sizes=(8, 32, 2, 32)))

    def opchecks(self):
        *tensors, first = problem(2, 21, torch.bfloat16)
        forward = torch.ops.accel.state_space_scan_fwd.default
        backward = torch.ops.accel.state_space_scan_bwd.default
        for segments in (None, segments_of(2, 10, 11)):
            call = (*tensors, segments, first, 8)
            yield forward, call
            y, states = forward(*call)
            dy, dstate = torch.randn_like(y), torch.randn_like(states[0])
            yield backward, (dy, dstate, *tensors, segments, states, 8)

    @given(
        tokens=st.sampled_from([1, 7, 8, 9, 17]),
        chunk_size=st.sampled_from([1, 8, 100]),
        parts=st.sets(st.sampled_from([5, 6, 7])),
        layout=st.sampled_from(["contiguous", "transposed", "strided"]),
    )
    @settings(max_examples=40, deadline=None)
    def test_chunks_parts_and_layouts(self, tokens, chunk_size, parts, layout):
        tensors = problem(2, tokens, torch.float32, chunk_size)
        given_ = [
            None if i in parts else change_layout(t, layout) if i not in (2, 5) else t
            for i, t in enumerate(tensors)
        ]
        self.check(Inputs(given_, {"chunk_size": chunk_size}))

    def test_one_value_of_d_per_column(self):
        tensors = problem(2, 21, torch.float32)
        tensors[5] = torch.randn(HEADS, COLUMNS)
        self.check(Inputs(tensors, {"chunk_size": 8}))

    def test_large_steps_neither_overflow_nor_vanish(self):
        """exp(s[i] - s[j]) above the diagonal would be infinite."""
        tensors = problem(1, 40, torch.float32)
        tensors[1] = tensors[1] * 500
        self.check(Inputs(tensors, {"chunk_size": 40}))


def test_no_tokens_leave_the_state():
    leaves = [t.requires_grad_() for t in problem(2, 0, torch.float32)]
    y, state = scan(*leaves)
    assert y.shape == (2, 0, HEADS, COLUMNS)
    assert torch.equal(state, leaves[7])
    grads = torch.autograd.grad(state.sum() + y.sum(), leaves)
    assert bool((grads[7] == 1).all())
    assert not any(grad.any() for grad in grads[:7])


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_a_decay_of_0_forgets(chunk_size):
    tensors = problem(1, 11, torch.float32)
    # dt a is -inf, or so far from 0 that sums forget the rest
    tensors[0][:, 5], tensors[1][:, 5] = 0, 3e38
    found = scan(*tensors, chunk_size=chunk_size)
    torch.testing.assert_close(found, scan_ref(*tensors, chunk_size=chunk_size))


def test_segments_are_sequences():
    *tensors, _ = problem(1, 20, torch.float64)
    x, dt, a, b, c, d, z = tensors
    for lengths in ((8, 12), (3, 1, 16), (17, 3)):
        y, state = state_space_scan(*tensors, segments=segments_of(1, *lengths), chunk_size=8)
        parts = [t.split(lengths, dim=1) for t in (x, dt, b, c, z)]
        apart = [
            state_space_scan(x_, dt_, a, b_, c_, d, z_)
            for x_, dt_, b_, c_, z_ in zip(*parts, strict=True)
        ]
        torch.testing.assert_close(y, torch.cat([out for out, _ in apart], dim=1))
        torch.testing.assert_close(state, apart[-1][1])


def test_a_sequence_in_two_parts():
    *tensors, first = problem(2, 20, torch.float64)
    y, state = state_space_scan(*tensors, initial_state=first, chunk_size=8)
    x, dt, a, b, c, d, z = tensors
    carried, parts = first, []
    for rows in (slice(0, 13), slice(13, 20)):
        part, carried = state_space_scan(
            x[:, rows], dt[:, rows], a, b[:, rows], c[:, rows], d, z[:, rows], initial_state=carried
        )
        parts.append(part)
    torch.testing.assert_close(y, torch.cat(parts, dim=1))
    torch.testing.assert_close(state, carried)


def test_only_the_state_is_differentiated():
    tensors = [t.requires_grad_() for t in problem(2, 20, torch.float64)]
    used = [tensors[i] for i in (0, 1, 2, 3, 7)]
    grads = [
        torch.autograd.grad(op(*tensors, chunk_size=8)[1].sin().sum(), used)
        for op in (scan, scan_ref)
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("at_once", [1, 3])
def test_tokens_one_by_one(at_once):
    *tensors, first = problem(3, 9, torch.float64)
    want, last = state_space_scan(*tensors, initial_state=first)
    x, dt, a, b, c, d, z = tensors
    state = first.clone()
    pieces = (t.split(at_once, dim=1) for t in (x, dt, b, c, z))
    rows = [
        state_space_step(x_, dt_, a, b_, c_, state, d, z_)
        for x_, dt_, b_, c_, z_ in zip(*pieces, strict=True)
    ]
    torch.testing.assert_close(torch.cat(rows, dim=1), want)
    torch.testing.assert_close(state, last)


def test_slots_padding_and_the_states_on_the_way():
    x, dt, a, b, c, d, z, _ = problem(3, 2, torch.float32)
    state = torch.randn(5, HEADS, COLUMNS, STATE, generator=torch.Generator().manual_seed(1))
    before, after = state.clone(), torch.zeros(5, 2, HEADS, COLUMNS, STATE)
    slots = torch.tensor([4, -1, 0])
    y = state_space_step(x, dt, a, b, c, state, d, z, slots=slots, states_after=after)
    assert not y[1].any()
    assert torch.equal(state[1:4], before[1:4])
    for i, slot in ((0, 4), (2, 0)):
        one = slice(i, i + 1)
        own = before[slot : slot + 1]
        alone, last = state_space_scan_ref(
            x[one], dt[one], a, b[one], c[one], d, z[one], initial_state=own
        )
        _, halfway = state_space_scan_ref(
            x[one, :1], dt[one, :1], a, b[one, :1], c[one, :1], initial_state=own
        )
        torch.testing.assert_close(y[one], alone)
        torch.testing.assert_close(state[slot], last[0])
        torch.testing.assert_close(after[slot, 0], halfway[0])
        assert torch.equal(after[slot, 1], state[slot])


def test_memory_of_a_call_does_not_grow_with_the_square_of_the_tokens():
    from accel.testing.bench import _peak_bytes

    tensors = problem(1, 2048, torch.float32, sizes=(2, 8, 1, 8))
    leaves = [t.requires_grad_() for t in tensors]

    def step():
        y, _ = scan(*leaves)
        return torch.autograd.grad(y.sum(), leaves)

    step()
    assert _peak_bytes(step) < 0.1 * 2 * 2048 * 2048 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 6, HEADS)}, r"x must be \[B, S, H, P\] of a floating dtype, got"),
        ({"b": torch.randn(2, 6, 3, STATE)}, r"4 heads a multiple of G, got \[2, 6, 3, 3\]"),
        ({"c": torch.randn(2, 6, GROUPS, 7)}, r"c must have shape \[2, 6, 2, 3\], got"),
        ({"dt": torch.rand(2, 5, HEADS)}, r"dt must have shape \[2, 6, 4\], got \[2, 5, 4\]"),
        ({"a": torch.rand(3)}, r"a must have shape \[4\], got \[3\]"),
        ({"d": torch.rand(HEADS, 2)}, r"d must have shape \[4\] or \[4, 5\], got \[4, 2\]"),
        ({"initial_state": torch.rand(2, HEADS, COLUMNS, 9)}, r"initial_state must have shape"),
        ({"d": torch.rand(HEADS, device="meta")}, "d is on meta, the tokens are on cpu"),
        ({"chunk_size": 0}, "chunk_size must be >= 1, got 0"),
        ({"segments": torch.zeros(2, 5, dtype=torch.int32)}, r"integers of shape \[2, 6\], got"),
    ],
)
def test_bad_input(change, message):
    names = ("x", "dt", "a", "b", "c", "d", "z", "initial_state")
    call = dict(zip(names, problem(2, 6, torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        state_space_scan(**call)


def test_a_state_of_another_size_is_no_state_for_a_step():
    x, dt, a, b, c, d, z, _ = problem(2, 1, torch.float32)
    with pytest.raises(
        ValueError, match=r"state must have shape \[slots, 4, 5, 3\], got \[2, 4, 5\]"
    ):
        state_space_step(x, dt, a, b, c, torch.zeros(2, HEADS, COLUMNS), d, z)
    with pytest.raises(ValueError, match=r"state_space_step: a must have shape \[4\], got \[3\]"):
        state_space_step(x, dt, a[1:], b, c, torch.zeros(2, HEADS, COLUMNS, STATE), d, z)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 10), (2, 65)])
def test_the_gradient_that_comes_in_stays_as_it_is(heads: int, tokens: int):
    """Of one head, or of a last chunk of one token, the pieces that are made of it are its own memory."""
    tensors = problem(1, tokens, torch.float32, sizes=(heads, COLUMNS, 1, STATE))
    x, dt, a, b, c, d, z, first = (t.requires_grad_() for t in tensors)
    y, _ = state_space_scan(x, dt, a, b, c, d, z, initial_state=first)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    before = dy.clone()
    y.backward(dy)
    assert torch.equal(dy, before)


def test_second_derivative_is_an_error():
    leaves = [t.requires_grad_() for t in problem(1, 4, torch.float32)]
    (dx,) = torch.autograd.grad(scan(*leaves)[0].sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="state_space_scan_bwd has no derivative"):
        dx.sum().backward()


def test_autocast_changes_nothing():
    """What is computed in fp32 stays so, in both directions."""
    tensors = [t.requires_grad_() for t in problem(2, 21, torch.float32)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = scan(*tensors, chunk_size=8)
            grads = torch.autograd.grad([o.sum() for o in out], tensors)
        results.append([*out, *grads])
    assert all(map(torch.equal, *results))
