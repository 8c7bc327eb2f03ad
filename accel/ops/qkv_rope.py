r"""Queries, keys and values out of one product, the first two rotated, in one pass.

    q[s, b, g n + i] = rotate(qkv[s, b, g, i])      k[s, b, g] = rotate(qkv[s, b, g, n])
    v[s, b, g]       = qkv[s, b, g, n + 1]

Letters     S positions, B batch, G groups, n queries in each, D a head's width; all of it is rotated.
Dtypes      float32, bfloat16 or float16; angles fp32, arithmetic fp32, as in `accel.ops.rope`, whose bits
            these are.
Saved       cos and sin, which all layers share; not qkv or the results.
Moved       read and written once, in both directions: the gradients go into one tensor as they are rotated
            back. (Cut out, copied, rotated and joined one by one: twice to three times that.)
Limits      `unsupported_reason`. Kernels: CUDA C++ alone. Elsewhere `accel.ops.rope` rotates what is cut out.

Replaces Transformer Engine's ``apply_fused_qkv_rotary_pos_emb``.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from accel.log import log_once
from accel.ops._capture import is_capturing
from accel.ops._dispatch import log_fallback, missing_kernel, refuse_derivative, unsupported_dtype
from accel.ops.rope import rope, tables_of

__all__ = ["qkv_rope", "qkv_rope_ref", "unsupported_reason"]

_PACK_BYTES = 16
_MAX_HEADS = 1023
"""Of a token, the kernel's."""


def qkv_rope_ref(
    qkv: Tensor,
    freqs: Tensor,
    head_dim: int,
    *,
    layout: Literal["half", "interleaved"] = "half",
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of correct, by `accel.ops.rope`. Same contract as `qkv_rope`."""
    s, b, groups, width = qkv.shape
    q, k, v = qkv.split([width - 2 * head_dim, head_dim, head_dim], dim=-1)
    q = q.reshape(s, b, groups * (width // head_dim - 2), head_dim)
    q, k = rope(q, freqs, k, layout=layout)
    assert k is not None
    return q, k, v.contiguous()


def unsupported_reason(qkv: Tensor, freqs: Tensor, head_dim: int) -> str | None:
    """Why `qkv_rope` takes the reference for valid inputs; None if it takes the kernel."""
    if reason := unsupported_dtype(qkv.dtype):
        return reason
    if freqs.requires_grad:
        return "freqs require a gradient (the kernels give none to angles)"
    if freqs.shape[-1] != head_dim:
        return f"{freqs.shape[-1]} of {head_dim} elements of a head are rotated"
    if head_dim * qkv.element_size() % (2 * _PACK_BYTES):
        return f"halves of heads of {head_dim} are no whole {_PACK_BYTES} bytes"
    if qkv.shape[2] * (qkv.shape[3] // head_dim) > _MAX_HEADS:
        return f"more than {_MAX_HEADS} heads"
    if not qkv.is_contiguous():
        return f"qkv is not contiguous: strides {qkv.stride()}"
    # which a compiled graph cannot ask
    compiling = torch.compiler.is_compiling()
    if not compiling and qkv.storage_offset() * qkv.element_size() % _PACK_BYTES:
        return f"qkv begins at no multiple of {_PACK_BYTES} bytes"
    return missing_kernel("accel::qkv_rope_fwd", qkv.device.type)


torch.library.define(
    "accel::qkv_rope_fwd",
    "(Tensor qkv, Tensor cos, Tensor sin, int head_dim, bool interleaved) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "accel::qkv_rope_bwd",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
)
_forward = torch.ops.accel.qkv_rope_fwd.default
_backward = torch.ops.accel.qkv_rope_bwd.default


@torch.library.register_fake("accel::qkv_rope_fwd")
def _forward_fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    s, b, groups, width = qkv.shape
    counts = (groups * (width // head_dim - 2), groups, groups)
    q, k, v = (qkv.new_empty(s, b, count, head_dim) for count in counts)
    return q, k, v


@torch.library.register_fake("accel::qkv_rope_bwd")
def _backward_fake(dq: Tensor, dk: Tensor, dv: Tensor, *options: Any) -> Tensor:
    s, b, heads, head_dim = dq.shape
    groups = dk.shape[2]
    return dq.new_empty(s, b, groups, (heads // groups + 2) * head_dim)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, cos, sin, _, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    return _backward(dq, dk, dv, *ctx.saved_tensors, ctx.interleaved), None, None, None, None


torch.library.register_autograd("accel::qkv_rope_fwd", _gradients, setup_context=_save)
refuse_derivative("accel::qkv_rope_bwd")


def qkv_rope(
    qkv: Tensor,
    freqs: Tensor,
    head_dim: int,
    *,
    layout: Literal["half", "interleaved"] = "half",
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a product into queries, keys and values, and rotate the first two by their positions' angles.

    Args:
        qkv: `[S, B, G, (n + 2) D]`, any float dtype: of each group n queries, a key and a value.
        freqs: `[positions, 1 or B, 1, R]` angles in radians, R at most D, with at least S rows.
        head_dim: D.
        layout: where the members of a pair lie, see `accel.ops.rope`.

    Returns:
        q `[S, B, G n, D]`, k and v `[S, B, G, D]`; contiguous.

    Raises:
        ValueError: an input of the wrong rank, shape, dtype or device.

    Where `unsupported_reason` has something to say, that is logged once and `qkv_rope_ref` computes instead.
    """
    if qkv.ndim != 4 or head_dim < 1 or qkv.shape[3] % head_dim or qkv.shape[3] < 3 * head_dim:
        raise ValueError(
            f"qkv_rope: qkv must have shape [S, B, G, (n + 2) {head_dim}], got {list(qkv.shape)}"
        )
    reason = unsupported_reason(qkv, freqs, head_dim)
    tables = None if reason else tables_of(qkv, freqs, layout)
    if tables is not None and 2 * tables.cos.shape[-1] != head_dim:
        tables = None  # pairs whose members have angles of their own, or it is not known yet
        if is_capturing(qkv.device):
            log_once(
                "qkv_rope",
                "a CUDA graph is captured on angles that were not seen before, whose pairs may have two: it "
                "holds a kernel for each of queries and keys in place of one for all",
            )
    if tables is None:
        if reason:
            log_fallback("qkv_rope", reason)
        return qkv_rope_ref(qkv, freqs, head_dim, layout=layout)
    return _forward(qkv, tables.cos, tables.sin, head_dim, layout == "interleaved")
