"""Attention of the local spec in one kernel that stores no tensor of queries x keys.

``DotProductAttention.forward`` (scores, masked softmax, dropout, product: several tensors of S x S for
each head) becomes ``accel.ops.attention``. It serves causal and full attention, grouped queries
without repeating keys and values, sliding windows, ``--attention-dropout``, query-key layer scaling,
recomputation, and what upstream's unfused attention refuses: packed sequences and a cache of keys that
several queries follow (the last query is aligned with the last key). Scores and softmax are fp32, so the
result is closer to the exact one than upstream's own, but not the same bits; dropout draws one number
from Megatron's RNG tracker where upstream draws S x S, so other elements are dropped.

``--attention-backend auto``, ``flash`` and ``fused``, and ``--use-flash-attn``, mean this kernel;
``local`` as well, which upstream accepts only with ``--spec local`` (on GPUs with Transformer Engine's own
layers that stays so). ``unfused`` is upstream's own attention. The kernel is deterministic, so
``--deterministic-mode`` takes it too.

What it keeps for the backward is what it reads: the values are copied out of the product of queries, keys and
values, of which a view would keep all (5/6 of it for nothing with 4 queries to a key), unless queries or keys
are normed, which keeps it anyway.

On CUDA the fastest kernel that is installed and takes the call runs: FlashAttention 4 or 3, cuDNN's,
accel's own in Triton, FlashAttention-2, in an order for each generation of GPUs. The start-up table says
which, for the model's heads, dtype, mask and dropout in training, and why not those before it;
``ACCEL_ATTENTION_BACKEND`` puts one first. Dropout is Triton's alone: with Megatron's default of
``--attention-dropout 0.1`` no other runs in training.

A mask tensor is compared with the causal one, once for each tensor; one that hides nothing is full
attention. Upstream's own attention runs, and one line says why, for any other mask and for tensors that
the kernel does not take. A window of -1 is no limit, as Megatron's documentation has it. Padding between
packed sequences needs a causal mask: its tokens then come after every token that could see them.
``--softmax-type`` (attention sinks): each row's offset is joined to its result by the log-sum-exp, for one
pass over the result more; in the backward a learnable one takes another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature
from accel.layers.attention import mask_kind, packed_starts, values_apart
from accel.ops import attention
from accel.ops._attention_backends import NO_LIMIT, SEQUENCES_OF_A_GRID, Call, describe
from accel.ops._dispatch import log_fallback
from accel.ops.attention import unsupported_reason
from accel.patches._attention import dropout_of, scale_of
from accel.patches._kernels import kernels
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE, te_has_its_own, te_installed

logger = logging.getLogger(__name__)


@around
def forward_fused(
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
    rest = (attn_mask_type, attention_bias, packed_seq_params)
    if self.config.attention_backend.name == "unfused":
        return original(self, query, key, value, attention_mask, *rest)
    options, reason = _options(self, query, key, attention_mask, attn_mask_type, packed_seq_params)
    scale = scale_of(self)
    reason = reason or _unserved(self, query, value, scale, attention_bias)
    if reason is not None:
        log_fallback("attention", reason)
        return original(self, query, key, value, attention_mask, *rest)
    value = values_apart(query, key, value, self.config)
    options |= {"softmax_scale": scale, "offset": self.softmax_offset}
    out, _ = attention(query, key, value, **options, **dropout_of(self, query.device))
    return out.flatten(-2)


def _unserved(
    module: Any, query: Tensor, value: Tensor, scale: float, attention_bias: Tensor | None
) -> str | None:
    if attention_bias is not None:
        return "an attention bias"
    if module.attention_dropout.training and module.attention_dropout.p >= 1:
        return "attention dropout of everything"
    return unsupported_reason(query, value, scale)


def _options(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    attn_mask_type: Any,
    packed: Any,
) -> tuple[dict[str, Any], str | None]:
    """The mask as keyword arguments of ``attention``, or why it cannot be one."""
    window = module.scale_mask_softmax.window_size
    limits = None if window is None else (max(-1, window[0]), max(-1, window[1]))
    if packed is not None:
        kind = (module.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        if packed.qkv_format != "thd":
            return {}, f"packed sequences in the format {packed.qkv_format}"
        if kind == "arbitrary":
            return {}, "packed sequences with a mask of their own"
        causal = "causal" in kind
        starts = packed_starts(
            (packed.cu_seqlens_q, packed.cu_seqlens_kv),
            (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded),
            causal,
        )
        return {"causal": causal, "window": limits, **starts}, None
    # From here on as FusedScaleMaskSoftmax.forward_torch_softmax decides, which looks at the type that
    # the module was made with, and prefers a window to a mask.
    num_queries, num_keys = query.shape[0], key.shape[0]
    kind = module.attn_mask_type.name
    if window is None and mask is not None:
        kind = mask_kind(mask, num_queries, num_keys)
        if kind == "other":
            return {}, "an attention mask of its own"
    elif window is None and kind == "padding_causal":
        return {}, "attn_mask_type padding_causal without packed sequences"
    causal = window is None and kind == "causal"
    if num_queries > num_keys and (causal or window is not None):
        return {}, f"{num_queries} queries, of which some see none of {num_keys} keys"
    return {"causal": causal, "window": limits}, None


def accept_backends(context: Context) -> list[str]:
    """Change what upstream's validator would refuse although the kernel serves it."""
    args = context.args
    notes: list[str] = []
    backend = getattr(getattr(args, "attention_backend", None), "name", None)
    asks_for_local = getattr(args, "spec", None) == ["local"]
    if backend == "local" and not asks_for_local and not _transformer_engines(context):
        args.attention_backend = type(args.attention_backend).auto
        notes.append("--attention-backend local: the same as auto in the local spec")
    if context.device != "cpu":
        return notes
    if getattr(args, "deterministic_mode", False) and getattr(args, "use_flash_attn", False):
        args.use_flash_attn = False
        notes.append("--use-flash-attn: attention on the CPU is deterministic, nothing to refuse")
    return notes


def _transformer_engines(context: Context) -> bool:
    """Whether the layers are Transformer Engine's own, with back ends of its own."""
    asked = getattr(context.args, "transformer_impl", None)
    theirs = asked in ("transformer_engine", "inference_optimized")
    return context.device != "cpu" and theirs and te_installed()


def choose_backend(context: Context) -> list[str]:
    """Also say which of CUDA's kernels these arguments get, and why not a better one."""
    notes = accept_backends(context)
    preset = getattr(context.args, "accel_preset", None) or "fast"
    wanted = preset in ("fast", "max") or getattr(context.args, "accel_fused_attention", None)
    is_split = _given(context.args, "context_parallel_size", 1) != 1  # into calls of parts
    others = _unfused(context) or _transformer_engines(context) or is_split
    if wanted and not others and context.device == "cuda" and torch.cuda.is_available():
        calls = calls_of(context.args, torch.cuda.get_device_capability())
        notes += [f"attention on CUDA, {words}: {describe(call)}" for words, call in calls.items()]
    return notes


def calls_of(args: Any, capability: tuple[int, int]) -> dict[str, Call]:
    """In words -> the call of a training step's attention on one rank, by Megatron's arguments; one for
    each kind of layer, those with a window and those without. Without a model in them, or with values that
    upstream has still to refuse, an example."""
    try:
        if found := _calls_of(args, capability):
            return found
    except (TypeError, ValueError, ArithmeticError) as error:
        logger.info("no attention call can be told from these arguments: %s", error)
    call = Call(capability, torch.bfloat16, 4096, 4096, 1, 32, 8, 128, 128, right=0)
    return {f"an example, {_in_words(call, 0.0)}": call}


def _calls_of(args: Any, capability: tuple[int, int]) -> dict[str, Call]:
    heads = _given(args, "num_attention_heads")
    hidden = _given(args, "hidden_size")
    width = _given(args, "kv_channels") or (hidden // heads if heads and hidden else None)
    if not heads or not width:
        return {}
    groups, value_width = heads, width
    if _given(args, "multi_latent_attention"):
        width = _given(args, "qk_head_dim", 128) + _given(args, "qk_pos_emb_head_dim", 64)
        value_width = _given(args, "v_head_dim", 128)
    elif _given(args, "group_query_attention", True):  # a flag that --yaml-cfg does not have
        groups = _given(args, "num_query_groups") or heads
    ranks = _given(args, "tensor_model_parallel_size", 1)
    tokens = _given(args, "seq_length") or 4096
    is_packed = any(_given(args, name) for name in PACKING)
    dropout = _given(args, "attention_dropout", 0.0)
    half = torch.float16 if _given(args, "fp16") else torch.float32
    plain = Call(
        capability=capability,
        dtype=torch.bfloat16 if _given(args, "bf16") else half,
        num_queries=tokens,
        num_keys=tokens,
        batch=_given(args, "micro_batch_size") or 1,
        heads=max(1, heads // ranks),
        kv_heads=max(1, groups // ranks),
        width=width,
        value_width=value_width,
        sequences=SEQUENCES_OF_A_GRID if is_packed else None,
        same_starts=is_packed,
        right=0,
        dropout=dropout > 0,
        deterministic=bool(_given(args, "deterministic_mode")),
    )
    calls = []
    for window in _windows(args):
        left, right = (NO_LIMIT, 0) if window is None else (max(NO_LIMIT, w) for w in window)
        left, right = (NO_LIMIT if limit >= tokens else limit for limit in (left, right))
        calls.append(plain._replace(left=left, right=right))
    return {_in_words(call, dropout): call for call in calls}


PACKING = ("sft", "dataloader_inter_document_masking", "rl_use_sequence_packing")
"""Flags with which sequences come packed, how many is not known."""


def _given(args: Any, name: str, default: Any = None) -> Any:
    """The value of an argument that is there and not None; of --yaml-cfg, as it is before validation."""
    places = (args, getattr(args, "language_model", None), getattr(args, "model_parallel", None))
    values = (getattr(place, name, None) for place in places)
    return next((value for value in values if value is not None), default)


def _windows(args: Any) -> list[Any]:
    """The windows of the layers, None for those without; as upstream's `is_layer_window_attention`."""
    window, every = _given(args, "window_size"), _given(args, "window_attn_skip_freq")
    if not window:
        return [None]
    if every is None:
        return [window]
    layers = every if isinstance(every, list) else [n % every for n in range(1, every + 1)]
    return [w for w, there in ((window, any(layers)), (None, not all(layers))) if there]


def _in_words(call: Call, dropout: float) -> str:
    """What of a call decides who computes it."""
    widths = dict.fromkeys((call.width, call.value_width))
    window = f"a window of {call.left} and {call.right} keys (-1 for all)"
    parts = [
        "causal" if call.causal else "full" if call.full else window,
        str(call.dtype).removeprefix("torch."),
        f"{call.heads} heads over {call.kv_heads} of {' and '.join(map(str, widths))}",
        f"dropout {dropout:g} while training" if dropout else "no dropout",
    ]
    parts += [f"packs of up to {call.sequences} sequences"] if call.sequences else []
    parts += ["deterministic"] if call.deterministic else []
    return ", ".join(parts)


def _unfused(context: Context) -> str | None:
    backend = getattr(getattr(context.args, "attention_backend", None), "name", None)
    return "--attention-backend unfused asks for upstream's own" if backend == "unfused" else None


FEATURE = Feature(
    name="fused_attention",
    summary="run attention as one kernel that stores no queries x keys, packed sequences included",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    aside=te_has_its_own,
    benchmarks=("attention",),
    unavailable=kernels("attention_fwd"),
    idle=_unfused,
    prepare=choose_backend,
    patches=(
        Patch(
            target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            replacement="accel.patches.fused_attention:forward_fused",
            how="wrap",
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "9965ba02d5a3"),
            why="Upstream stores several tensors of queries x keys for each head.",
        ),
        Patch(
            target="accel.layers.attention:attention",
            replacement="accel.ops:attention",
            why="The layer of the Transformer Engine spec stores tensors of queries x keys without it.",
        ),
    ),
)
