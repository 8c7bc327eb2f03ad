"""Gated delta networks (``--experimental-attention-variant gated_delta_net``, as in Qwen3-Next, or ``G`` in
``--hybrid-layer-pattern``) where ``flash-linear-attention`` is not installed.

Megatron's layer refuses to be made without that package, whose Triton kernels need a GPU. Here its
convolution, norm and recurrence are accel's (`accel.ops.causal_conv1d`, `accel.ops.gated_delta_rule`), of
PyTorch's own operators alone; parameters and checkpoints are upstream's.
A state is kept for every 64 tokens, all else is computed again in the backward, in fp32. Upstream's PyTorch
path, that of ``--deterministic-mode``, has the same numbers, keeps what autograd saves, and takes no packs.

Idle where `flash-linear-attention` is installed, and for models without such layers. Megatron 0.17's layer
takes no packs and no context parallelism. Run on CPUs so far, on no GPU or NPU yet.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from accel.feature import Context, Feature
from accel.layers import norm
from accel.ops import causal_conv1d as convolve
from accel.ops import gated_delta_rule
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

HAVE_FLA = True

_MODULE = "megatron.core.ssm.gated_delta_net"
_NAMES = {
    _MODULE: ("HAVE_FLA", "causal_conv1d", "l2norm", "chunk_gated_delta_rule"),
    f"{_MODULE}.common": ("HAVE_FLA", "causal_conv1d", "l2norm", "chunk_gated_delta_rule"),
    f"{_MODULE}.gdn": ("causal_conv1d", "chunk_gated_delta_rule"),
}
"""Module -> what it binds; until 0.18 there is one, from 0.19 on a package."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """`fla.modules.convolution`'s, x `[B, S, C]`, without states and residual."""
    if residual is not None or initial_state is not None or output_final_state:
        raise ValueError(
            "causal_conv1d: residual, initial_state and output_final_state need flash-linear-attention"
        )
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation {activation!r}: use silu, swish or None")
    silu = activation is not None
    return convolve(x, weight, bias, segments=_segments(x, cu_seqlens), silu=silu), None


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """`fla.modules.l2norm`'s: x over the square root of its last dimension's sum of squares and eps."""
    columns = x.shape[-1]
    weight = torch.full((columns,), columns**-0.5, dtype=torch.float32, device=x.device)
    return norm.rms_norm(x.float(), weight, eps / columns).to(output_dtype or x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.gated_delta_rule`'s; a pack neither begins with states nor gives any."""
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise ValueError("states of the sequences of a pack need flash-linear-attention")
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    segments = _segments(q, cu_seqlens)
    o, state = gated_delta_rule(
        q, k, v, g, beta, scale=scale, segments=segments, initial_state=initial_state
    )
    return o, state if output_final_state else None


def _segments(x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """The sequence of each token of a pack, [1, S]; x is [1, S, ...]."""
    if cu_seqlens is None:
        return None
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens want one row of tokens, got a batch of {x.shape[0]}")
    tokens = torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).unsqueeze(0)


def _idle(context: Context) -> str | None:
    if importlib.util.find_spec("fla") is not None:
        return "flash-linear-attention is installed"
    args = context.args
    if args is None or getattr(args, "experimental_attention_variant", None) == "gated_delta_net":
        return None
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    return None if "G" in pattern else "no gated delta networks"


FEATURE = Feature(
    name="gated_delta_net",
    summary="run gated delta networks where flash-linear-attention is not installed",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=_idle,
    benchmarks=("gated_delta_rule",),
    patches=tuple(
        Patch(
            target=f"{module}:{name}",
            replacement=f"accel.patches.gated_delta_net:{name}",
            why="Without flash-linear-attention upstream's name is False, None or, in 0.17, not there.",
            how="provide" if name == "l2norm" else "replace",  # which 0.17 leaves unbound
            optional=True,
        )
        for module, names in _NAMES.items()
        for name in names
    ),
)
