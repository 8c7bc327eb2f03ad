"""`GroupedLinear`: E linear layers of one size, each on its own rows of one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accel.layers.base import ParallelLayer
from accel.ops import grouped_gemm
from accel.ops._autocast import without_autocast
from accel.ops.grouped_gemm import accumulate_wgrad
from accel.parallel import split_backward
from accel.parallel.linear import (
    Layout,
    cast_by_autocast,
    leave_gradient,
    main_grad_of,
    weight_gradient_added,
)

__all__ = ["GroupedLinear", "add_biases", "grouped_linear"]


def grouped_linear(
    x_TK: Tensor, weights: Sequence[Tensor], tokens_per_expert: Tensor, layout: Layout
) -> Tensor:
    """`[T, K]`, E weights `[N, K]` and counts `[E]` on the host -> `[T, N]`; no communication. Dtypes as in
    `accel.parallel.linear`.

    Raises:
        NotImplementedError: some weights are frozen where gradients are added to `main_grad`, or put off.
    """
    if torch.is_grad_enabled() and (layout.into_main_grad or layout.delayed is not None):
        frozen = [e for e, weight in enumerate(weights) if not weight.requires_grad]
        if 0 < len(frozen) < len(weights):
            raise NotImplementedError(
                f"experts {frozen} of {len(weights)} are frozen: freeze all of a rank's or none, or give "
                "--no-gradient-accumulation-fusion and leave --delay-wgrad-compute out"
            )
    x_TK, layout = cast_by_autocast(x_TK, layout)
    return _GroupedLinear.apply(x_TK, tokens_per_expert, layout, *weights)


def add_biases(
    y_TN: Tensor,
    biases: Sequence[Tensor],
    tokens_per_expert: Tensor,
    scales_T: Tensor | None = None,
) -> Tensor:
    """To each row its expert's bias `[N]`, times the row's scale if there are scales; in the rows' dtype."""
    rows_TN = torch.stack(list(biases)).repeat_interleave(tokens_per_expert.to(y_TN.device), dim=0)
    if scales_T is not None:
        rows_TN = rows_TN * scales_T.view(-1, 1)
    return (y_TN + rows_TN).to(y_TN.dtype)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, x_TK: Tensor, tokens_per_expert: Tensor, layout: Layout, *weights: Tensor
    ) -> Tensor:
        ctx.weights, ctx.layout = weights, layout
        ctx.save_for_backward(x_TK, tokens_per_expert)
        return grouped_gemm(x_TK, _cast(weights, x_TK, layout), tokens_per_expert, transpose_b=True)

    @staticmethod
    @without_autocast
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy_TN,) = grads
        x_TK, counts = ctx.saved_tensors
        weights, layout = ctx.weights, ctx.layout
        dx_TK = None
        if ctx.needs_input_grad[0]:
            detached = [w.detach() for w in weights]
            dx_TK = grouped_gemm(dy_TN, _cast(detached, dy_TN, layout), counts)
        dws: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[3:]):
            part = split_backward.current()
            if layout.delayed is not None:
                layout.delayed.put(lambda: _add_later(weights, dy_TN, x_TK, counts, layout))
            elif part is not None and all(w.is_leaf and w.requires_grad for w in weights):
                part.put_all(
                    weights, lambda: _weight_gradients(weights, dy_TN, x_TK, counts, layout)
                )
            else:
                dws = _weight_gradients(weights, dy_TN, x_TK, counts, layout)
        return dx_TK, None, None, *dws


def _cast(weights: Sequence[Tensor], x: Tensor, layout: Layout) -> Sequence[Tensor]:
    return [w.to(x.dtype) for w in weights] if layout.cast else weights


@torch.no_grad()
def _weight_gradients(
    weights: Sequence[Any], dy_TN: Tensor, x_TK: Tensor, counts: Tensor, layout: Layout
) -> list[Tensor | None]:
    if layout.into_main_grad:
        main_grads = [main_grad_of(w) for w in weights]
        accumulate_wgrad(dy_TN, x_TK, counts, main_grads, transpose_b=True)
        return [weight_gradient_added(w) for w in weights]
    dws = torch.ops.accel.grouped_gemm_wgrad(dy_TN, x_TK, counts, True)
    return list(dws.to(weights[0].dtype).unbind(0))


def _add_later(
    weights: Sequence[Any], dy_TN: Tensor, x_TK: Tensor, counts: Tensor, layout: Layout
) -> None:
    dws = _weight_gradients(weights, dy_TN, x_TK, counts, layout)
    for weight, dw in zip(weights, dws, strict=True):
        leave_gradient(weight, dw)


class GroupedLinear(ParallelLayer):
    """E layers `y = x W_e^T + b_e`; the rows of x lie expert after expert.

    Args:
        num_gemms: E.
        parallel_mode: which dimension is split; there is no communication either way: Megatron's token
            dispatcher does that.
        shared: `ParallelLayer`.

    State dict: `weight0 ... [N, K]`, `bias0 ... [N]`, `_extra_state` (empty).
    """

    communicates = False
    single_grouped_weight = single_grouped_bias = False
    """Whether all experts share one parameter: Transformer Engine 2.14 has that."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **shared: Any) -> None:
        super().__init__(in_features, out_features, **shared)
        self.num_gemms = num_gemms
        for e in range(num_gemms):
            self.new_weight(f"weight{e}")
            if self.use_bias:
                self.new_bias(f"bias{e}")

    def forward(
        self,
        x: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """`[T, K]` and how many rows each expert has -> `[T, N]`; with `return_bias` also the biases."""
        counts = torch.as_tensor(m_splits, device="cpu").to(torch.int64)
        weights = [getattr(self, f"weight{e}") for e in range(self.num_gemms)]
        shape = x.shape
        y = grouped_linear(x.reshape(-1, shape[-1]), weights, counts, self.layout)
        y = y.view(*shape[:-1], y.shape[-1])
        if not self.use_bias:
            return (y, []) if self.return_bias else y
        biases = [getattr(self, f"bias{e}") for e in range(self.num_gemms)]
        if self.return_bias:
            return y, biases
        return add_biases(y.view(-1, y.shape[-1]), biases, counts).view_as(y)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )
