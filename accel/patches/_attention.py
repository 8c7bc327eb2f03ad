"""What the local spec's `DotProductAttention` was built with, as `accel.ops.attention` takes it."""

from __future__ import annotations

from typing import Any

import torch

from accel.layers.attention import draw_seed

__all__ = ["dropout_of", "scale_of"]


def scale_of(module: Any) -> float:
    """With query-key layer scaling, upstream divides by the layer's number before the product and
    multiplies again before the softmax; fp32 scores need neither."""
    coefficient: float | None = module.scale_mask_softmax.scale
    scale: float = module.softmax_scale
    return scale if coefficient is None else scale * coefficient


def dropout_of(module: Any, device: torch.device) -> dict[str, Any]:
    """A seed from the stream that upstream's dropout would draw from, so that recomputation, which
    restores that stream, drops the same again."""
    dropout = module.attention_dropout
    if not dropout.training or dropout.p == 0:
        return {}
    if module.config.sequence_parallel:
        return {"dropout": dropout.p, "seed": draw_seed(device)}
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        return {"dropout": dropout.p, "seed": draw_seed(device)}
