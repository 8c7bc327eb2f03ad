"""Collectives over the first dimension of a tensor, each with the work that is still to be waited for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_rows", "reduce_scatter_rows"]


def gather_rows(
    x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> tuple[Tensor, Any]:
    """`[S, ...]` of every rank -> `[ranks * S, ...]`, one rank after the other."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    return out, dist.all_gather_into_tensor(out, x, group=group, async_op=async_op)


def reduce_scatter_rows(
    x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> tuple[Tensor, Any]:
    """`[ranks * S, ...]` on every rank -> `[S, ...]`, this rank's rows of the sum."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return out, dist.reduce_scatter_tensor(out, x, group=group, async_op=async_op)
