"""The masked softmax of upstream's unfused attention in one pass.

Where ``fused_attention`` cannot serve a mask (padding masks, ``--reset-attention-mask``), upstream's
attention stores its scores, and ``FusedScaleMaskSoftmax.forward_torch_softmax`` scales, masks and
normalises them in up to five passes, in fp32 only where ``--attention-softmax-in-fp32`` is given.
Here each row is read once and written once, forward and backward, and arithmetic is always fp32. Masks
mean what they mean upstream: hidden scores are -10000, so a query that sees nothing spreads evenly.

A softmax with an offset (attention sinks) is upstream's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.feature import Feature
from accel.ops import masked_softmax
from accel.patches._kernels import kernels
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE, te_has_its_own


@around
def forward_one_pass(
    original: Callable[..., Tensor],
    self: Any,
    input: Tensor,
    mask: Tensor | None,
    softmax_offset: Tensor | None = None,
) -> Tensor:
    from megatron.core.transformer.utils import (
        attention_mask_func,
        get_sliding_window_causal_mask,
    )

    if softmax_offset is not None or self.mask_func is not attention_mask_func:
        return original(self, input, mask, softmax_offset)
    num_queries, num_keys = input.shape[2:]
    causal = False
    if self.window_size is not None:
        mask = get_sliding_window_causal_mask(num_queries, num_keys, self.window_size)
    elif mask is None and num_queries > 1:
        causal = self.attn_mask_type.name == "causal"
        if causal and num_queries != num_keys:
            return original(self, input, mask)  # which refuses
    scale = 1.0 if self.scale is None else self.scale
    return masked_softmax(input, mask, scale=scale, causal=causal)


FEATURE = Feature(
    name="fused_softmax",
    summary="run the masked softmax of attention with masks of its own in one pass",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    aside=te_has_its_own,
    benchmarks=("masked_softmax",),
    unavailable=kernels("masked_softmax_fwd"),
    patches=(
        Patch(
            target="megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward_torch_softmax",
            replacement="accel.patches.fused_softmax:forward_one_pass",
            how="wrap",
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "f12995ec9fbc"),
            why="Upstream reads and writes the scores once for each of scale, mask and softmax.",
        ),
    ),
)
