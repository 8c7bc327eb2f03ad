"""`DotProductAttention`, with Transformer Engine's masks, layouts and packed sequences.

Causal, full, sliding-window and packed attention are `accel.ops.attention` where `attention` says so,
which stores no tensor of queries x keys. A mask tensor is compared with the causal one, once for each
tensor; one that is neither causal nor empty, and a bias, take the plain path, which does store them, and
one line says so. Sequences split over a context-parallel group: `accel.parallel.context`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.layers.base import ExtraState, draw_normal, refuse_options
from accel.log import log_once
from accel.ops import attention_ref
from accel.ops._capture import is_capturing
from accel.ops._dispatch import log_fallback
from accel.ops.attention import largest_scores
from accel.ops.findings import Findings
from accel.parallel.context import Attention, ContextGroups, context_attention, ring_settings

__all__ = ["DotProductAttention", "draw_seed", "mask_kind", "packed_starts", "values_apart"]

attention: Callable[..., tuple[Tensor, Tensor]] | None = None
"""`accel.ops.attention`, where a feature puts it; without it the plain path below computes."""

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
HIDDEN = -10000.0
"""The score of a hidden key, as in Megatron and Transformer Engine."""

_ROWS_AT_ONCE = 256
"""A mask is compared in slices of so many queries, so that no second mask is made."""

_KINDS, _PACKS = Findings(), Findings()
"""All layers get the same mask, and the same pack."""


def mask_kind(mask: Tensor, num_queries: int, num_keys: int) -> str:
    """What a mask (True is hidden), broadcastable to [B, 1, queries, keys], is: `causal`, `none` or
    `other`. In a CUDA graph, which cannot look, `other` serves what is not known yet."""
    size = (num_queries, num_keys)
    if is_capturing(mask.device) and not _KINDS.knows(mask, about=size):
        log_once(
            "attention",
            "a CUDA graph holds an attention mask that was not looked at since it was written: it is taken "
            "for none in particular, even if it is the causal one; "
            "--no-create-attention-mask-in-dataloader leaves it out",
        )
        return "other"
    kind: str = _KINDS.get(mask, find=lambda: _kind(mask, size), about=size)
    return kind


def _kind(mask: Tensor, size: tuple[int, int]) -> str:
    hides = mask.any()
    if mask.shape[-2:] != size or size[0] != size[1]:
        return "other" if hides else "none"
    columns = torch.arange(size[1], device=mask.device)
    causal = (
        (columns > columns[first : first + _ROWS_AT_ONCE, None])
        .eq(mask[..., first : first + _ROWS_AT_ONCE, :])
        .all()
        for first in range(0, size[0], _ROWS_AT_ONCE)
    )
    if mask.device.type == "cpu":  # stops at the first that is not
        return "none" if not hides else "causal" if all(causal) else "other"
    hides_some, is_causal = torch.stack([hides, torch.stack(list(causal)).all()]).tolist()
    return "none" if not hides_some else "causal" if is_causal else "other"


def packed_starts(
    starts: tuple[Tensor, Tensor], padded: tuple[Tensor | None, Tensor | None], causal: bool
) -> dict[str, Tensor]:
    """Where the sequences of a pack start, for queries and keys, as arguments of `accel.ops.attention`.

    Args:
        starts: `[sequences + 1]` each, counting the tokens.
        padded: the same with the padding after each sequence counted in, or None where there is none.

    Raises:
        ValueError: there is padding between them, and no causal mask to keep it out of sight.
    """
    begin_q, begin_k = starts
    padded_q, padded_k = padded
    if padded_q is not None and padded_k is not None:
        tensors = (begin_q, begin_k, padded_q, padded_k)
        if not _PACKS.get(*tensors, find=lambda: _fits(*tensors, causal), about=causal):
            raise ValueError(
                "packed sequences with padding between them need a causal mask and as many keys as "
                "queries in each"
            )
        begin_q, begin_k = padded_q, padded_k
    return {"cu_seqlens_q": begin_q, "cu_seqlens_k": begin_k}


def _fits(
    begin_q: Tensor, begin_k: Tensor, padded_q: Tensor, padded_k: Tensor, causal: bool
) -> bool:
    if torch.equal(begin_q, padded_q) and torch.equal(begin_k, padded_k):
        return True
    return causal and torch.equal(padded_q, padded_k) and torch.equal(begin_q, begin_k)


def draw_seed(device: torch.device) -> Tensor:
    """One int64 from the current random stream: what decides which keys are dropped. Recomputation,
    which restores that stream, drops the same again."""
    return torch.empty((), dtype=torch.int64, device=device).random_()


def values_apart(query: Tensor, key: Tensor, value: Tensor, config: Any) -> Tensor:
    """The values in memory of their own, where the backward would keep more than them otherwise.

    Megatron cuts queries, keys and values out of one product. Rotated, the first two are tensors of their
    own, and only the values are still a view of it. What norms queries or keys keeps the product anyway.

    Args:
        config: Megatron's `TransformerConfig`; None outside of Megatron.
    """
    if getattr(config, "qk_layernorm", False) or getattr(config, "qk_l2_norm", False):
        return value
    if not (torch.is_grad_enabled() and value.requires_grad) or torch.compiler.is_compiling():
        return value
    product = value.untyped_storage()
    for other in (query, key):
        if other.untyped_storage()._cdata == product._cdata:
            return value
    if product.nbytes() < 2 * value.nbytes:
        return value
    return value.clone(memory_format=torch.contiguous_format)


class DotProductAttention(ExtraState):
    """`softmax(scale q k^T + bias) v` over the keys that each query sees.

    Args:
        num_attention_heads: of the whole layer; `tp_size` ranks share them.
        kv_channels: size of a head, or (of a query and key, of a value).
        num_gqa_groups: heads of keys and values of the whole layer; all of them if None.
        attn_mask_type: one of `MASK_TYPES`, unless the call says otherwise.
        window_size: how many keys before and after its own a query sees, -1 for all.
        softmax_scale: 1 / sqrt(size of a head) if None.
        get_rng_state_tracker: a learnable offset is drawn in its fork, and dropout but for sequence
            parallelism.
        cp_group, cp_comm_type: the ranks that share the sequences: `set_context_parallel_group`.
        softmax_type: `vanilla`; `off-by-one`, one more key with score 0 and value 0 in every row;
            `learnable`, the same with a score for each head, the parameter `softmax_offset`.
        return_max_logit: return the largest scaled score of each head beside the result, of all ranks that
            share the sequences; scores are computed once more for it. Not of a pack.
        options: what else Transformer Engine takes: refused if set.

    State dict: `_extra_state` (empty), and `softmax_offset [H]` if it is learnable.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        cp_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        return_max_logit: bool = False,
        **options: Any,
    ) -> None:
        if softmax_type not in SOFTMAX_TYPES:
            raise ValueError(
                f"softmax_type={softmax_type!r}: use one of {', '.join(SOFTMAX_TYPES)}"
            )
        refuse_options(type(self).__name__, options)
        super().__init__()
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group = tp_group
        for name in ("num_attention_heads", "num_gqa_groups"):
            if getattr(self, name) % self.tp_size:
                raise ValueError(
                    f"DotProductAttention: {name}={getattr(self, name)} is no multiple of tp_size="
                    f"{self.tp_size}"
                )
        head = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1 / math.sqrt(head) if softmax_scale is None else softmax_scale
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = _known_mask(attn_mask_type)
        if window_size is not None and not (
            isinstance(window_size, (tuple, list)) and len(window_size) == 2
        ):
            raise ValueError(
                f"DotProductAttention: window_size={window_size!r}: give (keys before, keys after), "
                "-1 for all"
            )
        self._window = window_size
        self.window_size = window_size or ((-1, 0) if "causal" in attn_mask_type else (-1, -1))
        self.attention_type = attention_type
        self.layer_number = layer_number
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        self.return_max_logit = return_max_logit
        self.softmax_type = softmax_type
        self.softmax_offset: Tensor | None = None
        self._parameter_tracker = get_rng_state_tracker
        if softmax_type == "learnable":
            heads = self.num_attention_heads // self.tp_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, device=_device()))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """First values, drawn as Transformer Engine does: each tensor-parallel rank has its own."""
        if self.softmax_offset is not None and not self.softmax_offset.is_meta:
            with _fork(self._parameter_tracker):
                draw_normal(self.softmax_offset)

    def _offset(self, q: Tensor) -> Tensor | None:
        """`[H]`, the score of the key of value 0; None: there is none."""
        return (
            q.new_zeros(q.shape[-2]) if self.softmax_type == "off-by-one" else self.softmax_offset
        )

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
        cp_global_ranks: Any,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
    ) -> None:
        """From now on the sequences are split over `cp_group`; None: over nobody.

        Args:
            cp_group, cp_comm_type: see `accel.parallel.context.ContextGroups.of`.
            cp_global_ranks, cp_stream: not needed here.

        Raises:
            ValueError: `cp_comm_type` is not known.
        """
        groups = None if cp_group is None else ContextGroups.of(cp_group, cp_comm_type)
        self.cp_comm_type, self.context_groups = cp_comm_type, groups

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        pad_between_seqs: bool | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attention of one rank's heads.

        Args:
            query_layer: `[S, B, H, D]` (`sbhd`), `[B, S, H, D]` (`bshd`) or `[T, H, D]` (`thd`, packed).
            key_layer, value_layer: the same with the heads of keys and values.
            attention_mask: True is hidden, broadcastable to `[B, 1, queries, keys]`; or one for the
                queries and one for the keys, `[B, 1, 1, S]` each.
            cu_seqlens_q, ...: where the sequences of a pack start, without and with padding; that alone
                counts: max_seqlen and pad_between_seqs follow from it.
            core_attention_bias: added to the scaled scores, broadcastable to `[B, H, queries, keys]`, where
                `core_attention_bias_type` is "post_scale_bias"; not of a pack.

        Returns:
            The layout of the query with its last two dimensions as one; and the largest scores `[H]`, fp32,
            under `return_max_logit`.
        """
        refuse_options("DotProductAttention.forward", options)
        layout = qkv_format or self.qkv_format
        if layout not in ("sbhd", "bshd", "thd"):
            raise ValueError(f"qkv_format={layout!r}: use 'sbhd', 'bshd' or 'thd'")
        _check_bias(core_attention_bias_type, core_attention_bias, layout)
        kind = _known_mask(attn_mask_type or self.attn_mask_type)
        window = self._window if window_size is None else window_size
        if window is not None:
            window = (max(-1, window[0]), max(-1, window[1]))
            # Transformer Engine's window of a causal layer
            if window == (-1, 0) and "causal" not in kind:
                window = (-1, -1)
        qkv = (query_layer, key_layer, value_layer)
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None:
                raise ValueError("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv")
            starts = (cu_seqlens_q, cu_seqlens_kv)
            padded = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
            out, max_logit = self._packed(*qkv, kind, window, starts, padded)
            return (out, max_logit) if self.return_max_logit else out
        q, k, v = (t.transpose(0, 1) for t in qkv) if layout == "bshd" else qkv
        if attention_mask is None and "padding" in kind:
            if cu_seqlens_kv is not None:
                attention_mask = _padding(cu_seqlens_kv, k.shape[0])
            elif "causal" not in kind:
                raise ValueError(
                    f"attn_mask_type={kind!r} needs an attention_mask, or cu_seqlens_q and cu_seqlens_kv"
                )
        bias = None if core_attention_bias_type == "no_bias" else core_attention_bias
        out, max_logit = self._dense(q, k, v, kind, window, attention_mask, bias)
        out = out.transpose(0, 1) if layout == "bshd" else out
        return (out, max_logit) if self.return_max_logit else out

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kind: str,
        window: tuple[int, int] | None,
        starts: tuple[Tensor, Tensor],
        padded: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """`[T, H E]`, and the largest score of each head, padding included, if it is to be returned."""
        if kind == "arbitrary":
            raise ValueError(
                "attn_mask_type='arbitrary' with packed sequences, which have no mask of their own: use "
                "'padding_causal' or 'padding'"
            )
        causal = "causal" in kind
        lengths = packed_starts(starts, padded, causal)
        if causal and "bottom_right" not in kind and q.shape[0] != k.shape[0]:
            raise NotImplementedError(
                f"packed sequences: attn_mask_type={kind!r} from the top left for {q.shape[0]} queries and "
                f"{k.shape[0]} keys; accel has that for sbhd and bshd"
            )
        mask: dict[str, Any] = {"causal": causal, "window": window}
        attend = self._fused if self.context_groups is None else self._split
        return attend(q, k, v, mask, **lengths)

    def _dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kind: str,
        window: tuple[int, int] | None,
        mask: Tensor | tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """`[S, B, H E]`, and the largest score of each head if it is to be returned."""
        if self.context_groups is not None:
            masked = mask is not None and "padding" in kind
            if masked or kind == "arbitrary" or bias is not None:
                raise ValueError(
                    f"context parallelism: attn_mask_type={kind!r} asks for a mask or a bias of its own; a "
                    "split sequence can have a causal mask or none: use 'causal' or 'no_mask'"
                )
            return self._split(q, k, v, {"causal": "causal" in kind, "window": window})
        served, reason = _as_options(kind, window, mask, q.shape[0], k.shape[0])
        reason = "an attention bias" if bias is not None else reason
        if attention is not None:
            if reason is None:
                return self._fused(q, k, v, served)
            log_fallback("attention", reason)
        return self._plain(q, k, v, _hidden(kind, window, mask, q, k), bias)

    def _split(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: dict[str, Any],
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and the largest score of each head on any rank if it is to be returned."""
        if (
            cu_seqlens_q is not None
            and cu_seqlens_k is not None
            and not torch.equal(cu_seqlens_q, cu_seqlens_k)
        ):
            raise ValueError(
                "context parallelism: packed queries and keys of different lengths; a split sequence "
                "attends to itself"
            )
        assert self.context_groups is not None
        largest = None
        if self.return_max_logit:
            largest = q.new_full(q.shape[-2:-1], -torch.inf, dtype=torch.float32)
        whole = Attention(
            self.softmax_scale,
            kernel=attention is not None,
            offset=self._offset(q),
            largest=largest,
            **self._dropout(q.device),
        )
        ring = ring_settings().of_layer(self.layer_number)
        v = self._values(q, k, v)
        out = context_attention(
            whole, q, k, v, self.context_groups, starts=cu_seqlens_q, ring=ring, **how
        )
        if largest is not None:
            self.context_groups.max_(largest)
        return out.flatten(-2), largest

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any], **lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and the largest score of each head if it is to be returned."""
        compute = attention_ref if attention is None else attention
        how = {**mask, **lengths, "softmax_scale": self.softmax_scale}
        max_logit = largest_scores(q, k, **how) if self.return_max_logit else None
        how |= {"offset": self._offset(q), **self._dropout(q.device)}
        out, _ = compute(q, k, self._values(q, k, v), **how)
        return out.flatten(-2), max_logit

    def _values(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = getattr(self, "config", None)  # Megatron's class above this one has it
        return v if attention is None else values_apart(q, k, v, config)

    def _dropout(self, device: torch.device) -> dict[str, Any]:
        if not self.training or self.attention_dropout == 0:
            return {}
        with _fork(self.get_rng_state_tracker):
            return {"dropout": self.attention_dropout, "seed": draw_seed(device)}

    def _plain(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and the largest score of each head if it is to be returned."""
        group, offset = q.shape[2] // k.shape[2], self._offset(q)
        k, v = (t.repeat_interleave(group, dim=2) if group > 1 else t for t in (k, v))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, H, S, D]
        # scaled before it is rounded: fp16 ends at 65504
        flat = torch.baddbmm(
            q.new_zeros(1),
            q.flatten(0, 1),
            k.flatten(0, 1).transpose(1, 2),
            beta=0,
            alpha=self.softmax_scale,
        )
        scores = flat.view(*q.shape[:2], *flat.shape[1:])
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, HIDDEN)
        max_logit = None
        if self.return_max_logit:
            max_logit = scores.detach().float().amax(dim=(0, 2, 3))
        if offset is not None:
            sink = offset.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        probs = probs[..., : k.shape[2]]
        if self.training and self.attention_dropout > 0:
            with _fork(self.get_rng_state_tracker):
                probs = torch.nn.functional.dropout(probs, self.attention_dropout)
        return (probs @ v).permute(2, 0, 1, 3).flatten(-2), max_logit


def _device() -> torch.device:
    """Of parameters, where nobody says which: the tracker's streams are those of the GPU."""
    chosen = torch.get_default_device()
    if chosen.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _fork(tracker: Callable[[], Any] | None) -> Any:
    return contextlib.nullcontext() if tracker is None else tracker().fork()


def _known_mask(kind: str) -> str:
    if kind not in MASK_TYPES:
        raise ValueError(f"attn_mask_type={kind!r}: use one of {', '.join(MASK_TYPES)}")
    return kind


def _check_bias(kind: str, bias: Tensor | None, layout: str) -> None:
    if kind not in ("no_bias", "post_scale_bias"):
        raise NotImplementedError(
            f"core_attention_bias_type={kind!r}: accel has 'no_bias' and 'post_scale_bias'; give what is to "
            "be added to the scaled scores as core_attention_bias"
        )
    if kind == "post_scale_bias" and (bias is None or layout == "thd"):
        wants = "packed sequences have none" if bias is not None else "give core_attention_bias"
        raise ValueError(f"core_attention_bias_type='post_scale_bias': {wants}, or use 'no_bias'")


def _padding(starts: Tensor, num_keys: int) -> Tensor:
    """What no query may see, `[B, 1, 1, keys]`, of sequences that begin at `starts` once they are packed."""
    lengths = starts.diff()[:, None, None, None]
    return torch.arange(num_keys, device=starts.device) >= lengths


def _as_options(
    kind: str,
    window: tuple[int, int] | None,
    mask: Tensor | tuple[Tensor, Tensor] | None,
    num_queries: int,
    num_keys: int,
) -> tuple[dict[str, Any], str | None]:
    """The mask as arguments of `attention`, or why it cannot be one."""
    causal = "causal" in kind
    if num_queries != num_keys and causal and "bottom_right" not in kind:
        return {}, f"a causal mask from the top left for {num_queries} queries and {num_keys} keys"
    if num_queries > num_keys and (causal or window is not None):
        return {}, f"{num_queries} queries, of which some see none of {num_keys} keys"
    if mask is not None and (kind == "arbitrary" or "padding" in kind):
        masks = (mask,) if isinstance(mask, Tensor) else mask
        kinds = {mask_kind(m, num_queries, num_keys) for m in masks}
        if "other" in kinds:
            return {}, "an attention mask of its own"
        causal = causal or "causal" in kinds
    elif kind == "arbitrary":
        raise ValueError("attn_mask_type='arbitrary' needs an attention_mask")
    return {"causal": causal, "window": window}, None


def _hidden(
    kind: str,
    window: tuple[int, int] | None,
    mask: Tensor | tuple[Tensor, Tensor] | None,
    q: Tensor,
    k: Tensor,
) -> Tensor | None:
    """What no query may see, [queries, keys] or [B, 1, queries, keys]; None if nothing."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    hidden: list[Tensor] = []
    if mask is not None and (kind == "arbitrary" or "padding" in kind):
        # One for the queries would hide whole rows, whose results nobody reads: the keys' counts.
        hidden.append((mask if isinstance(mask, Tensor) else mask[-1]).bool())
    left, right = window or (-1, -1)
    if "causal" in kind:
        right = 0
    shift = num_keys - num_queries if "bottom_right" in kind or "causal" not in kind else 0
    keys = torch.arange(num_keys, device=q.device)
    queries = torch.arange(num_queries, device=q.device)[:, None] + shift
    if left >= 0:
        hidden.append(keys < queries - left)
    if right >= 0:
        hidden.append(keys > queries + right)
    return functools.reduce(torch.logical_or, hidden) if hidden else None
