"""A linear layer whose weight is split over a tensor-parallel group.

    column      y = gather(x) W^T + b       W [N / ranks, K]: every rank has its own columns of y
    row         y = reduce(x W^T)           W [N, K / ranks]: every rank has a part of each sum
    backward    dx = dy W, dW = dy^T x, with the conjugate collectives

Letters     T  rows, the product of all dimensions of x but the last;   K  in;   N  out features
Collectives with sequence parallelism `gather` is an all-gather and `reduce` a reduce-scatter over the
            first dimension of x; without it they are the identity and an all-reduce. In the backward
            of a column layer, x is gathered again while dx is formed, and dx is reduced while dW is
            formed. The input part of a split backward leaves both for later, dW and that gather
            (`accel.parallel.split_backward`).
Overlap     where `accel.parallel.linear_overlap` says so, collectives run in pieces beside the product that
            they belong to: the gather of x, the reduction of x W^T, the gather of dy in a row layer, and the
            reduction of dx, which then begins before dx is whole, and goes on beside dW if that is formed.
            A row layer's dW is formed of the gathered dy, or, if it is asked for, added up as dy comes:
            that hides more where dy takes longer than dx, rounds after each piece, and where there is no
            `main_grad` holds an fp32 tensor of the weight's size.
Dtypes      x, W, b: one dtype; under autocast any, and they are cast to its own. dW: that of W.
            `main_grad`: float32, or the dtype of x.
Twice       of a layer that is not split and returns its weight gradient; else what collectives and
            `main_grad` got has no graph, so `create_graph` is an error.
Saved       W; and x as it came in (the rank's own rows under sequence parallelism) if W is trained.
Order       the products, sums and roundings of Megatron's own layers, so their bits; of an overlapped
            product see `accel.parallel.overlapped_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from accel.ops import gemm_accumulate_ref
from accel.ops._autocast import autocasts, without_autocast
from accel.ops._capture import is_capturing
from accel.parallel import linear_overlap, split_backward
from accel.parallel.collectives import gather_rows, reduce_scatter_rows
from accel.parallel.overlapped_linear import (
    Plan,
    begin_matmul_all_reduce,
    begin_matmul_reduce_scatter,
    gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

__all__ = [
    "DelayedGradients",
    "Layout",
    "cast_by_autocast",
    "leave_gradient",
    "main_grad_of",
    "parallel_linear",
    "reduce_rows",
    "weight_gradient_added",
]

accumulate = gemm_accumulate_ref
"""`accumulate(main_grad_NK, dy_TN, x_TK)` adds a weight gradient to an fp32 main gradient."""

_HAS_SPARSE = ("cpu", "cuda")
"""Types of devices with sparse tensors."""


class DelayedGradients:
    """Weight gradients whose work waits until somebody asks for it, oldest first."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)

    def compute_next(self) -> None:
        """Raises IndexError if none waits."""
        self._waiting.pop(0)()


@dataclass(frozen=True)
class Layout:
    """How a linear layer is split, and where its weight gradient goes."""

    mode: Literal["column", "row"] | None = None
    """None: not split, no communication."""
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    into_main_grad: bool = False
    """Add the weight gradient to `weight.main_grad` instead of returning it."""
    delayed: DelayedGradients | None = None
    """Leave the weight gradient here instead of computing it in the backward."""
    taken: Callable[[Tensor], bool] | None = None
    """Given dy: whether somebody else computes the weight gradient from it."""
    overlap_gather: bool = True
    overlap_reduce: bool = True
    """Whether products may overlap with their collectives, in the forward and the backward."""
    cast: bool = False
    """Multiply a copy of the weight in the dtype of x; `cast_by_autocast` says so."""

    @property
    def split(self) -> bool:
        return self.mode is not None and self.group is not None and self.group.size() > 1


def parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
    """`x W^T + bias`, with the collectives of `layout`.

    Args:
        x: `[..., K]`; under sequence parallelism a column layer takes its own rows, the first
            dimension divided by the ranks.
        weight: `[N, K]`, the part of this rank.
        bias: `[N]` or None; a row layer adds it after the reduction, so it must be whole there.

    Returns:
        `[..., N]`; under sequence parallelism the first dimension is multiplied (column) or divided
        (row) by the ranks.

    Raises:
        ValueError: a last dimension that does not fit, or a first one that the ranks cannot divide.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"parallel_linear: the last dimension of x is {x.shape[-1]}, the weight {list(weight.shape)} "
            f"takes {weight.shape[1]}"
        )
    x, layout = cast_by_autocast(x, layout)
    bias = bias.to(x.dtype) if bias is not None and layout.cast else bias
    if layout.mode != "row" or not layout.split:
        return _Linear.apply(x, weight, bias, layout)
    if linear_overlap.current() is not None:
        y = _OverlappedRow.apply(x, weight, layout)
    else:
        y = reduce_rows(_Linear.apply(x, weight, None, layout), layout)
    return y if bias is None else y + bias


def cast_by_autocast(x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Under autocast x in its dtype, and a layout that takes weights of another. These are cast within the
    product, which needs the parameter itself: it has `main_grad`."""
    if not autocasts(x):
        return x, layout
    return x.to(torch.get_autocast_dtype(x.device.type)), replace(layout, cast=True)


def reduce_rows(y: Tensor, layout: Layout) -> Tensor:
    """The sum over the ranks of what each row-parallel product gave; under sequence parallelism its
    own rows of it."""
    return _Reduce.apply(y, layout)


class _Linear(torch.autograd.Function):
    """The product, and in a column layer what comes before it."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
        ctx.layout = layout
        ctx.has_bias = bias is not None
        ctx.weight = weight  # the object itself: it carries main_grad
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        weight = weight.to(x.dtype) if layout.cast else weight
        plan = _plan("gather", x, weight.t(), layout) if layout.mode == "column" else None
        if plan is not None:
            assert layout.group is not None
            y = gather_matmul(x, weight.t(), layout.group, plan)[0]
        else:
            y = torch.matmul(_gathered(x, layout)[0], weight.t())
        return y if bias is None else y + bias

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        layout: Layout = ctx.layout
        _refuse_create_graph(layout)
        weight = weight.to(dy.dtype) if layout.cast else weight
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        taken = needs_weight and _is_taken(dy, layout)
        needs_weight = needs_weight and not taken and not _put_off(ctx.weight, dy, x, layout)
        plan = None
        if needs_x and layout.mode == "column":
            now = needs_weight and layout.delayed is None
            beside = partial(_trial, ctx.weight, dy, weight, x, layout) if now else None
            plan = _plan(
                "reduce", dy, weight, layout, beside, partial(_held, ctx.weight, dy, x, layout)
            )
        dy_TN = dy.reshape(-1, dy.shape[-1])

        def parameters(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            dw = None
            if x is not None:
                dw = _weight_gradient(ctx.weight, dy_TN, x, layout)
            elif taken:
                dw = _of_others(ctx.weight, layout)
            return dw, dy_TN.sum(0) if ctx.has_bias and needs_bias else None

        x = x if needs_weight else None
        dx, (dw, db) = _backward(dy, weight if needs_x else None, x, layout, plan, parameters)
        return dx, dw, db, None


def _backward[Formed](
    dy: Tensor,
    weight: Tensor | None,
    x: Tensor | None,
    layout: Layout,
    plan: Plan | None,
    parameters: Callable[[Tensor | None], Formed],
) -> tuple[Tensor | None, Formed]:
    """dx, if a weight is given; and what is formed of the whole x, if there is one, while dx is reduced."""
    dx = coming = reducing = begun = None
    if x is not None:
        x, coming = _gathered(x, layout, async_op=True)
    if weight is not None and plan is not None:
        begun = _begin_matmul_reduce(dy, weight, layout, plan)
    elif weight is not None:
        dx = dy.matmul(weight)
    if coming is not None:
        coming.wait()
    if dx is not None and layout.mode == "column" and layout.split:
        dx, reducing = _reduced(dx, layout, async_op=True)
    formed = parameters(x)
    if begun is not None:
        dx = begun()
    if reducing is not None:
        reducing.wait()
    return dx, formed


def _held(weight: Any, dy: Tensor, x: Tensor, layout: Layout) -> int:
    """Bytes that `_trial` and a choice by bits take: the whole x and dx, a gradient of the weight, dy."""
    assert layout.group is not None
    gathered = x.nbytes * (layout.group.size() if layout.sequence_parallel else 1)
    gradient = main_grad_of(weight) if layout.into_main_grad else weight
    return 2 * gathered + gradient.nbytes + dy.nbytes


def _trial(weight: Any, dy: Tensor, w: Tensor, x: Tensor, layout: Layout) -> linear_overlap.Beside:
    """The backward pass of a column layer, whose weight gradient nobody gets.

    Args:
        weight: the parameter.
        w: it, in the dtype of dy.
    """
    dy_TN = dy.reshape(-1, dy.shape[-1])
    main_grad = torch.zeros_like(main_grad_of(weight)) if layout.into_main_grad else None

    def form(x: Tensor | None) -> None:
        assert x is not None
        x_TK = x.reshape(-1, x.shape[-1])
        if main_grad is None:
            dy_TN.t().matmul(x_TK)
        else:
            _accumulate(main_grad, dy_TN, x_TK)

    return linear_overlap.Beside(
        gather=partial(_gathered, x, layout),
        product=partial(form, _gathered(x, layout)[0]),
        run=lambda plan: _backward(dy, w, x, layout, plan, form),
    )


class _OverlappedRow(torch.autograd.Function):
    """The product of a row layer and what comes after it, in one."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        ctx.weight = weight
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        weight = weight.to(x.dtype) if layout.cast else weight
        if (plan := _plan("reduce", x, weight.t(), layout)) is not None:
            return _matmul_reduce(x, weight.t(), layout, plan)
        return _reduced(torch.matmul(x, weight.t()), layout)[0]

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        layout: Layout = ctx.layout
        _refuse_create_graph(layout)
        weight = weight.to(dy.dtype) if layout.cast else weight
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = dw = None
        in_pieces = needs_x and needs_weight and _is_summed_in_pieces(ctx.weight, layout)
        plan = None
        if needs_x:
            beside = partial(_row_trial, ctx.weight, dy, weight, x, layout) if in_pieces else None
            held = partial(_row_held, ctx.weight, dy, x, layout)
            plan = _plan("gather", dy, weight, layout, beside, held)
        if plan is not None and in_pieces:
            assert layout.group is not None
            into = main_grad_of(ctx.weight) if layout.into_main_grad else _zeros_of(ctx.weight)
            gradient = _InPieces(into, x, layout.group.size())
            dx, _ = gather_matmul(dy, weight, layout.group, plan, each=gradient.add)
            if layout.into_main_grad:
                return dx, weight_gradient_added(ctx.weight), None
            return dx, into.to(ctx.weight.dtype), None
        if plan is not None:
            assert layout.group is not None
            dx, whole = gather_matmul(dy, weight, layout.group, plan, keep=needs_weight)
            dy = dy if whole is None else whole
        elif layout.sequence_parallel:
            assert layout.group is not None
            dy, _ = gather_rows(dy, layout.group)
        if needs_x and plan is None:
            dx = dy.matmul(weight)
        if needs_weight and _is_taken(dy, layout):
            dw = _of_others(ctx.weight, layout)
        elif needs_weight and not _put_off(ctx.weight, dy, x, layout):
            dw = _weight_gradient(ctx.weight, dy.reshape(-1, dy.shape[-1]), x, layout)
        return dx, dw, None


class _InPieces:
    """The weight gradient of a row layer, added up in fp32 as the rows of dy come."""

    def __init__(self, into_NK: Tensor, x: Tensor, ranks: int) -> None:
        self._into_NK = into_NK
        self._x_RTK = x.reshape(ranks, x.numel() // (ranks * x.shape[-1]), x.shape[-1])

    def add(self, dy_TN: Tensor, owner: int, piece: slice) -> None:
        with torch.no_grad():
            _accumulate(self._into_NK, dy_TN, self._x_RTK[owner, piece])


def _zeros_of(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=torch.float32)


def _is_summed_in_pieces(weight: Any, layout: Layout) -> bool:
    """As asked for, where the gradient is formed here, now, and in fp32."""
    asked = linear_overlap.current()
    if asked is None or not asked.sums_in_pieces or not layout.sequence_parallel:
        return False
    if (
        layout.delayed is not None
        or layout.taken is not None
        or split_backward.current() is not None
    ):
        return False
    return not layout.into_main_grad or main_grad_of(weight).dtype == torch.float32


def _row_held(weight: Any, dy: Tensor, x: Tensor, layout: Layout) -> int:
    """Bytes that `_row_trial` takes: the whole dy twice, dx, and a gradient of the weight."""
    assert layout.group is not None
    return 2 * dy.nbytes * layout.group.size() + x.nbytes + 4 * weight.numel()


def _row_trial(
    weight: Any, dy: Tensor, w: Tensor, x: Tensor, layout: Layout
) -> linear_overlap.Beside:
    """The backward pass of a row layer, whose weight gradient, summed in pieces by a plan, nobody gets.

    Args:
        weight: the parameter.
        w: it, in the dtype of dy.
    """
    assert layout.group is not None
    group, into = layout.group, _zeros_of(weight)
    gradient = _InPieces(into, x, group.size())

    def form(dy: Tensor) -> None:
        _accumulate(into, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))

    def run(plan: Plan | None) -> None:
        if plan is not None:
            gather_matmul(dy, w, group, plan, each=gradient.add)
        else:
            whole, _ = gather_rows(dy, group)
            whole.matmul(w)
            form(whole)

    return linear_overlap.Beside(
        gather=lambda: None, product=partial(form, gather_rows(dy, group)[0]), run=run
    )


class _Reduce(torch.autograd.Function):
    """What comes after the product of a row layer."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        out, _ = _reduced(y, layout)
        if out is y:
            ctx.mark_dirty(y)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        layout: Layout = ctx.layout
        _refuse_create_graph(layout)
        if layout.sequence_parallel:
            assert layout.group is not None
            dy, _ = gather_rows(dy, layout.group)
        return dy, None


def _refuse_create_graph(layout: Layout) -> None:
    """Raises RuntimeError where a gradient's own graph would lack a part."""
    elsewhere = layout.into_main_grad or layout.delayed is not None or layout.taken is not None
    put_off = split_backward.current() is not None
    if torch.is_grad_enabled() and (layout.split or elsewhere or put_off):
        raise RuntimeError(
            "parallel_linear: create_graph=True needs a layer that is not split over ranks and whose weight "
            "gradient is returned at once; other gradients have no graph"
        )


def _plan(
    kind: Literal["gather", "reduce"],
    x: Tensor,
    w: Tensor,
    layout: Layout,
    beside: Callable[[], linear_overlap.Beside] | None = None,
    held: Callable[[], int] = int,
) -> Plan | None:
    """How the product of x `[..., K]` and w `[K, N]` overlaps with its collective, if there is one."""
    asked = linear_overlap.current()
    allowed = layout.overlap_gather if kind == "gather" else layout.overlap_reduce
    if asked is None or not allowed or not layout.split:
        return None
    assert layout.group is not None
    if kind == "gather":
        if not layout.sequence_parallel:
            return None
        return asked.plan("gather", x, w, layout.group, beside, held)
    if not layout.sequence_parallel:
        return asked.plan("all_reduce", x, w, layout.group, beside, held)
    if x.shape[0] % layout.group.size():
        return None  # what reduces will say so
    return asked.plan("reduce_scatter", x, w, layout.group, beside, held)


def _matmul_reduce(x: Tensor, w: Tensor, layout: Layout, plan: Plan) -> Tensor:
    assert layout.group is not None
    product = matmul_reduce_scatter if layout.sequence_parallel else matmul_all_reduce
    return product(x, w, layout.group, plan)


def _begin_matmul_reduce(x: Tensor, w: Tensor, layout: Layout, plan: Plan) -> Callable[[], Tensor]:
    assert layout.group is not None
    begin = begin_matmul_reduce_scatter if layout.sequence_parallel else begin_matmul_all_reduce
    return begin(x, w, layout.group, plan)


def _is_taken(dy: Tensor, layout: Layout) -> bool:
    return layout.taken is not None and layout.taken(dy)


def _of_others(weight: Any, layout: Layout) -> Tensor | None:
    """What is returned for a weight gradient that others compute: its hooks run all the same."""
    if not layout.into_main_grad or split_backward.current() is not None:
        return None
    return weight_gradient_added(weight)


def _put_off(weight: Any, dy: Tensor, x: Tensor, layout: Layout) -> bool:
    """Leave the weight gradient to the weights' part of a split backward, if this is its input part."""
    part = split_backward.current()
    if part is None or layout.delayed is not None or not weight.is_leaf:
        return False

    def work() -> Tensor | None:
        whole, _ = _gathered(x, layout)
        return _weight_gradient(weight, dy.reshape(-1, dy.shape[-1]), whole, layout)

    part.put(weight, work)
    return True


def _weight_gradient(weight: Any, dy_TN: Tensor, x: Tensor, layout: Layout) -> Tensor | None:
    x_TK = x.reshape(-1, x.shape[-1])
    if layout.delayed is None:
        return _weight_gradient_now(weight, dy_TN, x_TK, layout)
    layout.delayed.put(
        lambda: leave_gradient(weight, _weight_gradient_now(weight, dy_TN, x_TK, layout))
    )
    return None


def _weight_gradient_now(weight: Any, dy_TN: Tensor, x_TK: Tensor, layout: Layout) -> Tensor | None:
    if not layout.into_main_grad:
        return dy_TN.t().matmul(x_TK).to(weight.dtype)
    with torch.no_grad():
        accumulate_into_main_grad(weight, dy_TN, x_TK)
    return weight_gradient_added(weight)


def leave_gradient(weight: Tensor, dw: Tensor | None) -> None:
    """Outside a backward, what autograd does with the gradient that a backward returns."""
    if dw is not None:
        weight.grad = dw if weight.grad is None else weight.grad.add_(dw)


def accumulate_into_main_grad(weight: Any, dy_TN: Tensor, x_TK: Tensor) -> None:
    """`weight.main_grad += dy^T x`; in fp32 without a rounding on the way, else in its own dtype."""
    _accumulate(main_grad_of(weight), dy_TN, x_TK)


def _accumulate(main_grad: Tensor, dy_TN: Tensor, x_TK: Tensor) -> None:
    if main_grad.dtype == torch.float32:
        accumulate(main_grad, dy_TN, x_TK)
    else:
        main_grad.addmm_(dy_TN.t(), x_TK)


def main_grad_of(weight: Any) -> Tensor:
    """Where Megatron sums the gradients of a weight.

    Raises:
        RuntimeError: it has no such place.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "gradient accumulation fusion adds weight gradients to weight.main_grad, which this "
            "weight does not have: wrap the model in Megatron's DistributedDataParallel, or pass "
            "--no-gradient-accumulation-fusion"
        )
    return main_grad


def weight_gradient_added(weight: Any) -> Tensor | None:
    """The gradient that a backward returns once the real one lies in `main_grad`: one that changes nothing,
    so that the gradient's hooks run, where Megatron's data parallelism asks for one.

    Sparse, without an element: a dense one would be at the peak of a step's memory, for the output layer of
    Llama 3 8B 1 GiB, and if an embedding shares the weight until the gradient of that is added to it. Without
    sparse tensors, and in a CUDA graph, of whose results Megatron asks the address, it is dense: zeros if an
    embedding shares the weight (`zero_out_wgrad`), else what memory holds.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if weight.device.type in _HAS_SPARSE and not is_capturing(weight.device):
        return torch.empty(
            weight.shape, dtype=weight.dtype, device=weight.device, layout=torch.sparse_coo
        )
    is_added_to = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if is_added_to else torch.empty_like(weight)


def _gathered(x: Tensor, layout: Layout, *, async_op: bool = False) -> tuple[Tensor, Any]:
    """What a column layer multiplies, and what to wait for before it is read."""
    if layout.mode == "column" and layout.split and layout.sequence_parallel:
        assert layout.group is not None
        return gather_rows(x, layout.group, async_op=async_op)
    return x, None


def _reduced(y: Tensor, layout: Layout, *, async_op: bool = False) -> tuple[Tensor, Any]:
    assert layout.group is not None
    if not layout.sequence_parallel:
        y = y.contiguous()
        return y, dist.all_reduce(y, group=layout.group, async_op=async_op)
    if y.shape[0] % layout.group.size():
        raise ValueError(
            f"sequence parallelism: the first dimension, {y.shape[0]}, is no multiple of the "
            f"{layout.group.size()} ranks of the tensor-parallel group"
        )
    return reduce_scatter_rows(y, layout.group, async_op=async_op)
