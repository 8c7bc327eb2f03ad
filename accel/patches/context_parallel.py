"""Sequences split over ranks, ``--context-parallel-size``, without Transformer Engine and in either spec.

Stock's local spec has no context parallelism. Here its attention takes part in it as the layers of
``te_layers`` do, with ``--cp-comm-type`` one for all layers or one for each:

``p2p`` (default)
    Keys and values go around a ring beside the computation, twice: forward and backward.
``all_gather``
    Every rank gathers the keys and values of a layer.
``a2a``
    Ulysses: an all-to-all gives each rank whole sequences of some heads.
``a2a+p2p``
    Heads within ``--hierarchical-context-parallel-sizes A B``'s first size (a node), a ring across.

A causal mask or none, grouped queries with fewer heads of keys than ranks, keys and values of different
widths (MLA), packed sequences (each a multiple of 2 x CP), sliding windows (``p2p`` gathers the keys for
these), recomputation, groups that batches bring (``PackedSeqParams.cp_group``,
``--hybrid-context-parallel``). ``--reset-attention-mask``: documents may begin and end anywhere; keys are
gathered unless heads are exchanged. Attention dropout drops what one rank would drop, if each chunk, a
sequence's 2 x CP-th part, is a multiple of 64; else it drops as many others, and a line says so. A layer with
a window and a mask of documents heeds both; on one rank upstream's local spec heeds the window alone.
Otherwise results differ from one rank's by rounding alone.

``--softmax-type``: each row's offset is joined by its log-sum-exp, once, whatever travels. A learnable
offset's gradient is zero for heads that a rank did not compute. ``--qk-clip`` and
``--log-max-attention-logit``, which Megatron wants the TE spec for: the largest logit of a head is that of
all ranks; for it scores are computed once more, a slice of queries at a time.

``--accel-context-parallel-window W`` makes two rings: one of W neighbours, while the next W ranks' keys are
on their way. ``--accel-context-parallel-keep keys`` or ``all`` keeps the received keys, or keys and values,
for the backward, in each layer or after every ``--accel-context-parallel-keep-interval`` others. Where there
is no ring, a line for each says that it does nothing.

**Not with** a mask of its own or an attention bias; nor with
``--dataloader-inter-document-masking``, whose rows Megatron splits without regard to the documents that it
describes, or, from 0.18 on, with ``--hybrid-context-parallel`` and rotary embeddings, which it takes from the
static group. Each is an error that says so; what flags ask for is looked at on command lines alone.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature, Setting
from accel.layers import attention as layer
from accel.layers.attention import packed_starts, values_apart
from accel.parallel.context import (
    RING,
    Attention,
    ContextGroups,
    RingSettings,
    context_attention,
    documents_of,
    ring_settings,
)
from accel.parallel.context.parts import Part
from accel.patches._attention import dropout_of, scale_of
from accel.patches._settings import divisors, whole_number
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_layers_asked

_HERE = "accel.patches.context_parallel"
_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_GROUPS = "accel_context_groups"

KEPT = {"none": "none", "keys": "keys", "all": "keys and values"}
"""What may be asked for."""


@around
def split_over_ranks(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Build the module although its sequences are split, and remember by whom they are."""
    bound = inspect.signature(init).bind(self, *args, **kwargs)
    config = bound.arguments["config"]
    comm_type = bound.arguments.get("cp_comm_type") or "p2p"
    if config.context_parallel_size == 1:
        init(self, *args, **kwargs)
        self.accel_cp_comm_type = comm_type  # of groups that batches bring
        return
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    bound.arguments["config"] = alone
    init(*bound.args, **bound.kwargs)
    self.config = config
    setattr(self, _GROUPS, _groups(bound.arguments.get("pg_collection"), comm_type))
    self.accel_cp_comm_type = comm_type
    self.register_forward_pre_hook(_only_while_on)


def _only_while_on(module: Any, inputs: Any) -> None:
    if not RING:
        ranks = module.config.context_parallel_size
        raise RuntimeError(
            f"context_parallel is off by now: upstream's attention, built for sequences that are split over "
            f"{ranks} ranks, would see the keys of its own rank alone; switch the feature on again"
        )


def _groups(collection: Any, comm_type: str) -> ContextGroups | None:
    from megatron.core import parallel_state

    if comm_type == "a2a+p2p":
        group = parallel_state.get_hierarchical_context_parallel_groups()
    else:
        group = getattr(collection, "cp", None) or parallel_state.get_context_parallel_group()
    return ContextGroups.of(group, comm_type)


@around
def attend_over_ranks(
    original: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    groups, by_batch = _groups_now(self, packed_seq_params), _is_by_batch(packed_seq_params)
    packed_seq_params = _if_packed(packed_seq_params)
    # upstream's has no packs, and 0.18 and later make one of each sequence of a dynamic group
    if groups is None and not (by_batch and packed_seq_params is not None):
        return original(
            self,
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias,
            packed_seq_params,
        )
    if attention_bias is not None:
        raise ValueError(
            "context parallelism: an attention bias, which a split sequence cannot have: use "
            "--context-parallel-size 1"
        )
    kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
    if kind == "arbitrary" and (attention_mask is None or packed_seq_params is not None):
        raise ValueError(
            "context parallelism: attn_mask_type arbitrary without an attention mask, which packed "
            "sequences never have: use causal or no_mask"
        )
    window = self.scale_mask_softmax.window_size
    how: dict[str, Any] = {"causal": "causal" in kind, "window": window and tuple(window)}
    if packed_seq_params is not None:
        how["starts"] = _starts(packed_seq_params, how["causal"])
    elif groups is not None and attention_mask is not None:
        how["documents"] = documents_of(attention_mask, groups, causal=how["causal"])
    whole = Attention(
        scale_of(self),
        kernel=layer.attention is not None,
        offset=self.softmax_offset,
        **dropout_of(self, query.device),
    )
    ring = ring_settings().of_layer(self.layer_number)
    if by_batch and groups is not None:  # of any size
        ring = replace(ring, window=math.gcd(ring.window, groups.ranks_by_keys))
    if layer.attention is not None:
        value = values_apart(query, key, value, self.config)
    if groups is None:
        part = Part(how["causal"], how["window"], how["starts"], how["starts"])
        return whole(query, key, value, part).flatten(-2)
    return context_attention(whole, query, key, value, groups, ring=ring, **how).flatten(-2)


def _groups_now(module: Any, packed: Any) -> ContextGroups | None:
    """As Megatron's own layer for Transformer Engine: a pack may come with a group of its own."""
    groups: ContextGroups | None = getattr(module, _GROUPS, None)
    if getattr(packed, "cp_group", None) is not None:
        comm_type = getattr(module, "accel_cp_comm_type", "p2p")  # one built before this was on
        return ContextGroups.of(packed.cp_group, comm_type)
    return None if getattr(packed, "local_cp_size", None) is not None else groups


def _is_by_batch(packed: Any) -> bool:
    """Whether the batch says how many ranks share it."""
    return any(getattr(packed, name, None) is not None for name in ("local_cp_size", "cp_group"))


def _if_packed(packed: Any) -> Any:
    """Without what says but how many ranks share a batch of whole sequences, as 0.17's
    `--hybrid-context-parallel` does for each."""
    return None if _is_by_batch(packed) and packed.qkv_format != "thd" else packed


def _starts(packed: Any, causal: bool) -> Tensor:
    if packed.qkv_format != "thd":
        raise ValueError(
            f"context parallelism: packed sequences in the format {packed.qkv_format}; use thd"
        )
    starts = packed_starts(
        (packed.cu_seqlens_q, packed.cu_seqlens_kv),
        (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded),
        causal,
    )
    q, k = starts.values()
    if q is not k and not torch.equal(q, k):
        raise ValueError(
            "context parallelism: packed sequences need as many keys as queries in each"
        )
    return q


def check(context: Context) -> None:
    """Raises ValueError for what would have tokens see others, or rotate them wrongly."""
    _refuse_documents(context.args)
    _refuse_rotation(context)


def check_sizes(context: Context) -> list[str]:
    """Refuse sizes before Megatron asserts them or a layer meets them; a line for each setting that does
    nothing.

    Raises:
        ValueError: it names the flags, the sizes and the nearest that work.
    """
    args = context.args
    ranks = getattr(args, "context_parallel_size", 1) or 1
    types = getattr(args, "cp_comm_type", None) or []
    types = [types] if isinstance(types, str) else types
    sizes = getattr(args, "hierarchical_context_parallel_sizes", None)
    without_ring = _without_ring(context, types, sizes)
    notes = _unused_settings(args, without_ring)
    if ranks == 1:
        return notes
    length = getattr(args, "seq_length", None)
    if length and length % (2 * ranks):
        below = length // (2 * ranks) * 2 * ranks
        near = " or ".join(str(n) for n in (below, below + 2 * ranks) if n)
        raise ValueError(
            f"--seq-length {length} is no multiple of 2 x --context-parallel-size {ranks}: use {near}"
        )
    if sizes and math.prod(sizes) != ranks:
        near = ", ".join(f"{a} {ranks // a}" for a in range(1, ranks + 1) if ranks % a == 0)
        raise ValueError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} do not multiply to "
            f"--context-parallel-size {ranks}: use one of {near}"
        )
    if "a2a+p2p" in types and (not sizes or len(sizes) != 2):
        raise ValueError(
            f"--cp-comm-type a2a+p2p with --hierarchical-context-parallel-sizes {sizes}: give two sizes, "
            f"how many ranks exchange heads and how many groups of them there are, that multiply to {ranks}"
        )
    if without_ring is None:
        inner = sizes[-1] if "a2a+p2p" in types and sizes else 1
        _check_window(args, inner if inner > 1 else ranks)
    for name, degree in {"a2a": ranks, "a2a+p2p": sizes[0] if sizes else 1}.items():
        if name in types:
            _check_heads(args, name, degree)
    return notes


def _without_ring(
    context: Context, types: Sequence[str], sizes: Sequence[int] | None
) -> str | None:
    """Why no layer has a ring of accel's; None: one may."""
    if reason := idle(context):
        return reason
    if types and not any("p2p" in name for name in types):
        return f"--cp-comm-type {' '.join(types)}"
    if set(types) == {"a2a+p2p"} and sizes and sizes[-1] == 1:
        return f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} leave one rank in it"
    window = getattr(context.args, "window_size", None)
    if window and window[0] >= 0 and not getattr(context.args, "window_attn_skip_freq", None):
        return f"--window-size {window[0]},{window[1]}, for which keys are gathered"
    return None


def _unused_settings(args: Any, without_ring: str | None) -> list[str]:
    """A line for each setting of rings that nothing looks at."""
    usual = RingSettings()
    settings: tuple[tuple[str, Callable[[Any], Any], Any], ...] = (
        ("window", parse_count, usual.window),
        ("keep", parse_kept, usual.keep),
        ("keep_interval", parse_interval, usual.interval),
    )
    changed = [
        name for name, parse, value in settings if _given(args, name, parse) not in (None, value)
    ]
    lines = []
    for name in changed:
        reason = without_ring and f"there is no ring of accel's ({without_ring})"
        if name == "keep_interval" and "keep" not in changed:
            reason = reason or "nothing is kept without --accel-context-parallel-keep"
        if reason:
            value = getattr(args, f"accel_context_parallel_{name}")
            flag = f"--accel-context-parallel-{name.replace('_', '-')}"
            lines.append(f"{flag} {value} does nothing: {reason}")
    return lines


def _refuse_documents(args: Any) -> None:
    """From 0.19 on. Each document would be taken for split over the ranks, as packed sequences are: those of
    ``--sft``, which Megatron does split so."""
    asked = getattr(args, "dataloader_inter_document_masking", False)
    ranks = getattr(args, "context_parallel_size", 1) or 1
    if asked and ranks > 1 and not getattr(args, "sft", False):
        raise ValueError(
            f"--dataloader-inter-document-masking with --context-parallel-size {ranks}: Megatron splits "
            "whole rows over the ranks and describes documents as if each were split, so tokens would see "
            "those of other documents: use --context-parallel-size 1, or in its place --reset-attention-mask "
            "--reset-position-ids --transformer-impl local"
        )


def _refuse_rotation(context: Context) -> None:
    """From 0.18 on sequences of dynamic groups are packs, which upstream rotates by the static group."""
    args = context.args
    rotary = getattr(args, "use_rotary_position_embeddings", False)
    kind = "rope" if rotary else getattr(args, "position_embedding_type", None)
    if not getattr(args, "hybrid_context_parallel", False) or kind not in ("rope", "yarn", "mrope"):
        return
    if not context.megatron.startswith("0.17."):
        raise ValueError(
            f"--hybrid-context-parallel with --position-embedding-type {kind}: megatron-core "
            f"{context.megatron} rotates tokens as if --context-parallel-size ranks held their sequence, "
            "however many do: leave --hybrid-context-parallel out, or use --position-embedding-type none"
        )


def _check_heads(args: Any, comm_type: str, degree: int) -> None:
    heads, tp = args.num_attention_heads or 0, args.tensor_model_parallel_size
    if heads % (tp * degree):
        fits = [d for d in range(1, heads // tp + 1) if heads % (tp * d) == 0]
        raise ValueError(
            f"--cp-comm-type {comm_type} shares heads: --num-attention-heads {heads} is no multiple of "
            f"--tensor-model-parallel-size {tp} x {degree} ranks that exchange them; as many may be "
            f"{', '.join(map(str, fits))}, or use --cp-comm-type p2p"
        )


def _given(args: Any, setting: str, parse: Callable[[Any], Any]) -> Any:
    """Before features are chosen: None if it was not given; an error names the flag."""
    value = getattr(args, f"accel_context_parallel_{setting}", None)
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        flag = f"--accel-context-parallel-{setting.replace('_', '-')}"
        raise ValueError(f"{flag}: {error}") from None


def parse_count(given: Any) -> int:
    return whole_number(given, "ranks")


def parse_interval(given: Any) -> int:
    return whole_number(given, "layers", least=0)


def parse_kept(given: Any) -> str:
    if given not in KEPT:
        raise ValueError(f"{given!r}: use {', '.join(KEPT)}")
    return KEPT[given]


def idle(context: Context) -> str | None:
    by_batch = getattr(context.args, "hybrid_context_parallel", False)
    if getattr(context.args, "context_parallel_size", None) == 1 and not by_batch:
        return "--context-parallel-size is 1"
    if te_layers_asked(context.args):
        return "Transformer Engine has it"
    return None


def _check_window(args: Any, ring: int) -> None:
    """Of the inner ring, before a layer meets it."""
    window = _given(args, "window", parse_count) or 1
    if ring % window:
        raise ValueError(
            f"--accel-context-parallel-window {window}: a window of {window} ranks does not divide the "
            f"ring of {ring}: use one of {divisors(ring)}"
        )


def switch_on(window: int = 1, keep: Any = "none", keep_interval: int = 0) -> Callable[[], None]:
    return RING.set(RingSettings(window, keep, keep_interval))


FEATURE = Feature(
    name="context_parallel",
    summary="split sequences over ranks in the local spec, by a ring, gathered keys, heads or both",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("context_parallel",),
    idle=idle,
    check=check,
    prepare=check_sizes,
    settings=(
        Setting(
            name="window",
            metavar="RANKS",
            summary="neighbours that form an inner ring (default: 1, one ring)",
            parse=parse_count,
            default=1,
        ),
        Setting(
            name="keep",
            metavar="WHAT",
            summary="of received keys and values for the backward: none (default), keys or all",
            parse=parse_kept,
            default="none",
        ),
        Setting(
            name="keep_interval",
            metavar="LAYERS",
            summary="layers between two that keep (default: 0)",
            parse=parse_interval,
            default=0,
        ),
    ),
    switch_on=switch_on,
    patches=(
        Patch(
            target=f"{_ATTENTION}.__init__",
            replacement=f"{_HERE}:split_over_ranks",
            how="wrap",
            why="Upstream refuses to build it where sequences are split.",
        ),
        Patch(
            target=f"{_ATTENTION}.forward",
            replacement=f"{_HERE}:attend_over_ranks",
            how="wrap",
            why="Upstream's attention knows the keys of its own rank alone.",
        ),
    ),
)
