"""Transformer Engine's operations (`te.pytorch.ops`): pieces of a layer that a `Sequential` runs in turn.

Megatron builds its fused MLPs from them (`--use-transformer-engine-op-fuser`), with the parameters of
layers that exist already. There is no fuser here: each piece is a fused op of its own. Norms and activations
are the layers of those names.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.layers.base import refuse_options
from accel.layers.grouped_linear import add_biases, grouped_linear
from accel.parallel.linear import DelayedGradients, Layout, parallel_linear, reduce_rows

__all__ = [
    "AllReduce",
    "BasicLinear",
    "Bias",
    "GroupedLinear",
    "MakeExtraOutput",
    "ReduceScatter",
    "Sequential",
]


class Sequential(torch.nn.Sequential):
    """Runs its pieces in turn. A piece takes as many of the `extra` inputs as its `num_extra_inputs` says.
    `MakeExtraOutput` puts its input aside; the result is then `(y, *aside)`.

    Raises:
        TypeError: there are more extra inputs than the pieces take.
    """

    def forward(self, x: Tensor, *extra: Tensor) -> Any:
        left, aside = iter(extra), []
        for piece in self:
            if isinstance(piece, MakeExtraOutput):
                aside.append(x)
            else:
                x = piece(x, *itertools.islice(left, getattr(piece, "num_extra_inputs", 0)))
        if unused := len(list(left)):
            raise TypeError(f"Sequential: {unused} of {len(extra)} extra inputs belong to no piece")
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


class GroupedLinear(torch.nn.Module):
    """E layers `y = x W_e^T + b_e`, with `scale_bias` `+ s b_e`; `weight0 ... [N, K]` and `bias0 ... [N]`
    are given afterwards.

    Args:
        num_groups: E.
        delay_wgrad_compute: compute weight gradients in `backward_dw` instead of in the backward.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_options("GroupedLinear", options)
        self.num_groups, self.use_bias, self.scale_bias = num_groups, bias, scale_bias
        self.num_extra_inputs = 2 if scale_bias else 1
        self.delayed = DelayedGradients() if delay_wgrad_compute else None
        self.layout = Layout(into_main_grad=accumulate_into_main_grad, delayed=self.delayed)

    def forward(self, x_TK: Tensor, counts: Tensor, scales_T: Tensor | None = None) -> Tensor:
        """`counts [E]`: how many rows each expert has, expert after expert."""
        counts = counts.to(device="cpu", dtype=torch.int64)
        y_TN = grouped_linear(x_TK, self._all("weight"), counts, self.layout)
        return add_biases(y_TN, self._all("bias"), counts, scales_T) if self.use_bias else y_TN

    def _all(self, name: str) -> list[Tensor]:
        return [self.get_parameter(f"{name}{e}") for e in range(self.num_groups)]

    def need_backward_dw(self) -> bool:
        return self.delayed is not None

    def backward_dw(self) -> None:
        """The weight gradients of the oldest backward that has none yet."""
        if self.delayed is not None:
            self.delayed.compute_next()


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
