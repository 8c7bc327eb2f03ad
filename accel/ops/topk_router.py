"""The router of a mixture of experts: scores of all experts, the k best, their probabilities.

    scores         s = softmax(l), sigmoid(l) or sqrt(softplus(l))     over or of each row l of E logits
    choice         the k largest of s + bias (softmax: of s, or of l itself), where groups are limited
                   among those of the best groups; a group is worth its best k / group_topk summed up
    probabilities  softmax before the choice: p = s.   softmax after it: p = softmax of the chosen l
                   the others: p = s / (sum of the chosen s + 1e-20), or s itself for k = 1
                   all times the scaling factor; 0 for experts that were not chosen
    gradient       of p through the chosen s; none through the choice or to the bias

`moe_aux_scores` is what the load-balancing loss looks at: the probabilities of all E experts (s, or
s / sum of s), and the k largest as a map.

Letters     T  tokens;   E  experts;   k  experts for each token
Dtypes      logits: float32, bfloat16 or float16; p in the same. bias: any float. All arithmetic fp32.
Ties        where the k-th and the next value are equal, `torch.topk`'s own choice on this device, which
            is neither the lowest index nor the highest on the CPU: the kernel asks the same function. On
            CUDA it is the lowest index, NaN above all and -0 below 0, and the kernel's choice too.
Saved       logits and the map: E (bytes of a logit + 1) for each token. Scores are computed again.
Moved       forward one read of the logits, one write of p and of the map; backward one read more.
Limits      `unsupported_reason`. A second derivative raises.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops._dispatch import log_fallback, refuse_derivative, unsupported

__all__ = [
    "SCORE_FUNCTIONS",
    "moe_aux_scores",
    "moe_aux_scores_ref",
    "topk_router",
    "topk_router_ref",
    "unsupported_reason",
]

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def topk_router_ref(
    logits: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition of correct, on any device. Same contract as `topk_router`."""
    wide = _wide(logits)
    scores = wide
    if score_function != "softmax" or use_pre_softmax:
        scores = _scores(wide, score_function)
    choice = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
    if group_topk:
        choice = _only_best_groups(choice, topk, num_groups or 1, group_topk)
    indices = choice.topk(topk, dim=1).indices
    p = scores.gather(1, indices)
    if score_function == "softmax":
        p = p if use_pre_softmax else p.softmax(-1)
    elif topk > 1:
        p = p / (p.sum(-1, keepdim=True) + 1e-20)
    p = (p * scaling_factor if scaling_factor else p).to(logits.dtype)
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    return torch.zeros_like(logits).scatter(1, indices, p), routing_map


def moe_aux_scores_ref(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """The definition of correct, on any device. Same contract as `moe_aux_scores`."""
    scores = _scores(_wide(logits), score_function)
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    indices = scores.topk(topk, dim=1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True), scores


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _scores(logits: Tensor, score_function: str) -> Tensor:
    match score_function:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case _:
            return F.softplus(logits).sqrt()


def _only_best_groups(choice: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    groups = choice.unflatten(1, (num_groups, choice.shape[1] // num_groups))
    worth = groups.topk(topk // group_topk, dim=-1).values.sum(-1)
    best = torch.zeros_like(worth, dtype=torch.bool)
    best = best.scatter(1, worth.topk(group_topk, dim=-1).indices, True)
    return groups.masked_fill(~best[..., None], float("-inf")).flatten(1)


def unsupported_reason(logits: Tensor) -> str | None:
    """Why the references compute for valid inputs; None if the kernels do."""
    return unsupported("accel::topk_router_fwd", logits)


torch.library.define(
    "accel::topk_router_fwd",
    "(Tensor logits, int topk, bool use_pre_softmax, int num_groups, int group_topk, float scale,"
    " str score_function, Tensor? expert_bias) -> (Tensor probs, Tensor routing_map)",
)
torch.library.define(
    "accel::topk_router_bwd",
    "(Tensor dprobs, Tensor logits, Tensor routing_map, int topk, bool use_pre_softmax, float scale,"
    " str score_function) -> Tensor",
)
torch.library.define(
    "accel::moe_aux_scores_fwd",
    "(Tensor logits, int topk, str score_function) -> (Tensor scores, Tensor routing_map)",
)
torch.library.define(
    "accel::moe_aux_scores_bwd",
    "(Tensor dscores, Tensor logits, str score_function) -> Tensor",
)
_ops = torch.ops.accel


@torch.library.register_fake("accel::topk_router_fwd")
def _router_fake(logits: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), logits.new_empty(logits.shape, dtype=torch.bool)


@torch.library.register_fake("accel::topk_router_bwd")
def _router_backward_fake(dprobs: Tensor, logits: Tensor, *options: object) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("accel::moe_aux_scores_fwd")
def _aux_fake(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    shape = logits.shape
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.bool)


@torch.library.register_fake("accel::moe_aux_scores_bwd")
def _aux_backward_fake(dscores: Tensor, logits: Tensor, score_function: str) -> Tensor:
    return logits.new_empty(logits.shape)


def _save_router(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    logits, topk, use_pre_softmax, _, _, scale, score_function, _ = inputs
    routing_map = output[1]
    ctx.options = topk, use_pre_softmax, scale, score_function
    ctx.mark_non_differentiable(routing_map)
    ctx.save_for_backward(logits, routing_map.clone())  # Megatron pads the map in place


def _router_gradients(ctx: Any, dprobs: Tensor, _: object) -> tuple[Tensor | None, ...]:
    logits, routing_map = ctx.saved_tensors
    return _ops.topk_router_bwd(dprobs, logits, routing_map, *ctx.options), *[None] * 7


def _save_aux(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.score_function = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits)


def _aux_gradients(ctx: Any, dscores: Tensor, _: object) -> tuple[Tensor | None, ...]:
    (logits,) = ctx.saved_tensors
    return _ops.moe_aux_scores_bwd(dscores, logits, ctx.score_function), None, None


torch.library.register_autograd(
    "accel::topk_router_fwd", _router_gradients, setup_context=_save_router
)
torch.library.register_autograd(
    "accel::moe_aux_scores_fwd", _aux_gradients, setup_context=_save_aux
)
for _name in ("topk_router_bwd", "moe_aux_scores_bwd"):
    refuse_derivative(f"accel::{_name}")


def _check(op: str, logits: Tensor, topk: int, score_function: str) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"{op}: logits must be floating of shape [T, E], got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    if not 1 <= topk <= logits.shape[1]:
        raise ValueError(
            f"{op}: topk must be 1 to {logits.shape[1]}, the number of experts, got {topk}"
        )
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(
            f"{op}: score_function must be one of {', '.join(SCORE_FUNCTIONS)}, "
            f"got {score_function!r}"
        )


def _check_groups(num_experts: int, topk: int, num_groups: int | None, group_topk: int) -> None:
    groups = num_groups or 0
    if groups < 1 or num_experts % groups or not 1 <= group_topk <= groups:
        raise ValueError(
            f"topk_router: {num_experts} experts must divide into num_groups and group_topk be 1 to "
            f"num_groups, got num_groups {num_groups}, group_topk {group_topk}"
        )
    size = num_experts // groups
    if not 1 <= topk // group_topk <= size or topk > group_topk * size:
        raise ValueError(
            f"topk_router: topk {topk} must be {group_topk} (group_topk) to {group_topk * size}, the "
            "experts of so many groups"
        )


def topk_router(
    logits: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The probabilities of the `topk` best experts of each token.

    Args:
        logits: `[T, E]`, any floating dtype.
        topk: experts for each token, 1 to E.
        use_pre_softmax: softmax over all experts, before the choice, instead of over the chosen ones.
        num_groups, group_topk: choose among the experts of the best `group_topk` of `num_groups` equal
            groups; None or 0 for `group_topk` chooses among all.
        scaling_factor: multiplies the probabilities; None or 0 for 1.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        expert_bias: `[E]`, added to the scores for the choice only; not with softmax after the choice.

    Returns:
        probabilities `[T, E]` like the logits, 0 where not chosen; the choice `[T, E]` bool.

    Raises:
        ValueError: a shape, number or name that makes no sense.

    Where `unsupported_reason` has something to say, that is logged once and `topk_router_ref` computes.
    """
    _check("topk_router", logits, topk, score_function)
    if group_topk:
        _check_groups(logits.shape[1], topk, num_groups, group_topk)
    if expert_bias is not None:
        if score_function == "softmax" and not use_pre_softmax:
            raise ValueError("topk_router: expert_bias does not go with softmax after the choice")
        if expert_bias.shape != logits.shape[1:] or expert_bias.device != logits.device:
            raise ValueError(
                f"topk_router: expert_bias must have shape [{logits.shape[1]}] on {logits.device}, "
                f"got {list(expert_bias.shape)} on {expert_bias.device}"
            )
    if reason := unsupported_reason(logits):
        log_fallback("topk_router", reason)
        return topk_router_ref(
            logits,
            topk,
            use_pre_softmax=use_pre_softmax,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
            score_function=score_function,
            expert_bias=expert_bias,
        )
    groups = (num_groups or 0, group_topk) if group_topk else (0, 0)
    scale = scaling_factor or 1.0
    return _ops.topk_router_fwd(
        logits, topk, use_pre_softmax, *groups, scale, score_function, expert_bias
    )


def moe_aux_scores(
    logits: Tensor, topk: int, score_function: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """What a load-balancing loss needs of a router.

    Args:
        logits: `[T, E]`, any floating dtype.
        topk: experts for each token, 1 to E.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".

    Returns:
        the `topk` best experts of each token `[T, E]` bool; the scores of all `[T, E]`, fp32 (fp64 for
        fp64 logits), which sum up to 1 in each row.

    Raises:
        ValueError: a shape, number or name that makes no sense.

    Where `unsupported_reason` has something to say, that is logged once and `moe_aux_scores_ref`
    computes.
    """
    _check("moe_aux_scores", logits, topk, score_function)
    if reason := unsupported_reason(logits):
        log_fallback("moe_aux_scores", reason)
        return moe_aux_scores_ref(logits, topk, score_function)
    scores, routing_map = _ops.moe_aux_scores_fwd(logits, topk, score_function)
    return routing_map, scores
