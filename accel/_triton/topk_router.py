"""The router in Triton: see `accel/ops/topk_router.py` for the formulas.

A program is one warp with a few whole rows in registers, so that the maxima that choose the experts
never leave the warp. The k largest are found by k passes for a maximum, on integers that order like
the floats do. Where groups are limited, the experts of each group lie padded to a power of two, and
the tile is looked at as [rows, groups, experts of a group].

Ties are those of `torch.topk` on CUDA, which selects by radix: of equal values the lowest index, NaN
above all, -0 below 0. An order of scores that differ by less than a rounding may be another, since
the exponential is.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div, launch, next_power_of_2

TILE = 512
"""Elements of a program: 16 in each thread of its warp, in three tiles at once without a spill."""

SOFTMAX_ALL = tl.constexpr(0)
SOFTMAX_CHOSEN = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
SQRT_SOFTPLUS = tl.constexpr(3)
_SCORES = {"sigmoid": 2, "sqrtsoftplus": 3}

NOT_A_KEY = tl.constexpr(-(2**31))
"""Below the key of every float: what is no expert, or is chosen already."""
LOWEST_KEY = tl.constexpr(-0x7F800001)
"""The key of -inf."""
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _key(values):
    """int32 in the order of the floats: NaN highest, -0 below 0."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values != values, NAN_KEY, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _value(keys):
    """The float of a key."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def _without_highest(keys, places, AXIS: tl.constexpr):
    """The keys, where in every row the first of the highest became NOT_A_KEY; and these highest."""
    highest = tl.max(keys, axis=AXIS, keep_dims=True)
    place = tl.min(tl.where(keys == highest, places, NAN_KEY), axis=AXIS, keep_dims=True)
    return tl.where(places == place, NOT_A_KEY, keys), highest


@triton.jit
def _softplus(x):
    # log(1 + u) = 2 atanh(s) with s = u / (2 + u) up to 1/3, whose series, unlike the logarithm of
    # 1 + u, is exact for small u; what is left out of it is below 2^-29 of the sum.
    u = tl.exp(-tl.abs(x))
    s = u / (u + 2.0)
    z = s * s
    series = z * (1.0 / 15) + 1.0 / 13
    series = series * z + 1.0 / 11
    series = series * z + 1.0 / 9
    series = series * z + 1.0 / 7
    series = series * z + 1.0 / 5
    series = series * z + 1.0 / 3
    series = series * z + 1.0
    return tl.where(x > 0, x, 0.0) + 2.0 * s * series


@triton.jit
def _scores_of(logits, SCORE: tl.constexpr):
    """fp32 [BLOCK_T, BLOCK_E], from logits that are -inf where there is no expert; 0 there."""
    if SCORE == SOFTMAX_ALL:
        e = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        return e / tl.sum(e, axis=1, keep_dims=True)
    elif SCORE == SOFTMAX_CHOSEN:
        return logits
    elif SCORE == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        return tl.sqrt_rn(_softplus(logits))


@triton.jit
def _softmax_of_chosen(logits, chosen):
    """Its numerators, 0 where not chosen, and its denominators [BLOCK_T, 1]."""
    kept = tl.where(chosen, logits, float("-inf"))
    e = tl.exp(logits - tl.max(kept, axis=1, keep_dims=True))
    e = tl.where(chosen, e, 0.0)
    return e, tl.sum(e, axis=1, keep_dims=True)


@triton.jit
def _only_best_groups(
    keys, best, group_topk, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr
):
    """The keys, those of -inf in groups that are not among the best."""
    left = tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_S])
    experts = tl.arange(0, BLOCK_S)[None, None, :]
    worth = tl.zeros([BLOCK_T, BLOCK_G, 1], tl.float32)
    for _ in range(0, best):
        left, highest = _without_highest(left, experts, AXIS=2)
        worth += _value(highest)
    # Groups beyond the last hold no key, whose value is a NaN.
    is_group = tl.max(tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_S]), axis=2) != NOT_A_KEY
    group_keys = tl.where(is_group, _key(tl.reshape(worth, [BLOCK_T, BLOCK_G])), NOT_A_KEY)
    groups = tl.arange(0, BLOCK_G)[None, :]
    for _ in range(0, group_topk):
        group_keys, _ = _without_highest(group_keys, groups, AXIS=1)
    is_best = is_group & (group_keys == NOT_A_KEY)
    whole = tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_S])
    kept = tl.where(is_best[:, :, None] | (whole == NOT_A_KEY), whole, LOWEST_KEY)
    return tl.reshape(kept, [BLOCK_T, BLOCK_G * BLOCK_S])


@triton.jit
def _forward(
    logits_TE, bias_E, probs_TE, routing_map_TE, num_tokens, num_experts, group_size, topk,
    group_best, group_topk, scale,
    SCORE: tl.constexpr, NORMALIZE_ALL: tl.constexpr, NORMALIZE_CHOSEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    places = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]
    experts = (places // BLOCK_S) * group_size + places % BLOCK_S
    is_expert = (places % BLOCK_S < group_size) & (experts < num_experts)
    at = rows * num_experts + experts
    mask = (rows < num_tokens) & is_expert
    logits = tl.load(logits_TE + at, mask=mask, other=0.0).to(tl.float32)
    logits = tl.where(is_expert, logits, float("-inf"))
    scores = _scores_of(logits, SCORE)
    choice = scores
    if bias_E is not None:
        choice += tl.load(bias_E + experts, mask=is_expert, other=0.0).to(tl.float32)
    keys = tl.where(is_expert, _key(choice), NOT_A_KEY)
    if BLOCK_G > 1:
        keys = _only_best_groups(keys, group_best, group_topk, BLOCK_T, BLOCK_G, BLOCK_S)
    for _ in range(0, topk):
        keys, _ = _without_highest(keys, places, AXIS=1)
    chosen = is_expert & (keys == NOT_A_KEY)
    tl.store(routing_map_TE + at, chosen, mask=mask)
    if NORMALIZE_ALL:
        probs = scores
        if SCORE != SOFTMAX_ALL:
            probs = scores / (
                tl.sum(tl.where(is_expert, scores, 0.0), axis=1, keep_dims=True) + 1e-20
            )
    else:
        if SCORE == SOFTMAX_CHOSEN:
            e, total = _softmax_of_chosen(logits, chosen)
            probs = e / total * scale
        elif NORMALIZE_CHOSEN:
            total = tl.sum(tl.where(chosen, scores, 0.0), axis=1, keep_dims=True) + 1e-20
            probs = scores / total * scale
        else:
            probs = scores * scale
        probs = tl.where(chosen, probs, 0.0)
    tl.store(probs_TE + at, probs.to(probs_TE.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dprobs_TE, logits_TE, chosen_TE, dlogits_TE, num_tokens, num_experts, scale,
    SCORE: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """With g = dprobs * scale at the chosen experts, of which `chosen_TE` None chooses all:

    softmax      dlogit = p (g - sum(p g))
    the others   dscore = (g - sum(p g)) / (sum of the chosen scores), dlogit = dscore dscore/dlogit
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    mask = (rows < num_tokens) & (experts < num_experts)
    at = rows * num_experts + experts
    logits = tl.load(logits_TE + at, mask=mask, other=0.0).to(tl.float32)
    logits = tl.where(experts < num_experts, logits, float("-inf"))
    chosen = mask
    if chosen_TE is not None:
        chosen = tl.load(chosen_TE + at, mask=mask, other=0) != 0
    g = tl.load(dprobs_TE + at, mask=chosen, other=0.0).to(tl.float32) * scale
    if SCORE == SOFTMAX_CHOSEN:
        e, total = _softmax_of_chosen(logits, chosen)
        p = e / total
        dlogits = p * (g - tl.sum(p * g, axis=1, keep_dims=True))
    else:
        scores = _scores_of(logits, SCORE)
        kept = tl.where(chosen, scores, 0.0)
        dots = tl.sum(kept * g, axis=1, keep_dims=True)
        if SCORE == SOFTMAX_ALL:
            dlogits = scores * (g - dots)
        else:
            slope = scores * (1.0 - scores)
            if SCORE == SQRT_SOFTPLUS:
                u = tl.exp(-tl.abs(logits))  # of logits below -88.7 exp(-logits) would be infinite
                slope = tl.where(logits > 0, 1.0, u) / (1.0 + u) / (2.0 * scores)
            if NORMALIZE:
                total = tl.sum(kept, axis=1, keep_dims=True) + 1e-20
                g = (g - dots / total) / total
            dlogits = tl.where(chosen, g * slope, 0.0)
    tl.store(dlogits_TE + at, dlogits.to(dlogits_TE.dtype.element_ty), mask=mask)


def _score(name: str, *, softmax_of_all: bool) -> int:
    if name == "softmax":
        return SOFTMAX_ALL.value if softmax_of_all else SOFTMAX_CHOSEN.value
    if name not in _SCORES:
        raise ValueError(
            f"topk_router: score_function must be softmax, sigmoid or sqrtsoftplus, got {name!r}"
        )
    return _SCORES[name]


def _check_topk(logits: Tensor, topk: int) -> None:
    if logits.ndim != 2 or not 1 <= topk <= logits.shape[1]:
        raise ValueError(
            f"topk_router: topk must be 1 to the number of experts, got {topk} and logits "
            f"{list(logits.shape)}"
        )


def _check_groups(num_experts: int, topk: int, num_groups: int, group_topk: int) -> None:
    size = num_experts // max(num_groups, 1)
    if (
        num_groups < 1
        or num_experts % num_groups
        or not 1 <= group_topk <= num_groups
        or not 1 <= topk // group_topk <= size
        or topk > group_topk * size
    ):
        raise ValueError(
            f"topk_router: {num_experts} experts, topk {topk} do not fit num_groups {num_groups}, "
            f"group_topk {group_topk}"
        )


def _check_like(name: str, t: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if t.shape != shape or t.dtype != dtype:
        raise ValueError(
            f"topk_router backward: {name} must be {dtype} {list(shape)}, got {t.dtype} "
            f"{list(t.shape)}"
        )


def _choose(
    logits: Tensor, probs: Tensor, bias: Tensor | None, score: int, topk: int,
    groups: tuple[int, int], scale: float, *, normalize_all: bool,
) -> Tensor:  # fmt: skip
    """Fill `probs`; the routing map."""
    num_tokens, num_experts = logits.shape
    routing_map = torch.empty_like(logits, dtype=torch.bool)
    num_groups, group_topk = groups
    size = num_experts // num_groups if num_groups else num_experts
    block_g, block_s = next_power_of_2(max(num_groups, 1)), next_power_of_2(size)
    block_t = max(1, TILE // (block_g * block_s))
    launch(
        _forward, (ceil_div(num_tokens, block_t),),
        logits, bias, probs, routing_map, num_tokens, num_experts, size, topk,
        topk // group_topk if num_groups else 0, group_topk, scale,
        SCORE=score, NORMALIZE_ALL=normalize_all, NORMALIZE_CHOSEN=topk > 1 and score >= 2,
        BLOCK_T=block_t, BLOCK_G=block_g, BLOCK_S=block_s,
        num_warps=_num_warps(block_t * block_g * block_s),
    )  # fmt: skip
    return routing_map


def _num_warps(num_elements: int) -> int:
    """One, unless a row has more experts than one warp holds in registers."""
    return min(8, max(1, num_elements // (2 * TILE)))


def _dlogits(
    dprobs: Tensor, logits: Tensor, chosen: Tensor | None, score: int, scale: float, *, normalize: bool
) -> Tensor:  # fmt: skip
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    num_tokens, num_experts = logits.shape
    block_e = next_power_of_2(num_experts)
    block_t = max(1, TILE // block_e)
    launch(
        _backward, (ceil_div(num_tokens, block_t),),
        dprobs.contiguous(), logits, None if chosen is None else chosen.contiguous(), dlogits,
        num_tokens, num_experts, scale,
        SCORE=score, NORMALIZE=normalize, BLOCK_T=block_t, BLOCK_E=block_e,
        num_warps=_num_warps(block_t * block_e),
    )  # fmt: skip
    return dlogits


def forward(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: int, group_topk: int,
    scale: float, score_function: str, expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`accel::topk_router_fwd`."""
    _check_topk(logits, topk)
    if num_groups != 0:
        _check_groups(logits.shape[1], topk, num_groups, group_topk)
    if expert_bias is not None:
        if expert_bias.shape != logits.shape[1:]:
            raise ValueError(
                f"topk_router: expert_bias must have shape [{logits.shape[1]}], got "
                f"{list(expert_bias.shape)}"
            )
        expert_bias = expert_bias.contiguous()
    logits = logits.contiguous()
    probs = torch.empty_like(logits)
    score = _score(score_function, softmax_of_all=use_pre_softmax)
    # The best of one group are the best of all.
    groups = (num_groups, group_topk) if num_groups > 1 else (0, 0)
    return probs, _choose(
        logits, probs, expert_bias, score, topk, groups, scale, normalize_all=False
    )


def backward(
    dprobs: Tensor, logits: Tensor, routing_map: Tensor, topk: int, use_pre_softmax: bool,
    scale: float, score_function: str,
) -> Tensor:  # fmt: skip
    """`accel::topk_router_bwd`."""
    _check_topk(logits, topk)
    _check_like("dprobs", dprobs, logits.shape, logits.dtype)
    _check_like("routing_map", routing_map, logits.shape, torch.bool)
    score = _score(score_function, softmax_of_all=use_pre_softmax)
    return _dlogits(dprobs, logits, routing_map, score, scale, normalize=topk > 1)


def aux_forward(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """`accel::moe_aux_scores_fwd`."""
    _check_topk(logits, topk)
    logits = logits.contiguous()
    scores = torch.empty_like(logits, dtype=torch.float32)
    score = _score(score_function, softmax_of_all=True)
    return scores, _choose(logits, scores, None, score, topk, (0, 0), 1.0, normalize_all=True)


def aux_backward(dscores: Tensor, logits: Tensor, score_function: str) -> Tensor:
    """`accel::moe_aux_scores_bwd`."""
    _check_topk(logits, 1)
    _check_like("dscores", dscores, logits.shape, torch.float32)
    score = _score(score_function, softmax_of_all=True)
    return _dlogits(dscores, logits, None, score, 1.0, normalize=True)


KERNELS = {
    "accel::topk_router_fwd": forward,
    "accel::topk_router_bwd": backward,
    "accel::moe_aux_scores_fwd": aux_forward,
    "accel::moe_aux_scores_bwd": aux_backward,
}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Mixtral's, Qwen3's and DeepSeek-V3's routers, and 512 experts with fp32 logits."""
    cases = (
        ("E=8", 8, 2, False, 0, 0, 1.0, "softmax"),
        ("E=128", 128, 8, True, 0, 0, 1.0, "softmax"),
        ("E=256 groups", 256, 8, False, 8, 4, 2.5, "sigmoid"),
        ("E=512", 512, 16, False, 0, 0, 1.0, "sqrtsoftplus"),
    )
    for name, num_experts, topk, pre, num_groups, group_topk, scale, score in cases:
        dtype = torch.float32 if num_experts >= 256 else torch.bfloat16
        logits = torch.empty(8192, num_experts, dtype=dtype, device="meta")
        chosen = torch.empty(8192, num_experts, dtype=torch.bool, device="meta")
        bias = torch.empty(num_experts, device="meta") if score == "sigmoid" else None
        yield name, forward, (logits, topk, pre, num_groups, group_topk, scale, score, bias)
        yield name, backward, (logits, logits, chosen, topk, pre, scale, score)
        yield name, aux_forward, (logits, topk, score)
        yield name, aux_backward, (logits.float(), logits, score)
