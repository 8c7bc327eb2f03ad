r"""The recurrence of gated delta networks: a matrix of state per head that decays, is corrected and is read.

    S[t] = exp(g[t]) S[t-1] + beta[t] k[t] (v[t] - exp(g[t]) S[t-1]^T k[t])^T        o[t] = scale S[t]^T q[t]

What a token writes depends on what the tokens before it wrote. Within a chunk of Q tokens that is a
triangular system (Yang, Kautz and Hatamizadeh 2024), and the rest are matrix products. With s the running sum
of g, L[i, j] = exp(s[i] - s[j]), and S the state before the chunk,

    A = beta (k k^T) * L below the diagonal                P = scale (q k^T) * L up to it
    (I + A) w = beta e,   e = v - exp(s) k S               o = P w + scale exp(s) q S
    S' = exp(s[Q]) S + (exp(s[Q] - s) k)^T w

    (I + A)^T dr = dw = P^T do + exp(s[Q] - s) k dS'       dA = -dr w^T           dP = do w^T
    dv = de = beta dr         dkS = -exp(s) de             dqS = scale exp(s) do
    dq = scale (dP * L) k + dqS S^T                        dS = exp(s[Q]) dS' + k^T dkS + q^T dqS
    dk = (dA beta * L) k + (dA beta * L)^T k + scale (dP * L)^T q + dkS S^T + exp(s[Q] - s) w dS'^T
    dbeta = rows of dA * (k k^T) * L + dr e                dg by `gradient_of_logs`

Letters     B  batch;   S  tokens;   H  heads;   K  columns of q and k;   V  columns of v and o
Dtypes      all inputs: any float, gradients as theirs. The state: fp32. Computed in fp32 (fp64 where q is
            float64), rounded once; s is summed in fp64, but on NPUs in fp32.
Segments    A token reads the state of its own segment only; the first state belongs to the first token's.
Saved       the inputs, and H K V of fp32 for every chunk. A, P and w are made again.
Limits      Long sequences need |k| <= 1 and 0 <= beta <= 2, else what is written may grow. A second
            derivative raises.
Order       Fixed by the shapes; the products keep what torch.bmm promises.
Kernels     PyTorch's products and `solve_triangular`; run on the CPU so far.

Replaces ``fla``'s ``chunk_gated_delta_rule`` (Triton).
"""

from typing import Any, NamedTuple

import torch
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
)

__all__ = ["gated_delta_rule", "gated_delta_rule_ref"]

CHUNK = 64
"""Tokens of a chunk: `fla`'s and Megatron's."""


def gated_delta_rule_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The definition of correct: token by token. Same contract as `gated_delta_rule`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = first_state(q, (len(q), *q.shape[2:], v.shape[3]), initial_state)
    queries, keys, values, logs, strengths = (t.to(wide) for t in (q, k, v, g, beta))
    rows = []
    for t in range(q.shape[1]):
        keep = logs[:, t].exp()
        if segments is not None and t:
            keep = keep * (segments[:, t] == segments[:, t - 1]).unsqueeze(-1)
        state = keep[..., None, None] * state
        known = (state * keys[:, t].unsqueeze(-1)).sum(-2)
        written = strengths[:, t].unsqueeze(-1) * (values[:, t] - known)
        state = state + keys[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        rows.append((state * queries[:, t].unsqueeze(-1)).sum(-2) * scale)
    o = torch.stack(rows, dim=1) if rows else values
    return o.to(v.dtype), state


class _Chunk(NamedTuple):
    """The tokens of a chunk, [B, H, Q, ...] in fp32, and what follows from them and the state before."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    """[B, H, Q, 1]"""
    decays: Decays
    overlaps: Tensor
    """(k k^T) * L below the diagonal, [B, H, Q, Q]; beta times that is A."""
    scores: Tensor
    """P, [B, H, Q, Q]"""
    errors: Tensor
    """e, [B, H, Q, V]"""
    written: Tensor
    """w, [B, H, Q, V]"""
    read: Tensor
    """scale exp(s) q S, [B, H, Q, V]"""

    @classmethod
    def of(
        cls,
        rows: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        segments: Tensor | None,
        state: Tensor,
        scale: float,
    ) -> "_Chunk":
        q, k, v = (_by_head(t, rows, state.dtype) for t in (q, k, v))
        logs, strengths = (_by_head(t, rows, state.dtype) for t in (g, beta))
        decays, strengths = Decays.of(logs, segments, rows), strengths.unsqueeze(-1)
        before = decays.from_state.unsqueeze(-1)
        overlaps = (k @ k.mT).mul_(decays.between).tril_(-1)
        scores = (q @ k.mT).mul_(decays.between).mul_(scale)
        errors = v - before * (k @ state)
        written = torch.linalg.solve_triangular(
            strengths * overlaps, strengths * errors, upper=False, unitriangular=True
        )
        read = (q @ state).mul_(before).mul_(scale)
        return cls(q, k, v, strengths, decays, overlaps, scores, errors, written, read)

    def next_state(self, state: Tensor) -> Tensor:
        left = self.k * self.decays.to_state.unsqueeze(-1)
        return state * self.decays.keep[..., None, None] + left.mT @ self.written


def _by_head(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Some tokens of [B, S, H, ...] as [B, H, Q, ...]."""
    return x[:, rows].to(dtype).transpose(1, 2).contiguous()


torch.library.define(
    "accel::gated_delta_rule_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? segments, Tensor? initial_state,"
    " float scale, int chunk_size) -> (Tensor o, Tensor states)",
)
torch.library.define(
    "accel::gated_delta_rule_bwd",
    "(Tensor do_, Tensor? dstate, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? segments,"
    " Tensor states, float scale, int chunk_size)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial)",
)


@torch.library.register_fake("accel::gated_delta_rule_fwd")
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    num_chunks = -(-q.shape[1] // chunk_size)
    shape = (num_chunks + 1, q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    return v.new_empty(v.shape), q.new_empty(
        shape, dtype=torch.promote_types(q.dtype, torch.float32)
    )


@torch.library.impl("accel::gated_delta_rule_fwd", "CompositeExplicitAutograd")
@without_autocast
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """o, and the state before each chunk and after the last, [chunks + 1, B, H, K, V]."""
    o, states = _forward_fake(q, k, v, g, beta, segments, initial_state, scale, chunk_size)
    states[0] = first_state(q, (len(q), *q.shape[2:], v.shape[3]), initial_state)
    for i, rows in enumerate(chunks_of(q.shape[1], chunk_size)):
        chunk = _Chunk.of(rows, q, k, v, g, beta, segments, states[i], scale)
        o[:, rows] = (chunk.scores @ chunk.written).add_(chunk.read).transpose(1, 2)
        states[i + 1] = chunk.next_state(states[i])
    return o, states


@torch.library.register_fake("accel::gated_delta_rule_bwd")
def _backward_fake(
    do_: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    states: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    own = (t.new_empty(t.shape) for t in (q, k, v, g, beta))
    return *own, states.new_empty(states.shape[1:])


@torch.library.impl("accel::gated_delta_rule_bwd", "CompositeExplicitAutograd")
@without_autocast
def _backward(
    do_: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    states: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    *grads, dinitial = _backward_fake(
        do_, dstate, q, k, v, g, beta, segments, states, scale, chunk_size
    )
    carried = torch.zeros_like(states[0]) if dstate is None else dstate
    for i, rows in reversed(list(enumerate(chunks_of(q.shape[1], chunk_size)))):
        chunk = _Chunk.of(rows, q, k, v, g, beta, segments, states[i], scale)
        dout = _by_head(do_, rows, states.dtype)
        *parts, carried = _backward_of(chunk, dout, states[i], carried, scale)
        for grad, part in zip(grads, parts, strict=True):
            grad[:, rows] = part.transpose(1, 2)
    return *grads, dinitial.copy_(carried)


def _backward_of(
    chunk: _Chunk, dout: Tensor, state: Tensor, dnext: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The formulas above: of q, k, v, g, beta, and of the state before the chunk."""
    q, k, v, beta, decays, overlaps, scores, errors, written, read = chunk
    before, after = decays.from_state.unsqueeze(-1), decays.to_state.unsqueeze(-1)
    dscores = (dout @ written.mT).tril_()
    dwritten = (scores.mT @ dout).add_(after * (k @ dnext))
    dtarget = torch.linalg.solve_triangular(
        (beta * overlaps).mT, dwritten, upper=True, unitriangular=True
    )
    dcorrections = (dtarget @ written.mT).neg_().tril_(-1)
    dv = beta * dtarget
    from_k, from_q = -before * dv, scale * before * dout
    left = written @ dnext.mT * after

    of_keys = dcorrections * decays.between * beta
    of_scores = dscores * decays.between * scale
    dq = (of_scores @ k).add_(from_q @ state.mT)
    dk = (of_keys @ k).add_(of_keys.mT @ k).add_(of_scores.mT @ q)
    dk.add_(from_k @ state.mT).add_(left)

    between = dcorrections.mul_(overlaps)
    dbeta = between.sum(-1) + (dtarget * errors).sum(-1)
    dg = gradient_of_logs(
        (beta * between).add_(dscores.mul_(scores)),
        (dout * read).sum(-1) - (dv * (v - errors)).sum(-1),
        (left * k).sum(-1),
        (dnext * state).sum((-2, -1)).mul_(decays.keep),
    )
    dstate = dnext * decays.keep[..., None, None] + k.mT @ from_k + q.mT @ from_q
    return dq, dk, dv, dg, dbeta, dstate


refuse_derivative("accel::gated_delta_rule_bwd")


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        segments: Tensor | None,
        initial_state: Tensor | None,
        scale: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        inputs = (q, k, v, g, beta, segments)
        o, states = torch.ops.accel.gated_delta_rule_fwd(*inputs, initial_state, scale, chunk_size)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, states)
        ctx.options = scale, chunk_size
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        return o, states[-1].clone()

    @staticmethod
    def backward(ctx: Any, do_: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, states = ctx.saved_tensors
        if do_ is None:
            do_ = torch.zeros_like(inputs[2])
        if dstate is not None:
            dstate = dstate.to(states.dtype)
        *grads, dinitial = torch.ops.accel.gated_delta_rule_bwd(
            do_, dstate, *inputs, states, *ctx.options
        )
        first = None if ctx.initial_dtype is None else dinitial.to(ctx.initial_dtype)
        return *grads, None, first, None, None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The outputs of a gated delta network's heads for whole sequences, and the state after the last token.

    Args:
        q, k: `[B, S, H, K]`, any floating dtype and strides; keys of length 1 or less.
        v: `[B, S, H, V]`.
        g: `[B, S, H]`, logarithms of the decays, <= 0.
        beta: `[B, S, H]`, how much of the difference is written.
        scale: of the queries; None: K to the power of -1/2.
        segments: `[B, S]`, integers: a token reads the state of its own segment only. The tokens of one
            segment follow each other.
        initial_state: `[B, H, K, V]`; None: zeros.
        chunk_size: tokens that are computed at once. Changes rounding only.

    Returns:
        o `[B, S, H, V]` in the dtype of v, and the state `[B, H, K, V]` in `torch.float32`.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or chunk_size < 1.
    """
    op = "gated_delta_rule"
    if q.ndim != 4 or not q.is_floating_point():
        raise ValueError(
            f"{op}: q must be [B, S, H, K] of a floating dtype, got {list(q.shape)} {q.dtype}"
        )
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{op}: v must have shape [{', '.join(map(str, q.shape[:3]))}, V], got {list(v.shape)}"
        )
    per_head = tuple(q.shape[:3])
    state = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    shapes: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "k": (k, [tuple(q.shape)]),
        "v": (v, [tuple(v.shape)]),
        "g": (g, [per_head]),
        "beta": (beta, [per_head]),
        "initial_state": (initial_state, [state]),
    }
    check_shapes(op, q.device, shapes)
    check_segments(op, q, segments)
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be >= 1, got {chunk_size}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _GatedDeltaRule.apply(q, k, v, g, beta, segments, initial_state, scale, chunk_size)
