"""Scaled dot-product attention, block by block: no tensor of queries x keys is ever stored.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) for one query row q, the keys k_j and values v_j that it
sees, with z the mask of dropout (0 or 1 / (1 - dropout)):

    forward     s_j = scale q k_j      lse = log sum e^(s_j)      p_j = e^(s_j - lse)
                out = sum over j of z_j p_j v_j
    backward    delta = dout out       ds_j = p_j (z_j dout v_j - delta)
                dq = scale sum over j of ds_j k_j
                dk_j = scale sum over queries of ds_j q,   dv_j = sum over queries of z_j p_j dout

Letters     S  tokens, Q of queries and K of keys;  B  batch;  H  heads of q, G heads of k and v,
            H a multiple of G (query head h reads key head h // (H // G));  D  width of a row of q
            and k, E of a row of v;  T  tokens of a pack of sequences
Layout      q [Q, B, H, D], k [K, B, G, D], v [K, B, G, E], out [Q, B, H, E]: Megatron's. A pack is
            [T, H, D] with the T where each sequence starts in `cu_seqlens_q` and `cu_seqlens_k`.
            Any strides; a last dimension that is not contiguous is copied first.
Mask        Query i sees key j if -left <= j - (i + K - Q) <= right: the last query is aligned with
            the last key ("bottom right", as in FlashAttention and Transformer Engine), which is what
            a sequence that goes on after a cache of keys needs. Causal is right = 0. A query that
            sees no key has out = 0, lse = -inf and passes on no gradient.
Dtypes      q, k, v, out and gradients: one of float32, bfloat16, float16. Scores, softmax and sums
            are fp32; p and ds are rounded to bf16 to be multiplied where the inputs are bf16.
Offset      One more key of value 0 in every row, with a score for each head (an attention sink): the result
            of the other keys takes it in afterwards, whatever computed it (`join_offset`), so that the
            backward above holds as it stands. doffset = - sum over queries of e^(offset - lse) delta.
Dropout     z depends on seed, sequence (in the batch or pack), head, query and key alone:
            `dropout_mask_ref`. Backward draws it again. For a part of a larger attention the seed has the
            places of its first sequence, head, query and key beside it: the part drops what the whole would.
Saved       q, k, v, out and lse (4 B H Q bytes).
FLOPs       forward 4 B H Q K D, backward 10 B H Q K D; half of each if causal.
Order       dk and dv are summed in one order: the number of threads changes no bit.
CUDA        The fastest library that takes the call, or accel's Triton kernel: `_attention_backends`. The
            values of cu_seqlens are not checked there, which would wait for the device, as the reference
            does. Rows have at most 1024 bytes. Only under `torch.use_deterministic_algorithms` do all of them
            sum in one order.
Limits      `unsupported_reason`. No additive or arbitrary mask. lse has no gradient, and a second derivative
            raises.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.ops._dispatch import log_fallback, missing_kernel, refuse_derivative, unsupported_dtype
from accel.ops._placement import check_at_hand

__all__ = [
    "SEED_AND_PLACES",
    "attention",
    "attention_gradients",
    "attention_gradients_ref",
    "attention_ref",
    "dropout_mask_ref",
    "join_offset",
    "largest_scores",
    "offset_gradient",
    "unsupported_reason",
]

NO_LIMIT = -1
SEED_AND_PLACES = 5
"""Numbers of a seed that says where its part of a larger attention begins: the seed, then the first sequence,
head, query and key."""
QUERIES_DRAWN = 64
"""The place of the first query is a multiple of it: random bits come for so many queries at once."""
QUERIES_AT_ONCE = 256
"""The largest scores are looked for in slices of so many queries, of which alone there are scores."""
WIDEST_ROW = 1024
"""Bytes of a row of q, k or v on CUDA: blocks of wider ones may not fit the 99 KiB of shared memory that all
GPUs from sm_80 on have."""


def dropout_mask_ref(
    seed: Tensor, dropout: float, sequence: int, num_heads: int, num_queries: int, num_keys: int
) -> Tensor:
    """What dropout multiplies the probabilities of one sequence with: 0 or 1 / (1 - dropout).

    Philox4x32-10 (Salmon et al. 2011) under the two halves of `seed` (one int64). Counter
    (key, 16 (query // 64) + query % 16, head, sequence) gives 4 words of 32 bits; word w belongs to
    the query with (query // 16) % 4 = w. An element whose word is below dropout * 2^32 (at most
    2^32 - 1) is dropped. Numbers after the seed are the places of the first sequence, head, query and key,
    for all sequences or `[sequences, SEED_AND_PLACES]` for each.

    Returns:
        `[num_heads, num_queries, num_keys]` fp32.
    """
    low = 0xFFFFFFFF
    of_sequence = seed[sequence] if seed.ndim == 2 else seed.reshape(-1)
    places = seed.new_zeros(SEED_AND_PLACES)
    places[: of_sequence.numel()] = of_sequence
    query = torch.arange(num_queries, device=seed.device)[:, None] + places[3]
    words = torch.broadcast_tensors(
        torch.arange(num_keys, device=seed.device) + places[4],
        query // 64 * 16 + query % 16,
        torch.arange(num_heads, device=seed.device)[:, None, None] + places[2],
        sequence + places[1],
    )
    keys = [places[0] & low, places[0] >> 32 & low]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = (
            (second >> 32 & low) ^ words[1] ^ keys[0],
            second & low,
            (first >> 32 & low) ^ words[3] ^ keys[1],
            first & low,
        )
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    which = (query // 16 % 4).expand(words[0].shape)[None]
    bits = torch.stack(words).gather(0, which)[0]
    return (bits >= min(round(dropout * 2**32), 2**32 - 1)).float() / (1 - dropout)


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition of correct, with tensors of queries x keys, on any device. Contract: `attention`.

    The steps of Megatron's unfused attention: scores in the dtype of q, softmax, product. The
    returned lse is fp32 (fp64 for fp64 inputs) and detached.
    """
    left, right = _limits(causal, window)
    scale = _scale(q, softmax_scale)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch = [(q[:, b], k[:, b], v[:, b]) for b in range(q.shape[1])]
    else:
        cu_q = _offsets("cu_seqlens_q", cu_seqlens_q, len(q))
        cu_k = _offsets("cu_seqlens_k", cu_seqlens_k, len(k))
        batch = [
            (q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]])
            for i in range(len(cu_q) - 1)
        ]
    outs, lses = [], []
    for i, (q_i, k_i, v_i) in enumerate(batch):
        keep = None
        if dropout and seed is not None:
            keep = dropout_mask_ref(seed.to(q.device), dropout, i, q.shape[-2], len(q_i), len(k_i))
        out, lse = _one_sequence(q_i, k_i, v_i, scale, left, right, keep, offset)
        outs.append(out)
        lses.append(lse)
    if cu_seqlens_q is None:
        shape = (*q.shape[:-1], v.shape[-1])
        out = torch.stack(outs, 1) if outs else q.new_empty(shape)
        return out, torch.stack(lses) if lses else _empty_lse(q)
    rest = len(q) - sum(len(out) for out in outs)  # tokens of no sequence
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[-1]))
    of_rest = _empty_lse(q)[:, :rest].fill_(-torch.inf)
    lses.append(of_rest if offset is None else of_rest.copy_(offset.detach()[:, None]))
    return torch.cat(outs), torch.cat(lses, 1)


def _offsets(name: str, starts: Tensor, num_tokens: int) -> list[int]:
    """Where sequences of so many tokens start. While tracing nobody knows what the numbers are."""
    offsets: list[int] = starts.tolist()
    if torch.compiler.is_compiling():
        return offsets
    if offsets[:1] != [0] or offsets != sorted(offsets) or offsets[-1] > num_tokens:
        raise ValueError(
            f"attention: {name} must rise from 0 to at most {num_tokens}, got {offsets}"
        )
    return offsets


def _empty_lse(q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[1:-1], q.shape[0]), dtype=dtype)


def _one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    left: int,
    right: int,
    keep: Tensor | None,
    offset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[Q, H, D], [K, G, D], [K, G, E] -> [Q, H, E] and [H, Q]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale
    places = _places(scores.shape[1], scores.shape[2], q.device)
    hidden = _hidden(places, scores.shape[2], left, right)
    scores = scores.masked_fill(hidden, -torch.inf)
    blind = hidden.all(dim=1, keepdim=True)  # sees no key: softmax would be NaN
    if offset is not None:
        last = offset.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores, blind = torch.cat([scores, last], dim=-1), torch.zeros_like(blind)
    probs = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    probs = probs[..., : k.shape[1]]
    if keep is not None:
        probs = probs * keep.to(probs.dtype)
    wide = scores.detach() if q.dtype == torch.float64 else scores.detach().float()
    return (probs @ v).transpose(0, 1), torch.logsumexp(wide, dim=-1)


def _places(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[queries]: where they are among the keys, the last with the last."""
    return torch.arange(num_queries, device=device) + num_keys - num_queries


def _hidden(places: Tensor, num_keys: int, left: int, right: int) -> Tensor:
    """[queries, keys]: what the queries at these places may not see."""
    distance = torch.arange(num_keys, device=places.device) - places[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left != NO_LIMIT:
        hidden |= distance < -left
    if right != NO_LIMIT:
        hidden |= distance > right
    return hidden


def _limits(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    left, right = window if window is not None else (NO_LIMIT, NO_LIMIT)
    return left, 0 if causal else right


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return 1 / math.sqrt(max(1, q.shape[-1])) if softmax_scale is None else softmax_scale


def unsupported_reason(q: Tensor, v: Tensor, softmax_scale: float = 1.0) -> str | None:
    """Why `attention` takes the reference for valid inputs; None if it takes the kernel."""
    if reason := unsupported_dtype(q.dtype):
        return reason
    if not 0 < softmax_scale < math.inf:
        return f"softmax_scale {softmax_scale} (the kernels need it positive)"
    widths, widest = (q.shape[-1], v.shape[-1]), WIDEST_ROW // q.element_size()
    if q.device.type == "cuda" and max(widths) > widest:
        return (
            f"rows of {widths[0]} and {widths[1]} {q.dtype} (the CUDA kernels take up to {widest})"
        )
    return missing_kernel("accel::attention_fwd", q.device.type)


torch.library.define(
    "accel::attention_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed,"
    " float scale, int left, int right, float dropout) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "accel::attention_bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, Tensor? seed, float scale, int left, int right, float dropout)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)
_forward = torch.ops.accel.attention_fwd.default
_backward = torch.ops.accel.attention_bwd.default


@torch.library.register_fake("accel::attention_fwd")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((*q.shape[1:-1], q.shape[0]), dtype=torch.float32)


@torch.library.register_fake("accel::attention_bwd")
def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, seed, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seed)


def _gradients(ctx: Any, dout: Tensor, _: object) -> tuple[Tensor | None, ...]:
    return (*_backward(dout, *ctx.saved_tensors, *ctx.options), *[None] * 7)


torch.library.register_autograd("accel::attention_fwd", _gradients, setup_context=_save)
refuse_derivative("accel::attention_bwd")


def join_offset(out: Tensor, lse: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp of all keys -> of these and one of value 0 with the scores `offset [H]`.

    `out` is changed in place.
    """
    score = offset.to(lse.dtype)[:, None]
    out.mul_(_of_rows(torch.sigmoid(lse - score)))
    return out, torch.logaddexp(lse, score)


def offset_gradient(dout: Tensor, out: Tensor, lse: Tensor, offset: Tensor) -> Tensor:
    """`[H]`, dtype of `offset`, where `out` and `lse` are what `join_offset` gave."""
    prob = torch.exp(offset.to(lse.dtype)[:, None] - lse)
    delta = (dout.to(lse.dtype) * out).sum(-1, keepdim=True)
    return -(delta * _of_rows(prob)).flatten(0, -3).sum(0).view(-1).to(offset.dtype)


def _of_rows(x: Tensor) -> Tensor:
    """`[B, H, Q]` -> `[Q, B, H, 1]`, `[H, T]` -> `[T, H, 1]`."""
    return x.movedim(-1, 0).unsqueeze(-1)


class _WithOffset(torch.autograd.Function):
    """`attention_fwd` and the offset, over the kernel of any device."""

    @staticmethod
    def forward(
        ctx: Any, offset: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, *options)
        out, lse = join_offset(out, lse, offset)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(offset, q, k, v, out, lse, *options[:3])
        ctx.options = options[3:]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        offset, q, k, v, out, lse, *rest = ctx.saved_tensors
        of_offset = None
        if ctx.needs_input_grad[0]:
            of_offset = offset_gradient(dout, out, lse, offset)
        of_qkv = _backward(dout, q, k, v, out, lse, *rest, *ctx.options)
        return of_offset, *of_qkv, *[None] * 7


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`softmax(softmax_scale q k^T) v` over the keys that each query sees.

    Args:
        q: `[Q, B, H, D]`, float32, bfloat16 or float16. A pack of sequences: `[T, H, D]`.
        k: `[K, B, G, D]` (`[T, G, D]`), dtype and device of q; H is a multiple of G.
        v: `[K, B, G, E]` (`[T, G, E]`).
        softmax_scale: 1 / sqrt(D) if None.
        causal: queries see no later keys; the last query is aligned with the last key.
        window: how many keys before and after its own a query sees, -1 for all; `causal` sets the
            second to 0.
        cu_seqlens_q, cu_seqlens_k: `[sequences + 1]` int32 or int64, where each sequence of a pack
            starts, from 0, and where the last one ends, on the CPU or the device of q. Tokens after it
            get 0.
        dropout: the probability, 0 <= dropout < 1, that a key is dropped from a query.
        seed: one int64 on the CPU or the device of q, what decides which; needed with dropout. Or
            `[SEED_AND_PLACES]` int64, or `[sequences, SEED_AND_PLACES]`: then come the places of the first
            sequence, head, query (a multiple of 64) and key in a larger attention, of which this is a part
            and drops the same.
        offset: `[H]`, floating, on the device of q: the score of one more key, of value 0, that every query
            of the head sees, not scaled (an attention sink; zeros: softmax off by one).

    Returns:
        out: `[Q, B, H, E]` (`[T, H, E]`), dtype of q, contiguous. With an offset it is rounded twice.
        lse: `[B, H, Q]` (`[H, T]`) fp32, the logarithm of the sum of exponentials, the offset's among them;
            no gradient.

    Raises:
        ValueError: inputs of the wrong rank, dtype, device, or shapes that do not fit together; on the
            CPU and from the reference, sequences of a pack that fall or end behind its tokens.

    Where `unsupported_reason` has something to say, that is logged once and `attention_ref`
    computes instead.
    """
    _check(q, k, v, window, cu_seqlens_q, cu_seqlens_k, dropout, seed)
    if offset is not None:
        _check_offset(offset, q)
    scale = _scale(q, softmax_scale)
    if reason := unsupported_reason(q, v, scale):
        log_fallback("attention", reason)
        return attention_ref(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=causal,
            window=window,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dropout=dropout,
            seed=seed,
            offset=offset,
        )
    options = (cu_seqlens_q, cu_seqlens_k, seed, scale, *_limits(causal, window), dropout)
    if offset is None:
        return _forward(q, k, v, *options)
    out, lse = _WithOffset.apply(offset, q, k, v, *options)
    return out, lse


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Raise `ValueError` for what makes no sense on any device."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("attention: cu_seqlens_q and cu_seqlens_k go together, got one of them")
    packed = cu_seqlens_q is not None
    layout = "[T, heads, D] with cu_seqlens" if packed else "[S, B, heads, D]"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != (3 if packed else 4):
            raise ValueError(f"attention: {name} must have shape {layout}, got {list(t.shape)}")
        if not t.is_floating_point() or t.dtype != q.dtype:
            raise ValueError(f"attention: {name} must be floating and {q.dtype}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"attention: {name} must be on {q.device} like q, got {t.device}")
    fits = q.shape[-1] == k.shape[-1] and k.shape[:-1] == v.shape[:-1]
    if not fits or (not packed and q.shape[1] != k.shape[1]):
        shapes = [list(t.shape) for t in (q, k, v)]
        raise ValueError(f"attention: q, k and v do not fit together: {shapes}")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"attention: the heads of q must be a multiple of those of k, got "
            f"{q.shape[-2]} and {k.shape[-2]}"
        )
    if q.shape[-1] == 0:
        raise ValueError("attention: q has rows of width 0")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        _check_starts(cu_seqlens_q, cu_seqlens_k, q.device)
    if window is not None and min(window) < NO_LIMIT:
        raise ValueError(f"attention: window must be (left, right), each >= -1, got {window}")
    if not 0 <= dropout < 1:
        raise ValueError(f"attention: dropout must be in [0, 1), got {dropout}")
    if dropout and (
        seed is None
        or seed.dtype != torch.int64
        or (seed.numel() != 1 and seed.shape[-1:] != (SEED_AND_PLACES,))
    ):
        raise ValueError(
            f"attention: dropout needs a seed, one int64 or {SEED_AND_PLACES}, got {seed}"
        )
    if dropout and seed is not None:
        check_at_hand("attention", "seed", seed, q.device, "q")


def _check_offset(offset: Tensor, q: Tensor) -> None:
    heads = q.shape[-2]
    if list(offset.shape) != [heads] or not offset.is_floating_point() or offset.device != q.device:
        raise ValueError(
            f"attention: offset must be floating [{heads}] on {q.device} like q, got {offset.dtype} "
            f"{list(offset.shape)} on {offset.device}"
        )


def _check_starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, device: torch.device) -> None:
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"attention: {name} must be int32 or int64, got {starts.dtype}")
        if starts.ndim != 1 or not starts.numel():
            raise ValueError(
                f"attention: {name} must have shape [sequences + 1], got {list(starts.shape)}"
            )
        check_at_hand("attention", name, starts, device, "q")
    counts = cu_seqlens_q.numel(), cu_seqlens_k.numel()
    if counts[0] != counts[1]:
        raise ValueError(
            f"attention: cu_seqlens_q and cu_seqlens_k must be as long, got {counts[0]} and {counts[1]}"
        )


def _check_results(dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Raise `ValueError` for what `attention` does not give for these q and v."""
    of_rows = [*q.shape[:-1], v.shape[-1]]
    of_lse = [q.shape[1], q.shape[0]] if q.ndim == 3 else [q.shape[1], q.shape[2], q.shape[0]]
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, t, shape, dtype in (
        ("dout", dout, of_rows, q.dtype),
        ("out", out, of_rows, q.dtype),
        ("lse", lse, of_lse, wide),
    ):
        if list(t.shape) != shape or t.dtype != dtype or t.device != q.device:
            raise ValueError(
                f"attention_gradients: {name} must be {dtype} {shape} on {q.device}, "
                f"got {t.dtype} {list(t.shape)} on {t.device}"
            )


def attention_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v where these keys may be a part of those that the queries see.

    The parts' gradients add up to the whole attention's if `out` and `lse` are the whole's.

    Args:
        dout, out: `[Q, B, H, E]` (a pack: `[T, H, E]`), dtype of q.
        lse: `[B, H, Q]` (a pack: `[H, T]`), fp32; fp64 for fp64.
        The others: as for :func:`attention`.

    Returns:
        dq, dk, dv: shapes and dtype of q, k and v.

    Raises:
        ValueError: as :func:`attention`, and where `dout`, `out` or `lse` do not fit q and v.
    """
    _check(q, k, v, window, cu_seqlens_q, cu_seqlens_k, dropout, seed)
    _check_results(dout, q, v, out, lse)
    scale = _scale(q, softmax_scale)
    left, right = _limits(causal, window)
    if unsupported_reason(q, v, scale):
        return attention_gradients_ref(
            dout,
            q,
            k,
            v,
            out,
            lse,
            softmax_scale=scale,
            causal=causal,
            window=window,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dropout=dropout,
            seed=seed,
        )
    return _backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seed, scale, left, right, dropout
    )


def attention_gradients_ref(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_gradients` with tensors of queries x keys, in fp32 (fp64 for fp64), on any device."""
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    scale = _scale(q, softmax_scale)
    left, right = _limits(causal, window)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        places: list[tuple[Any, Any]] = [((slice(None), b),) * 2 for b in range(q.shape[1])]
    else:
        cu_q = _offsets("cu_seqlens_q", cu_seqlens_q, len(q))
        cu_k = _offsets("cu_seqlens_k", cu_seqlens_k, len(k))
        places = [
            (slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])) for i in range(len(cu_q) - 1)
        ]
    for i, (at_q, at_k) in enumerate(places):
        packed = cu_seqlens_q is not None
        num_queries, num_keys = q[at_q].shape[0], k[at_k].shape[0]
        keep = None
        if dropout and seed is not None:
            keep = dropout_mask_ref(
                seed.to(q.device), dropout, i, q.shape[-2], num_queries, num_keys
            )
        grads = _gradients_of_one_sequence(
            *(dout[at_q], q[at_q], k[at_k], v[at_k], out[at_q]),
            lse[:, at_q] if packed else lse[i],
            *(scale, left, right, keep),
        )
        for whole, at, part in zip((dq, dk, dv), (at_q, at_k, at_k), grads, strict=True):
            whole[at] = part.to(whole.dtype)
    return dq, dk, dv


def _gradients_of_one_sequence(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    left: int,
    right: int,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """[Q, H, E], [Q, H, D], [K, G, D], [K, G, E], [Q, H, E], [H, Q]; all at least fp32 inside."""
    heads, groups = q.shape[1], k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, dout, out = (t.to(dtype).transpose(0, 1) for t in (q, dout, out))
    k, v = (t.to(dtype).repeat_interleave(heads // groups, dim=1).transpose(0, 1) for t in (k, v))
    hidden = _hidden(_places(q.shape[1], k.shape[1], q.device), k.shape[1], left, right)
    seen = torch.isfinite(lse).unsqueeze(-1) & ~hidden
    scores = q @ k.transpose(1, 2) * scale - lse.to(dtype).unsqueeze(-1)
    probs = torch.where(seen, scores, -torch.inf).exp()
    dropped = probs if keep is None else probs * keep
    dprobs = dout @ v.transpose(1, 2)
    if keep is not None:
        dprobs = dprobs * keep
    dscores = probs * (dprobs - (dout * out).sum(-1, keepdim=True)) * scale
    dq = (dscores @ k).transpose(0, 1)
    dk, dv = (
        (of_heads.transpose(1, 2) @ rows).transpose(0, 1).unflatten(1, (groups, -1)).sum(2)
        for of_heads, rows in ((dscores, q), (dropped, dout))
    )
    return dq, dk, dv


@torch.no_grad()
def largest_scores(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """The largest scaled score of each head, of those between queries and the keys that they see.

    Scores are in the dtype of q, as in `attention_ref`, and never stored for all queries. Those of a pack are
    computed for all of its keys, of other sequences too, so that the host need not know where they start.

    Args:
        q: `[Q, B, H, D]`, or `[T, H, D]` of a pack, on any device.
        k: `[K, B, G, D]`, or `[T, G, D]`.
        The others: as for :func:`attention`.

    Returns:
        `[H]` fp32; -inf where no query sees a key.
    """
    left, right = _limits(causal, window)
    scale = _scale(q, softmax_scale)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        places, of_q, of_k = _places(q.shape[0], k.shape[0], q.device), None, None
    else:
        places, of_q, of_k = _places_of_pack(q.shape[0], k.shape[0], cu_seqlens_q, cu_seqlens_k)
        q, k = q[:, None], k[:, None]
    (_, batch, heads, _), (num_keys, _, groups, _) = q.shape, k.shape
    largest = q.new_full((heads,), -torch.inf, dtype=torch.float32)
    if not q.numel() or not k.numel():
        return largest
    keys = k.permute(1, 2, 3, 0).flatten(0, 1)  # [B G, D, K]
    for first in range(0, q.shape[0], QUERIES_AT_ONCE):
        at = slice(first, first + QUERIES_AT_ONCE)
        rows = q[at].permute(1, 2, 0, 3).reshape(batch * groups, -1, q.shape[3])
        hidden = _hidden(places[at], num_keys, left, right)
        if of_q is not None:
            hidden |= of_q[at, None] != of_k
        scores = torch.baddbmm(q.new_zeros(1), rows, keys, beta=0, alpha=scale)
        scores = scores.view(batch, heads, -1, num_keys).masked_fill(hidden, -torch.inf)
        largest = torch.maximum(largest, scores.amax(dim=(0, 2, 3)).float())
    return largest


def _places_of_pack(
    num_queries: int, num_keys: int, starts_q: Tensor, starts_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each query is among the keys of all sequences, and the sequences of queries and of keys; of those
    behind the last sequence, numbers that none of the others has."""
    at_q, at_k = (torch.arange(n, device=starts_q.device) for n in (num_queries, num_keys))
    of_q = torch.searchsorted(starts_q[1:], at_q, right=True)
    of_k = torch.searchsorted(starts_k[1:], at_k, right=True)
    behind = of_q == len(starts_q) - 1
    ends = of_q.masked_fill(behind, 0) + 1
    places = at_q - starts_q[ends] + starts_k[ends]
    return places, of_q.masked_fill(behind, -1), of_k
