r"""A Mamba-2 layer between its two projections: a row per token in, a row out, and only the former is kept.

    [z, xbc, dt] = row                 x, b, c = causal_conv1d(xbc)          Delta = softplus(dt + dt_bias)
    y = state_space_scan(x, Delta, a, b, c, d, z)

Letters     B  batch;   S  tokens;   H  heads of P columns;   G  groups of N columns;   E = 2 H P + 2 G N + H
Dtypes      rows and y: any float. Delta and a: fp32.
Saved       the rows, the weights and the states of `state_space_scan`: the convolution is computed again in
            the backward, as by ``mamba_ssm``'s ``mamba_split_conv1d_scan_combined``, which this replaces.
Limits      A second derivative raises.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._autocast import without_autocast
from accel.ops._recurrence import check_segments, check_shapes
from accel.ops.causal_conv1d import causal_conv1d_ref, check_channels
from accel.ops.state_space_scan import chunk_size_of, state_space_scan_ref

__all__ = ["split_conv1d_scan", "split_conv1d_scan_ref"]


class _Sizes(NamedTuple):
    heads: int
    columns: int
    groups: int
    state: int
    silu: bool
    dt_limit: tuple[float, float]
    chunk_size: int

    @property
    def parts(self) -> list[int]:
        """Columns of z, xbc and dt."""
        width = self.heads * self.columns
        return [width, width + 2 * self.groups * self.state, self.heads]

    def split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, H, P] and b, c [B, S, G, N] of the convolution's result, as views."""
        shared = self.groups * self.state
        x, b, c = xbc.split([self.heads * self.columns, shared, shared], dim=-1)
        per_group = (self.groups, self.state)
        return (
            x.unflatten(-1, (self.heads, self.columns)),
            b.unflatten(-1, per_group),
            c.unflatten(-1, per_group),
        )

    def steps(self, dt: Tensor, dt_bias: Tensor) -> Tensor:
        """Delta [B, S, H]."""
        return F.softplus(dt.to(dt_bias.dtype) + dt_bias).clamp(*self.dt_limit)

    def dsteps(self, dsteps: Tensor, dt: Tensor, dt_bias: Tensor) -> Tensor:
        """The gradient of dt + dt_bias from that of Delta; torch's softplus is the identity from 20 on."""
        shifted = dt.to(dt_bias.dtype) + dt_bias
        steps = F.softplus(shifted)
        inside = (steps >= self.dt_limit[0]) & (steps <= self.dt_limit[1])
        return torch.ops.aten.softplus_backward(dsteps * inside, shifted, 1, 20)


def split_conv1d_scan_ref(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    a: Tensor,
    d: Tensor | None = None,
    *,
    groups: int,
    columns: int,
    silu: bool = True,
    segments: Tensor | None = None,
    initial_state: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, torch.inf),
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition of correct, of the references of its parts. Same contract as `split_conv1d_scan`."""
    sizes = _sizes(rows, conv_weight, a, groups, columns, silu, dt_limit, chunk_size)
    z, xbc, dt = rows.split(sizes.parts, dim=-1)
    x, b, c = sizes.split(
        causal_conv1d_ref(xbc, conv_weight, conv_bias, segments=segments, silu=silu)
    )
    y, state = state_space_scan_ref(
        x,
        sizes.steps(dt, dt_bias),
        a,
        b,
        c,
        d,
        z.unflatten(-1, (sizes.heads, columns)),
        segments=segments,
        initial_state=initial_state,
    )
    return y.flatten(2), state


class _SplitConv1dScan(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        rows: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        dt_bias: Tensor,
        a: Tensor,
        d: Tensor | None,
        segments: Tensor | None,
        initial_state: Tensor | None,
        sizes: _Sizes,
    ) -> tuple[Tensor, Tensor]:
        z, xbc, dt = rows.split(sizes.parts, dim=-1)
        conv = torch.ops.accel.causal_conv1d_fwd(xbc, conv_weight, conv_bias, segments, sizes.silu)
        x, b, c = sizes.split(conv)
        gate = z.unflatten(-1, (sizes.heads, sizes.columns))
        inputs = (x, sizes.steps(dt, dt_bias), a, b, c, d, gate, segments, initial_state)
        y, states = torch.ops.accel.state_space_scan_fwd(*inputs, sizes.chunk_size)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, conv_weight, conv_bias, dt_bias, a, d, segments, states)
        ctx.sizes = sizes
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        return y.flatten(2), states[-1].flatten(1, 2).clone()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, conv_weight, conv_bias, dt_bias, a, d, segments, states = ctx.saved_tensors
        sizes: _Sizes = ctx.sizes
        z, xbc, dt = rows.split(sizes.parts, dim=-1)
        conv = torch.ops.accel.causal_conv1d_fwd(xbc, conv_weight, conv_bias, segments, sizes.silu)
        x, b, c = sizes.split(conv)
        gate = z.unflatten(-1, (sizes.heads, sizes.columns))
        dy = torch.zeros_like(x) if dy is None else dy.unflatten(-1, (sizes.heads, sizes.columns))
        if dstate is not None:
            dstate = dstate.to(states.dtype).contiguous()
        scan = (x, sizes.steps(dt, dt_bias), a, b, c, d, gate, segments, states, sizes.chunk_size)
        grads = torch.ops.accel.state_space_scan_bwd(dy, dstate, *scan)
        dx, dsteps, da, db, dc, dd, dz, dinitial = grads
        dconv = torch.cat([dx.flatten(2), db.flatten(2), dc.flatten(2)], dim=-1)
        dxbc, dweight, dbias = torch.ops.accel.causal_conv1d_bwd(
            dconv, xbc, conv_weight, conv_bias, segments, sizes.silu
        )
        ddt = sizes.dsteps(dsteps, dt, dt_bias)
        drows = torch.cat([dz.flatten(2), dxbc, ddt.to(rows.dtype)], dim=-1)
        first = ctx.initial_dtype and dinitial.flatten(1, 2).to(ctx.initial_dtype)
        return (
            drows,
            dweight,
            None if conv_bias is None else dbias,
            ddt.sum((0, 1)).to(dt_bias.dtype),
            da,
            None if d is None else dd,
            None,
            first,
            None,
        )


def split_conv1d_scan(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    a: Tensor,
    d: Tensor | None = None,
    *,
    groups: int,
    columns: int,
    silu: bool = True,
    segments: Tensor | None = None,
    initial_state: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, torch.inf),
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows of the first projection of a Mamba-2 layer to those of the last, and the state after them.

    Args:
        rows: `[B, S, E]`, any floating dtype: z, x, b, c and dt of each token, side by side.
        conv_weight, conv_bias: `[H P + 2 G N, K]` and `[H P + 2 G N]`, see `causal_conv1d`.
        dt_bias, a: `[H]`, `torch.float32`.
        d: `[H]` or `[H, P]`.
        groups, columns: G and P; H is the length of a, and N follows.
        silu: of the convolution.
        segments, initial_state, chunk_size: see `state_space_scan`; the convolution's taps see no token of
            another segment either.
        dt_limit: the smallest and largest Delta.

    Returns:
        `[B, S, H P]` in the dtype of the rows, and the state `[B, H, P, N]` in `torch.float32`.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    op = "split_conv1d_scan"
    sizes = _sizes(rows, conv_weight, a, groups, columns, silu, dt_limit, chunk_size)
    xbc = rows[..., sizes.parts[0] : -sizes.heads]
    check_channels(op, xbc, conv_weight, conv_bias)
    check_segments(op, rows, segments)
    per_head = (sizes.heads,)
    state = (rows.shape[0], sizes.heads, columns, sizes.state)
    check_shapes(
        op,
        rows.device,
        {
            "dt_bias": (dt_bias, [per_head]),
            "a": (a, [per_head]),
            "d": (d, [per_head, (sizes.heads, columns)]),
            "initial_state": (initial_state, [state]),
        },
    )
    return _SplitConv1dScan.apply(
        rows, conv_weight, conv_bias, dt_bias, a, d, segments, initial_state, sizes
    )


def _sizes(
    rows: Tensor,
    conv_weight: Tensor,
    a: Tensor,
    groups: int,
    columns: int,
    silu: bool,
    dt_limit: tuple[float, float],
    chunk_size: int | None,
) -> _Sizes:
    op, heads = "split_conv1d_scan", a.numel()
    shared = rows.shape[-1] - 2 * heads * columns - heads if rows.ndim == 3 else -1
    if groups < 1 or heads % groups or shared <= 0 or shared % (2 * groups):
        raise ValueError(
            f"{op}: rows must have shape [B, S, 2 H P + 2 G N + H] with H {heads} (the length of a) a "
            f"multiple of G {groups}, P {columns} and N >= 1, got {list(rows.shape)}"
        )
    state = shared // (2 * groups)
    if conv_weight.shape[0] != heads * columns + shared:
        raise ValueError(
            f"{op}: conv_weight must have {heads * columns + shared} rows (H P + 2 G N), got "
            f"{list(conv_weight.shape)}"
        )
    if not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"{op}: dt_limit must be 0 <= smallest <= largest, got {dt_limit}")
    chunk_size = chunk_size_of(op, chunk_size, rows.device)
    return _Sizes(heads, columns, groups, state, silu, dt_limit, chunk_size)
