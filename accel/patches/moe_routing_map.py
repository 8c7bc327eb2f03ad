"""Routing maps of the token dispatchers on a CPU, where upstream launches Triton kernels.

With ``--enable-experimental`` and ``--moe-permute-fusion``, the flex dispatcher turns the experts of each
token into a map of tokens x experts, and ``--moe-router-padding-for-quantization`` pads each expert's tokens
in it. The functions below compute what these kernels do in PyTorch, with their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.feature import Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_FUSIONS = "megatron.core.fusions"


def indices_to_multihot(
    indices: Tensor, probs_indices: Tensor, num_of_local_experts: int
) -> tuple[Tensor, Tensor]:
    """Which expert takes which token, and how much of it.

    Args:
        indices: `[T, topk]`, an expert of this rank, or -1 for one of another.
        probs_indices: `[T, topk]`.
        num_of_local_experts: E.

    Returns:
        `[T, E]` bool, and `[T, E]` in the dtype of `probs_indices`, 0 where the map is False.
    """
    num_tokens = len(indices)
    elsewhere = num_of_local_experts  # a column that is cut off in the end
    columns = torch.where(indices == -1, elsewhere, indices).long()
    multihot = torch.zeros(num_tokens, elsewhere + 1, dtype=torch.bool, device=indices.device)
    probs = probs_indices.new_zeros(num_tokens, elsewhere + 1)
    multihot = multihot.scatter(1, columns, True)
    probs = probs.scatter(1, columns, probs_indices)
    return multihot[:, :elsewhere].contiguous(), probs[:, :elsewhere].contiguous()


def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """A copy of `[T, E]`, int32, in which each expert has a multiple of `pad_multiple` tokens, if there are
    enough: its first tokens without it are added."""
    from megatron.core.transformer.moe import moe_utils

    return moe_utils.pad_routing_map(routing_map.to(torch.int32, copy=True), pad_multiple)


FEATURE = Feature(
    name="moe_routing_map",
    summary="convert and pad MoE routing maps without Triton",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    patches=(
        Patch(
            target=f"{_FUSIONS}.fused_indices_converter:fused_indices_to_multihot",
            replacement="accel.patches.moe_routing_map:indices_to_multihot",
            why="Upstream's kernel is Triton's, which needs a GPU.",
        ),
        Patch(
            target=f"{_FUSIONS}.fused_pad_routing_map:fused_pad_routing_map",
            replacement="accel.patches.moe_routing_map:pad_routing_map",
            why="Upstream's kernel is Triton's, which needs a GPU.",
        ),
    ),
)
