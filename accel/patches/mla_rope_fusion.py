"""``--apply-rope-fusion`` of multi-latent attention without a GPU, where upstream launches a Triton kernel.

From the command line ``rope_fusion`` turns the flag off there, and the same rotation runs unfused, by accel's
kernel. A program that builds Megatron's configuration itself reaches the two functions below: the rotation
of the last part of each query, and of the one key part that all heads share, with pairs of neighbours in and
halves out. They compute what upstream's kernels do, with its gradients, in fp32 and rounded once: by accel's
kernel too, in PyTorch where it does not take the input. They copy the query where upstream overwrites it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.feature import Feature
from accel.ops._dispatch import log_fallback
from accel.ops.rope import unsupported_reason
from accel.parallel.context import owners
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_MODULE = "megatron.core.fusions.fused_mla_yarn_rope_apply"


def apply_to_q(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> Tensor:
    """t: ``[S, B, heads, qk_head_dim + emb_dim]`` or packed ``[T, heads, ...]``; cos, sin: ``[rows, 1, 1,
    emb_dim]``."""
    _check_layout(rotary_interleaved)
    rows = _rows(t, cu_seqlens_q, cp_rank, cp_size)
    kept, turned = t.split([qk_head_dim, emb_dim], dim=-1)
    return torch.cat([kept, _rotated(turned, cos, sin, rows)], dim=-1)


def apply_to_kv(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """kv: ``[S, B, heads, k_dim + v_dim]`` or packed; k_pos_emb: the same with one head of emb_dim. Returns
    keys of width k_dim + emb_dim, and values."""
    _check_layout(rotary_interleaved)
    rows = _rows(kv, cu_seqlens_kv, cp_rank, cp_size)
    k, v = kv.split([k_dim, v_dim], dim=-1)
    turned = _rotated(k_pos_emb, cos, sin, rows).expand(*k.shape[:-1], emb_dim)
    return torch.cat([k, turned], dim=-1), v.contiguous()


def _check_layout(rotary_interleaved: bool) -> None:
    if rotary_interleaved:
        raise ValueError(
            "rotary_interleaved=True with apply_rope_fusion and multi-latent attention: upstream has no such "
            "kernel; use apply_rope_fusion=False"
        )


def _rows(x: Tensor, starts: Tensor | None, cp_rank: int, cp_size: int) -> Tensor | slice:
    """The position of each token of x within its sequence."""
    if starts is None:
        return slice(x.shape[0])
    tokens = torch.arange(x.shape[0] * cp_size, device=x.device)
    within = tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]
    if cp_size > 1:
        within = within[owners(starts, tokens.numel(), cp_size) == cp_rank]
    return within


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | slice) -> Tensor:
    cos_T1R, sin_T1R = (
        table[rows].float().reshape(-1, 1, x.shape[-1]).contiguous() for table in (cos, sin)
    )
    if reason := unsupported_reason(x, cos):
        log_fallback("mla_rope_fusion", reason)
        return _rotated_by_torch(x, cos_T1R, sin_T1R)
    x_TBND = x if x.dim() == 4 else x.unsqueeze(1)
    in_order = (None, 1, 0)  # a row of the tables for each token
    from_interleaved_to_half = (True, False, False)
    (y_TBND,) = torch.ops.accel.rope(
        [x_TBND], cos_T1R, sin_T1R, *in_order, x.shape[-1], *from_interleaved_to_half
    )
    return y_TBND.view(x.shape)


def _rotated_by_torch(x: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    shape = (-1, *(1,) * (x.dim() - 2), x.shape[-1])
    (cos_first, cos_second), (sin_first, sin_second) = (
        table.reshape(shape).chunk(2, dim=-1) for table in (cos_T1R, sin_T1R)
    )
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    halves = (first * cos_first - second * sin_first, second * cos_second + first * sin_second)
    return torch.cat(halves, dim=-1).to(x.dtype)


FEATURE = Feature(
    name="mla_rope_fusion",
    summary="serve --apply-rope-fusion of multi-latent attention without Triton",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cpu", "npu"),
    patches=(
        Patch(
            target=f"{_MODULE}:fused_apply_mla_rope_for_q",
            replacement="accel.patches.mla_rope_fusion:apply_to_q",
            why="Upstream's kernel is Triton's, which needs a GPU.",
        ),
        Patch(
            target=f"{_MODULE}:fused_apply_mla_rope_for_kv",
            replacement="accel.patches.mla_rope_fusion:apply_to_kv",
            why="Upstream's kernel is Triton's, which needs a GPU.",
        ),
    ),
)
