"""The router of a mixture of experts on Ascend: see `accel/ops/topk_router.py`.

    npu_moe_gating_top_k                sigmoid, or softmax before the choice; bias, groups that are
                                        worth their best one or two
    npu_moe_gating_top_k_softmax_v2     softmax after the choice (renorm 1)

Both give the chosen ones' probabilities and indices, which are spread over the experts here. The
gradient is plain PyTorch: it starts from the map of what was chosen, where torch-npu's wants indices in
their order. So are `sqrtsoftplus`, other groups, one expert chosen by sigmoid (which is not divided by
its sum), more than 2048 experts, and the scores for the load-balancing loss.
"""

from typing import Any

import torch
from torch import Tensor

from accel.ops.topk_router import moe_aux_scores_ref, topk_router_ref

__all__ = ["KERNELS"]

MOST_EXPERTS = 2048
GROUP_ALIGNMENT = 32
"""Experts of a group count as so many, rounded up, towards the most."""
LARGEST_K = 1024
LEAST_OF_A_GROUP = 3
"""Experts; without groups, of all."""
SOFTMAX, SIGMOID = 0, 1
"""`norm_type`."""
EPS = 1e-20
"""Added to the sum of the chosen, as the op's formula has it."""


def _gating_options(
    num_experts: int,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int,
    group_topk: int,
    score_function: str,
) -> dict[str, Any] | None:
    """Arguments of `npu_moe_gating_top_k`, or None if it has none for this."""
    if score_function == "sigmoid" and topk > 1:
        options = {"norm_type": SIGMOID}
    elif score_function == "softmax" and use_pre_softmax:
        options = {"norm_type": SOFTMAX}
    else:
        return None
    if not LEAST_OF_A_GROUP <= num_experts <= MOST_EXPERTS:
        return None
    if not group_topk:
        return options
    size, summed = num_experts // num_groups, topk // group_topk
    padded = -(-size // GROUP_ALIGNMENT) * GROUP_ALIGNMENT * num_groups
    if summed > 2 or size < LEAST_OF_A_GROUP or padded > MOST_EXPERTS:
        return None
    groups = {"k_group": group_topk, "group_count": num_groups, "group_select_mode": summed - 1}
    return options | groups


def router_forward(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int,
    group_topk: int,
    scale: float,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`accel::topk_router_fwd`."""
    num_experts = logits.shape[1]
    how = (use_pre_softmax, num_groups, group_topk, score_function)
    options = _gating_options(num_experts, topk, *how)
    after = score_function == "softmax" and not use_pre_softmax and not group_topk
    if logits.numel() and options is not None:
        # fp32, as the op computes: neither the bias nor the result is rounded before its time
        chosen, indices, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits.float().contiguous(),
            topk,
            bias=None if expert_bias is None else expert_bias.float(),
            renorm=0,
            routed_scaling_factor=scale,
            eps=EPS,
            **options,
        )
    elif logits.numel() and after and topk <= LARGEST_K:
        chosen, indices, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
            logits.float().contiguous(), k=topk, renorm=1
        )
        chosen = chosen * scale
    else:
        return topk_router_ref(
            logits,
            topk,
            use_pre_softmax=use_pre_softmax,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scale,
            score_function=score_function,
            expert_bias=expert_bias,
        )
    indices = indices.long()
    probs = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    probs.scatter_(1, indices, chosen.to(logits.dtype))
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, indices, True)
    return probs, routing_map


def _scores(logits: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    """s and ds/dl of sigmoid or sqrt(softplus), fp32."""
    if score_function == "sigmoid":
        s = logits.sigmoid()
        return s, s * (1 - s)
    s = torch.nn.functional.softplus(logits).sqrt()
    return s, logits.sigmoid() / (2 * s)


def _through_softmax(ds: Tensor, s: Tensor) -> Tensor:
    return s * (ds - (ds * s).sum(-1, keepdim=True))


def router_backward(
    dprobs: Tensor,
    logits: Tensor,
    routing_map: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scale: float,
    score_function: str,
) -> Tensor:
    """`accel::topk_router_bwd`."""
    wide = logits.float()
    dp = (dprobs.float() * scale).masked_fill(~routing_map, 0.0)
    if score_function == "softmax":
        chosen = wide if use_pre_softmax else wide.masked_fill(~routing_map, -torch.inf)
        return _through_softmax(dp, chosen.softmax(-1)).to(logits.dtype).contiguous()
    s, slope = _scores(wide, score_function)
    if topk > 1:
        chosen = s.masked_fill(~routing_map, 0.0)
        total = chosen.sum(-1, keepdim=True) + EPS
        dp = (dp - (dp * chosen).sum(-1, keepdim=True) / total) / total
    return (dp * slope).masked_fill(~routing_map, 0.0).to(logits.dtype).contiguous()


def aux_forward(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """`accel::moe_aux_scores_fwd`."""
    routing_map, scores = moe_aux_scores_ref(logits, topk, score_function)
    return scores.contiguous(), routing_map.contiguous()


def aux_backward(dscores: Tensor, logits: Tensor, score_function: str) -> Tensor:
    """`accel::moe_aux_scores_bwd`."""
    wide = logits.float()
    if score_function == "softmax":
        return _through_softmax(dscores, wide.softmax(-1)).to(logits.dtype).contiguous()
    s, slope = _scores(wide, score_function)
    total = s.sum(-1, keepdim=True) + EPS
    ds = (dscores - (dscores * s).sum(-1, keepdim=True) / total) / total
    return (ds * slope).to(logits.dtype).contiguous()


KERNELS = {
    "accel::topk_router_fwd": router_forward,
    "accel::topk_router_bwd": router_backward,
    "accel::moe_aux_scores_fwd": aux_forward,
    "accel::moe_aux_scores_bwd": aux_backward,
}
