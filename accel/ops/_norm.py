"""The inputs that make sense for RMSNorm and LayerNorm."""

import torch
from torch import Tensor

__all__ = ["check_norm_inputs"]


def check_norm_inputs(op: str, x: Tensor, **vectors_N: Tensor) -> None:
    """Raise `ValueError` unless every [N] vector fits the last dimension of a floating x."""
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be a floating dtype, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have shape [..., N], got a scalar")
    num_cols = x.shape[-1]
    first = next(iter(vectors_N))
    dtype = vectors_N[first].dtype
    for name, vector_N in vectors_N.items():
        if vector_N.ndim != 1 or vector_N.shape[0] != num_cols:
            raise ValueError(
                f"{op}: {name} must have shape [{num_cols}], the last dimension of x "
                f"{list(x.shape)}, got {list(vector_N.shape)}"
            )
        if vector_N.dtype != dtype:
            raise ValueError(f"{op}: {name} must be {dtype} like {first}, got {vector_N.dtype}")
        if vector_N.dtype != x.dtype and vector_N.dtype != torch.float32:
            raise ValueError(
                f"{op}: {name} must be {x.dtype} like x, or torch.float32, got {vector_N.dtype}"
            )
        if vector_N.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} like x, got {vector_N.device}")
