"""Masked softmax on Ascend: see `accel/ops/masked_softmax.py` for the formulas.

`npu_scaled_masked_softmax` hides with -10000 as well, but takes queries and keys that are multiples
of 32 from 32 to 4096 only, and a mask that repeats over batch and heads at most. It scales fp16 in
fp16 (hicann/ops-nn, vfusion/scaled_masked_softmax_v2/op_kernel). Other sizes, and fp16, take plain
PyTorch in fp32.
"""

import functools

import torch
from torch import Tensor

from accel.ops.masked_softmax import HIDDEN

__all__ = ["KERNELS", "backward", "forward"]

MULTIPLE_OF = 32
LARGEST = 4096


def _taken(x: Tensor) -> bool:
    return (
        x.dtype != torch.float16
        and x.numel() > 0
        and all(n % MULTIPLE_OF == 0 and n <= LARGEST for n in x.shape[-2:])
    )


@functools.lru_cache(maxsize=4)
def _square_mask(num_queries: int, num_keys: int, causal: bool, device: torch.device) -> Tensor:
    """[1, 1, Q, K]: later keys, or nothing, is hidden."""
    mask = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=device)
    if causal:
        mask = torch.ones_like(mask).triu(1)
    return mask[None, None]


def _full_mask(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """[1 or B, 1 or H, Q, K], contiguous."""
    num_queries, num_keys = x.shape[-2:]
    if mask is None:
        return _square_mask(num_queries, num_keys, causal, x.device)
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask.expand(*mask.shape[:2], num_queries, num_keys).contiguous()


def _hidden(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    return _square_mask(*x.shape[-2:], True, x.device) if causal else mask


def forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """`accel::masked_softmax_fwd`."""
    if _taken(x):
        full = _full_mask(x, mask, causal)
        return torch.ops.npu.npu_scaled_masked_softmax(x.contiguous(), full, scale, False)
    z = x.float() * scale
    hidden = _hidden(x, mask, causal)
    if hidden is not None:
        z.masked_fill_(hidden, HIDDEN)
    return torch.softmax(z, dim=-1).to(x.dtype).contiguous()


def backward(
    dprobs: Tensor, probs: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """`accel::masked_softmax_bwd`."""
    if _taken(probs):
        full = _full_mask(probs, mask, causal)
        return torch.ops.npu.npu_scaled_masked_softmax_backward(
            dprobs.contiguous(), probs.contiguous(), full, scale, False
        )
    p, dp = probs.float(), dprobs.float()
    dx = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    hidden = _hidden(probs, mask, causal)
    if hidden is not None:
        dx.masked_fill_(hidden, 0.0)
    return dx.to(probs.dtype).contiguous()


KERNELS = {"accel::masked_softmax_fwd": forward, "accel::masked_softmax_bwd": backward}
