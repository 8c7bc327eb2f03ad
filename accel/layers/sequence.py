"""Transformer Engine's operations (`te.pytorch.ops`): pieces of a layer that a `Sequential` runs in turn.

Megatron builds its fused MLPs from them (`--use-transformer-engine-op-fuser`), with the parameters of
layers that exist already. There is no fuser here: each piece is a fused op of its own. Norms and activations
are the layers of those names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.layers.base import refuse_options
from accel.parallel.linear import Layout, parallel_linear, reduce_rows

__all__ = [
    "AllReduce",
    "BasicLinear",
    "Bias",
    "MakeExtraOutput",
    "ReduceScatter",
    "Sequential",
]


class Sequential(torch.nn.Sequential):
    """Runs its pieces in turn. `MakeExtraOutput` puts its input aside; the result is then `(y, *aside)`."""

    def forward(self, x: Tensor) -> Any:
        aside = []
        for piece in self:
            if isinstance(piece, MakeExtraOutput):
                aside.append(x)
            else:
                x = piece(x)
        return (x, *aside) if aside else x


class MakeExtraOutput(torch.nn.Module):
    """Marks where a `Sequential` puts its input aside."""


class BasicLinear(torch.nn.Module):
    """`x W^T` without a bias, split by column or not; `weight` is given afterwards."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_options("BasicLinear", options)
        if tensor_parallel_mode not in ("column", None):
            raise ValueError(f"tensor_parallel_mode={tensor_parallel_mode!r}: use 'column' or None")
        self.layout = Layout(
            "column" if tensor_parallel_mode == "column" else None,
            tensor_parallel_group,
            sequence_parallel,
            accumulate_into_main_grad,
        )
        self.weight: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return parallel_linear(x, self.weight, None, self.layout)


class Bias(torch.nn.Module):
    """`x + b`; `bias` is given afterwards."""

    def __init__(self, size: int, **where: Any) -> None:
        super().__init__()
        self.bias: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class AllReduce(torch.nn.Module):
    """The sum over the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layout = Layout("row", group)

    def forward(self, x: Tensor) -> Tensor:
        return reduce_rows(x, self.layout)


class ReduceScatter(torch.nn.Module):
    """This rank's rows of the sum over the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layout = Layout("row", group, sequence_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        return reduce_rows(x, self.layout)
