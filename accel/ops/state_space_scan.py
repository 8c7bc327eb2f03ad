r"""The recurrence of Mamba-2: a matrix of state per head that decays, takes in a token and is read.

    S[t] = exp(dt[t] a) S[t-1] + dt[t] x[t] b[t]^T          y[t] = (S[t] c[t] + d x[t]) SiLU(z[t])

Within a chunk of Q tokens that is attention without softmax (`state space duality`, Dao and Gu 2024), so all
but the states between chunks are matrix products. With s the running sum of dt a, u = dt x, and S the state
before the chunk,

    L[i, j] = exp(s[i] - s[j]) for j <= i, else 0      M = (c b^T) * L
    y' = M u + exp(s) (c S^T)                          S' = exp(s[Q]) S + (exp(s[Q] - s) u)^T b
    dc = (dM * L) b + exp(s) dy' S                     db = (dM * L)^T c + exp(s[Q] - s) u dS'
    du = M^T dy' + exp(s[Q] - s) (b dS'^T)             dS = exp(s[Q]) dS' + (exp(s) dy')^T c
    dM = dy' u^T
    d(dt a)[i] = sum over j < i <= k of (dM * M)[k, j] + what the states add

Letters     B  batch;   S  tokens;   H  heads of P columns;   G  groups of heads, which share b and c;
            N  columns of b and c, and of a state;   R = H / G;   Q  tokens of a chunk
Dtypes      x, b, c, d, z: any float, gradients as theirs. dt, a and the state: fp32. All is computed in fp32
            (fp64 where x is float64), rounded once; s is summed in fp64, but on NPUs in fp32.
Segments    A token reads the state of its own segment only; the first state belongs to the first token's.
Saved       the inputs, and H P N of fp32 for every chunk. M is made again.
Cost        per token and head 2 Q (N / R + P) + 4 P N flops forward; about 4 times that with the backward,
            which makes M and y' again.
Memory      beyond results and states, a few of [B, H, Q, Q] and [B, H, Q, P].
Order       Fixed by the shapes; the products keep what torch.bmm promises.
Kernels     PyTorch's products; run on the CPU so far.

Replaces ``mamba_ssm``'s ``mamba_chunk_scan_combined`` and ``selective_state_update`` (Triton).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._autocast import without_autocast
from accel.ops._chunks import chunks_of
from accel.ops._dispatch import refuse_derivative
from accel.ops._recurrence import (
    Decays,
    check_segments,
    check_shapes,
    first_state,
    gradient_of_logs,
    used_slots,
)

__all__ = ["state_space_scan", "state_space_scan_ref", "state_space_step"]

CHUNK = {"cpu": 64, "cuda": 256}
"""Tokens of a chunk, by type of device; others as CUDA.

CPU: forward and both passes of 2048 tokens, 32 heads of 64, 8 groups, N 128, bf16, on 2 threads of a Xeon
take 88 and 213 ms with 32, 61 and 167 with 64, 87 and 276 with 128, 240 and 938 with 256. CUDA, not measured:
what `mamba_ssm` chooses.
"""


def state_space_scan_ref(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition of correct: token by token. Same contract as `state_space_scan`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    heads_per_group = x.shape[2] // max(b.shape[2], 1)
    b, c = (t.to(wide).repeat_interleave(heads_per_group, dim=2) for t in (b, c))
    dt, a, u = dt.to(wide), a.to(wide), x.to(wide)
    state = first_state(x, (len(x), *x.shape[2:], b.shape[3]), initial_state)
    rows = []
    for t in range(x.shape[1]):
        keep = (dt[:, t] * a).exp()
        if segments is not None and t:
            keep = keep * (segments[:, t] == segments[:, t - 1]).unsqueeze(-1)
        added = (dt[:, t, :, None] * u[:, t]).unsqueeze(-1) * b[:, t, :, None]
        state = keep[..., None, None] * state + added
        rows.append((state * c[:, t, :, None]).sum(-1))
    y = torch.stack(rows, dim=1) if rows else u
    if d is not None:
        y = y + (d if d.ndim == 2 else d[:, None]).to(wide) * u
    if z is not None:
        y = y * F.silu(z.to(wide))
    return y.to(x.dtype), state


class _Chunk(NamedTuple):
    """The tokens of a chunk, in fp32, with what they share. [.., Q, R P] and [.., R, Q, P] below are the same
    numbers, once for products with b and c of a group and once for those of a head."""

    x: Tensor
    """[B, G, R, Q, P]"""
    dt: Tensor
    """[B, G, R, Q]"""
    b: Tensor
    """[B, G, Q, N]"""
    c: Tensor
    decays: Decays

    @classmethod
    def of(
        cls,
        rows: slice,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        segments: Tensor | None,
    ) -> "_Chunk":
        wide = torch.promote_types(x.dtype, torch.float32)
        groups = b.shape[2]
        steps = dt[:, rows].to(wide).transpose(1, 2).unflatten(1, (groups, -1))
        return cls(
            _by_head(x, rows, groups),
            steps,
            b[:, rows].to(wide).transpose(1, 2),
            c[:, rows].to(wide).transpose(1, 2),
            Decays.of(steps * a.to(wide).view(groups, -1, 1), segments, rows),
        )

    def scores(self) -> Tensor:
        """M, [B, G, R, Q, Q]."""
        return (self.c @ self.b.mT).unsqueeze(2) * self.decays.between

    def steps(self) -> Tensor:
        """u, [B, G, R, Q, P]."""
        return self.x * self.dt.unsqueeze(-1)

    def read(self, state: Tensor) -> Tensor:
        """exp(s) (c S^T), [B, G, R, Q, P]; the state is [B, G, R, P, N]."""
        read = _heads_of(self.c @ state.flatten(2, 3).mT, state)
        return read * self.decays.from_state.unsqueeze(-1)

    def next_state(self, state: Tensor, steps: Tensor) -> Tensor:
        added = _side_by_side(steps * self.decays.to_state.unsqueeze(-1)).mT @ self.b
        return state * self.decays.keep[..., None, None] + added.view(state.shape)


def _by_head(x: Tensor, rows: slice, groups: int) -> Tensor:
    """Some tokens of [B, S, H, P] as fp32 [B, G, R, Q, P]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x[:, rows].to(wide).transpose(1, 2).unflatten(1, (groups, -1)).contiguous()


def _side_by_side(x: Tensor) -> Tensor:
    """[B, G, R, Q, P] as [B, G, Q, R P]."""
    return x.transpose(2, 3).flatten(3)


def _heads_of(x: Tensor, state: Tensor) -> Tensor:
    """[B, G, Q, R P] as [B, G, R, Q, P]; the state says R and P."""
    return x.unflatten(3, state.shape[2:4]).transpose(2, 3)


def _back(x: Tensor) -> Tensor:
    """[B, G, R, Q, ...] as [B, Q, H, ...]."""
    return x.flatten(1, 2).transpose(1, 2)


torch.library.define(
    "accel::state_space_scan_fwd",
    "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? segments,"
    " Tensor? initial_state, int chunk_size) -> (Tensor y, Tensor states)",
)
torch.library.define(
    "accel::state_space_scan_bwd",
    "(Tensor dy, Tensor? dstate, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z,"
    " Tensor? segments, Tensor states, int chunk_size) -> (Tensor dx, Tensor ddt, Tensor da, Tensor db,"
    " Tensor dc, Tensor dd, Tensor dz, Tensor dinitial)",
)


@torch.library.register_fake("accel::state_space_scan_fwd")
def _forward_fake(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    segments: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    num_chunks = -(-x.shape[1] // chunk_size)
    shape = (
        num_chunks + 1,
        x.shape[0],
        b.shape[2],
        x.shape[2] // b.shape[2],
        x.shape[3],
        b.shape[3],
    )
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=wide)


@torch.library.impl("accel::state_space_scan_fwd", "CompositeExplicitAutograd")
@without_autocast
def _forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    segments: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """y, and the state before each chunk and after the last, [chunks + 1, B, G, R, P, N]."""
    y, states = _forward_fake(x, dt, a, b, c, d, z, segments, initial_state, chunk_size)
    groups = b.shape[2]
    first = first_state(x, (len(x), *x.shape[2:], b.shape[3]), initial_state)
    states[0] = first.unflatten(1, (groups, -1))
    for i, rows in enumerate(chunks_of(x.shape[1], chunk_size)):
        chunk = _Chunk.of(rows, x, dt, a, b, c, segments)
        steps = chunk.steps()
        out = (chunk.scores() @ steps).add_(chunk.read(states[i]))
        states[i + 1] = chunk.next_state(states[i], steps)
        if d is not None:
            out.addcmul_(chunk.x, _columns(d, groups).to(out.dtype))
        if z is not None:
            out *= F.silu(_by_head(z, rows, groups))
        y[:, rows] = _back(out)
    return y, states


def _columns(d: Tensor, groups: int) -> Tensor:
    """[H] or [H, P] as what broadcasts with [B, G, R, Q, P]."""
    return (d if d.ndim == 2 else d[:, None]).unflatten(0, (groups, -1)).unsqueeze(2)


@torch.library.register_fake("accel::state_space_scan_bwd")
def _backward_fake(
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    segments: Tensor | None,
    states: Tensor,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    dd, dz = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (d, z))
    own = (t.new_empty(t.shape) for t in (x, dt, a, b, c))
    return *own, dd, dz, states.new_empty(states.shape[1:])


@torch.library.impl("accel::state_space_scan_bwd", "CompositeExplicitAutograd")
@without_autocast
def _backward(
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    segments: Tensor | None,
    states: Tensor,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    groups = b.shape[2]
    grads = _backward_fake(dy, dstate, x, dt, a, b, c, d, z, segments, states, chunk_size)
    dx, ddt, da, db, dc, dd, dz, _ = grads
    da_sum = states.new_zeros(a.shape)
    dd_sum = None if d is None else states.new_zeros(d.shape)
    carried = torch.zeros_like(states[0]) if dstate is None else dstate.view(states.shape[1:])
    for i, rows in reversed(list(enumerate(chunks_of(x.shape[1], chunk_size)))):
        chunk = _Chunk.of(rows, x, dt, a, b, c, segments)
        steps, scores = chunk.steps(), chunk.scores()
        read = chunk.read(states[i])
        dout = _by_head(dy, rows, groups)
        if z is not None:
            gate = _by_head(z, rows, groups)
            out = (scores @ steps).add_(read)
            if d is not None:
                out.addcmul_(chunk.x, _columns(d, groups).to(out.dtype))
            dz[:, rows] = _back(torch.ops.aten.silu_backward(dout * out, gate))
            dout = dout * F.silu(gate)  # out of place: it may be autograd's own
        if dd_sum is not None:
            by_column = (dout * chunk.x).sum((0, 3)).flatten(0, 1)
            dd_sum += by_column if dd_sum.ndim == 2 else by_column.sum(-1)
        part = _backward_of(chunk, steps, scores, read, dout, states[i], carried)
        dlog = part.dlog
        ddt[:, rows] = _back((part.dsteps * chunk.x).sum(-1) + dlog * a.view(groups, -1, 1))
        da_sum += (dlog * chunk.dt).sum((0, 3)).flatten()
        dx_rows = part.dsteps * chunk.dt.unsqueeze(-1)
        if d is not None:
            dx_rows.addcmul_(dout, _columns(d, groups).to(dout.dtype))
        dx[:, rows] = _back(dx_rows)
        db[:, rows], dc[:, rows] = part.db.transpose(1, 2), part.dc.transpose(1, 2)
        carried = part.dstate
    if dd_sum is not None:
        dd.copy_(dd_sum)
    da.copy_(da_sum)
    return dx, ddt, da, db, dc, dd, dz, carried


class _Gradients(NamedTuple):
    dsteps: Tensor
    """[B, G, R, Q, P]"""
    dlog: Tensor
    """Of dt a, [B, G, R, Q]."""
    db: Tensor
    """[B, G, Q, N]"""
    dc: Tensor
    dstate: Tensor
    """Of the state before the chunk."""


def _backward_of(
    chunk: _Chunk,
    steps: Tensor,
    scores: Tensor,
    read: Tensor,
    dout: Tensor,
    state: Tensor,
    dnext: Tensor,
) -> _Gradients:
    """The formulas above; dnext is the gradient of the state after the chunk."""
    decays = chunk.decays
    flat_state, flat_dnext = state.flatten(2, 3), dnext.flatten(2, 3)
    dscores = dout @ steps.mT
    dproducts = (dscores * decays.between).sum(2)
    from_dout = _side_by_side(dout * decays.from_state.unsqueeze(-1))
    to_steps = _side_by_side(steps * decays.to_state.unsqueeze(-1))
    dc = (dproducts @ chunk.b).add_(from_dout @ flat_state)
    db = (dproducts.mT @ chunk.c).add_(to_steps @ flat_dnext)
    taken = _heads_of(chunk.b @ flat_dnext.mT, state) * decays.to_state.unsqueeze(-1)
    dsteps = (scores.mT @ dout).add_(taken)
    dstate = (from_dout.mT @ chunk.c).view(state.shape)
    dlog = gradient_of_logs(
        dscores.mul_(scores),
        (dout * read).sum(-1),
        (taken * steps).sum(-1),
        (dnext * state).sum((-2, -1)).mul_(decays.keep),
    )
    return _Gradients(dsteps, dlog, db, dc, dstate.addcmul_(dnext, decays.keep[..., None, None]))


refuse_derivative("accel::state_space_scan_bwd")


class _StateSpaceScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        z: Tensor | None,
        segments: Tensor | None,
        initial_state: Tensor | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        inputs = (x, dt, a, b, c, d, z, segments)
        y, states = torch.ops.accel.state_space_scan_fwd(*inputs, initial_state, chunk_size)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, states)
        ctx.options = chunk_size, None if initial_state is None else initial_state.dtype
        return y, states[-1].flatten(1, 2).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, states = ctx.saved_tensors
        chunk_size, initial_dtype = ctx.options
        if dy is None:
            dy = torch.zeros_like(inputs[0])
        if dstate is not None:
            dstate = dstate.to(states.dtype).contiguous()
        grads = torch.ops.accel.state_space_scan_bwd(dy, dstate, *inputs, states, chunk_size)
        dx, ddt, da, db, dc, dd, dz, dinitial = grads
        has_d, has_z = inputs[5] is not None, inputs[6] is not None
        first = None if initial_dtype is None else dinitial.flatten(1, 2).to(initial_dtype)
        return dx, ddt, da, db, dc, dd if has_d else None, dz if has_z else None, None, first, None


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs of a state-space layer for whole sequences, and the state after the last token.

    Args:
        x: `[B, S, H, P]`, any floating dtype and strides.
        dt: `[B, S, H]`, the step of each token, >= 0: after its bias and softplus.
        a: `[H]`, <= 0.
        b, c: `[B, S, G, N]` with H a multiple of G.
        d: `[H]` or `[H, P]`.
        z: as x, the gate.
        segments: `[B, S]`, integers: a token reads the state of its own segment only. The tokens of one
            segment follow each other.
        initial_state: `[B, H, P, N]`; None: zeros.
        chunk_size: tokens that are computed at once; None: `CHUNK`. Changes rounding only.

    Returns:
        y `[B, S, H, P]` in the dtype of x, and the state `[B, H, P, N]` in `torch.float32`.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or chunk_size < 1.
    """
    chunk_size = chunk_size_of("state_space_scan", chunk_size, x.device)
    _check("state_space_scan", x, dt, a, b, c, d, z, initial_state)
    check_segments("state_space_scan", x, segments)
    return _StateSpaceScan.apply(x, dt, a, b, c, d, z, segments, initial_state, chunk_size)


def state_space_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    states_after: Tensor | None = None,
) -> Tensor:
    """The next tokens of sequences whose states are at hand; no gradients.

    Args:
        x, dt, a, b, c, d, z: see `state_space_scan`.
        state: `[slots, H, P, N]`, any floating dtype, updated in place.
        slots: `[B]`, the row of `state` of each sequence; -1 is padding, whose y is 0. None: as they come.
        states_after: `[slots, S, H, P, N]`, is given the state after each token.

    Returns:
        `[B, S, H, P]` in the dtype of x.

    Raises:
        ValueError: a shape or device that does not fit.
    """
    _check("state_space_step", x, dt, a, b, c, d, z, None)
    if state.shape[1:] != (*x.shape[2:], b.shape[3]):
        raise ValueError(
            f"state_space_step: state must have shape [slots, {x.shape[2]}, {x.shape[3]}, {b.shape[3]}], got "
            f"{list(state.shape)}"
        )
    with torch.no_grad():
        used, rows = used_slots(x, slots)
        inputs = (x[used], dt[used], b[used], c[used])
        gate = None if z is None else z[used]
        y, current = x.new_zeros(x.shape), state[rows]
        for t in range(x.shape[1]):
            token = slice(t, t + 1)
            x_t, dt_t, b_t, c_t = (i[:, token] for i in inputs)
            z_t = None if gate is None else gate[:, token]
            y[used, token], current = state_space_scan_ref(
                x_t, dt_t, a, b_t, c_t, d, z_t, initial_state=current
            )
            if states_after is not None:
                states_after[rows, t] = current.to(states_after.dtype)
        state[rows] = current.to(state.dtype)
    return y


def _check(
    op: str,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"{op}: x must be [B, S, H, P] of a floating dtype, got {list(x.shape)} {x.dtype}"
        )
    batch, num_tokens, heads, columns = x.shape
    if b.ndim != 4 or b.shape[:2] != x.shape[:2] or b.shape[2] == 0 or heads % b.shape[2]:
        raise ValueError(
            f"{op}: b must have shape [{batch}, {num_tokens}, G, N] with {heads} heads a multiple of G, got "
            f"{list(b.shape)}"
        )
    check_shapes(
        op,
        x.device,
        {
            "b": (b, [tuple(b.shape)]),
            "dt": (dt, [(batch, num_tokens, heads)]),
            "a": (a, [(heads,)]),
            "c": (c, [tuple(b.shape)]),
            "d": (d, [(heads,), (heads, columns)]),
            "z": (z, [tuple(x.shape)]),
            "initial_state": (initial_state, [(batch, heads, columns, b.shape[3])]),
        },
    )


def chunk_size_of(op: str, chunk_size: int | None, device: torch.device) -> int:
    """What was given, or `CHUNK` of the device."""
    if chunk_size is None:
        return CHUNK.get(device.type, CHUNK["cuda"])
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be >= 1, got {chunk_size}")
    return chunk_size
