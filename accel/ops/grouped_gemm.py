"""The products of E ragged groups of rows, each with the matrix of its own expert.

    forward     y[rows of e] = x[rows of e] W[e]           W[e]^T with transpose_b
    backward    dx[rows of e] = dy[rows of e] W[e]^T       dW[e] = x[rows of e]^T dy[rows of e]

Letters     T  rows, those of expert 0 first;   E  experts;   K  columns of x;   N  columns of y
Dtypes      x, W, y and the gradients: one of float32, bfloat16, float16, float64.
            A main gradient that dW is added to: float32 as well, and then no bit of it is rounded to
            less on its way (`gemm_accumulate`).
Saved       x and W, as autograd does anyway, and E counts.
Kernels     The library's, one for each expert that has rows, straight into its rows of the result. On a CPU
            of several threads each takes an expert of its own, but for one that has most of the rows. On
            CUDA one for all experts, which reads the counts on the device: nobody waits for them.
Order       that of the library's products on as many threads.
Limits      The weight gradient has no derivative; asking for it raises.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from accel.ops._dispatch import missing_kernel, refuse_derivative
from accel.ops.gemm_accumulate import add_product
from accel.ops.host_gemm import has_native_bf16

__all__ = ["accumulate_wgrad", "grouped_gemm", "grouped_gemm_ref"]


def grouped_gemm_ref(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    tokens_per_expert: Tensor,
    *,
    transpose_b: bool = False,
) -> Tensor:
    """The definition of correct: one product after the other. Same contract as `grouped_gemm`."""
    groups = x.split(tokens_per_expert.tolist())
    return torch.cat([a @ (w.T if transpose_b else w) for a, w in zip(groups, weight, strict=True)])


torch.library.define(
    "accel::grouped_gemm",
    "(Tensor x, Tensor[] weights, Tensor tokens_per_expert, bool transpose_b) -> Tensor",
)
torch.library.define(
    "accel::grouped_gemm_wgrad",
    "(Tensor dy, Tensor x, Tensor tokens_per_expert, bool transpose_b) -> Tensor",
)
torch.library.define(
    "accel::grouped_gemm_add_wgrad_",
    "(Tensor dy, Tensor x, Tensor tokens_per_expert, Tensor(a!)[] main_grads, bool transpose_b) -> ()",
)
_product = torch.ops.accel.grouped_gemm.default
_wgrad = torch.ops.accel.grouped_gemm_wgrad.default
_add_wgrad = torch.ops.accel.grouped_gemm_add_wgrad_.default


def product_loop(
    x: Tensor, weights: list[Tensor], tokens_per_expert: Tensor, transpose_b: bool
) -> Tensor:
    """`weights`: E matrices, or one [E, ., .]."""
    experts = _matrices(weights)
    y = x.new_empty(x.shape[0], experts[0].shape[0 if transpose_b else 1])
    _multiply(
        (y[rows], x[rows], experts[e].T if transpose_b else experts[e])
        for e, rows in _groups(tokens_per_expert)
    )
    return y


def wgrad_loop(dy: Tensor, x: Tensor, tokens_per_expert: Tensor, transpose_b: bool) -> Tensor:
    """[E, N, K] with transpose_b, [E, K, N] without; 0 for experts without rows."""
    left, right = (dy, x) if transpose_b else (x, dy)
    dw = x.new_empty(len(tokens_per_expert), left.shape[1], right.shape[1])
    groups = dict(_groups(tokens_per_expert))
    _multiply((dw[e], left[rows].T, right[rows]) for e, rows in groups.items())
    for e in set(range(len(dw))) - groups.keys():
        dw[e].zero_()
    return dw


def add_wgrad_loop(
    dy: Tensor, x: Tensor, tokens_per_expert: Tensor, main_grads: list[Tensor], transpose_b: bool
) -> None:
    """`main_grads`: E matrices, or one [E, ., .]."""
    experts = _matrices(main_grads)
    left, right = (dy, x) if transpose_b else (x, dy)
    groups = _groups(tokens_per_expert)
    if experts[0].dtype == x.dtype == dy.dtype:
        _multiply(((experts[e], left[rows].T, right[rows]) for e, rows in groups), add=True)
        return
    for e, rows in groups:
        add_product(experts[e], left[rows].T, right[rows])


torch.library.impl("accel::grouped_gemm", "CompositeExplicitAutograd", product_loop)
torch.library.impl("accel::grouped_gemm_wgrad", "CompositeExplicitAutograd", wgrad_loop)
torch.library.impl("accel::grouped_gemm_add_wgrad_", "CompositeExplicitAutograd", add_wgrad_loop)


def _multiply(products: Iterable[tuple[Tensor, Tensor, Tensor]], add: bool = False) -> None:
    """`out = a @ b` for each `out, a, b`, or `out += a @ b`. Whoever replaced `aten::mm` for bf16 on this CPU
    is asked: there ATen's own `out` variant is a plain loop."""
    if not (each := list(products)):
        return
    like = each[0][0]
    on_host = like.device.type == "cpu"
    replaced = on_host and like.dtype == torch.bfloat16 and not has_native_bf16()
    if on_host and not replaced and missing_kernel("accel::_products", "cpu") is None:
        torch.ops.accel._products(*map(list, zip(*each, strict=True)), add)
        return
    for out, a, b in each:
        if add:
            add_product(out, a, b)
        elif replaced:
            out.copy_(a @ b)
        else:
            torch.mm(a, b, out=out)


def _matrices(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return weights[0].unbind(0) if weights[0].ndim == 3 else weights


def _groups(tokens_per_expert: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for every expert that has any."""
    begin = 0
    for e, count in enumerate(tokens_per_expert.tolist()):
        if count:
            yield e, slice(begin, begin + count)
        begin += count


@torch.library.register_fake("accel::grouped_gemm")
def _product_fake(
    x: Tensor, weights: list[Tensor], tokens_per_expert: Tensor, transpose_b: bool
) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[-2 if transpose_b else -1])


@torch.library.register_fake("accel::grouped_gemm_wgrad")
def _wgrad_fake(dy: Tensor, x: Tensor, tokens_per_expert: Tensor, transpose_b: bool) -> Tensor:
    left, right = (dy, x) if transpose_b else (x, dy)
    return x.new_empty(tokens_per_expert.shape[0], left.shape[1], right.shape[1])


@torch.library.register_fake("accel::grouped_gemm_add_wgrad_")
def _add_wgrad_fake(*args: object) -> None:
    return None


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, tokens_per_expert, ctx.transpose_b = inputs
    ctx.save_for_backward(x, tokens_per_expert, *weights)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, tokens_per_expert, *weights = ctx.saved_tensors
    dx, dw = None, [None] * len(weights)
    if ctx.needs_input_grad[0]:
        dx = _product(dy, weights, tokens_per_expert, not ctx.transpose_b)
    if any(ctx.needs_input_grad[1]):
        stacked = _wgrad(dy, x, tokens_per_expert, ctx.transpose_b)
        dw = [stacked] if weights[0].ndim == 3 else list(stacked.unbind(0))
    return dx, dw, None, None


torch.library.register_autograd("accel::grouped_gemm", _gradients, setup_context=_save)
refuse_derivative("accel::grouped_gemm_wgrad")


def grouped_gemm(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    tokens_per_expert: Tensor,
    *,
    transpose_b: bool = False,
) -> Tensor:
    """Each expert's rows times its matrix.

    Args:
        x: `[T, K]`, any floating dtype; the rows of expert 0 first, then those of expert 1.
        weight: `[E, K, N]`, or `[E, N, K]` with `transpose_b`; or E such matrices.
        tokens_per_expert: `[E]` int64: how many rows each has, 0 included; T in all. On the CPU or on
            the device of x, where nobody looks at them: of counts that sum up to less than T, the rows
            beyond are left undefined.
        transpose_b: the matrices are stored as `[N, K]`, as those of a linear layer are.

    Returns:
        `[T, N]` like x.

    Raises:
        ValueError: an input of the wrong shape, dtype or device; counts that do not sum up to T.
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    _check(x, weights, isinstance(weight, Tensor), tokens_per_expert, transpose_b)
    return _product(x, weights, tokens_per_expert, transpose_b)


def accumulate_wgrad(
    dy: Tensor,
    x: Tensor,
    tokens_per_expert: Tensor,
    main_grads: Tensor | Sequence[Tensor],
    *,
    transpose_b: bool = False,
) -> None:
    """Add the weight gradients of `grouped_gemm` to what the main gradients hold.

    Args:
        dy: `[T, N]`; x: `[T, K]`; tokens_per_expert: `[E]` as above.
        main_grads: `[E, K, N]` (`[E, N, K]` with `transpose_b`), or E such matrices; float32, or the
            dtype of x; no two of them in the same memory. Experts without rows keep theirs.
    """
    grads = [main_grads] if isinstance(main_grads, Tensor) else list(main_grads)
    _add_wgrad(dy, x, tokens_per_expert, grads, transpose_b)


def _check(
    x: Tensor, weights: list[Tensor], stacked: bool, tokens_per_expert: Tensor, transpose_b: bool
) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(
            f"grouped_gemm: x must be floating of shape [T, K], got {x.dtype} {list(x.shape)}"
        )
    counts = tokens_per_expert
    at_hand = counts.device.type == "cpu" or counts.device == x.device
    if counts.ndim != 1 or counts.dtype != torch.int64 or not at_hand:
        where = "" if x.device.type == "cpu" else f" or on {x.device}"
        raise ValueError(
            f"grouped_gemm: tokens_per_expert must be torch.int64 of shape [E] on the cpu{where}, got "
            f"{counts.dtype} {list(counts.shape)} on {counts.device}"
        )
    num_experts = counts.shape[0]
    layout = "N, K" if transpose_b else "K, N"
    want = f"[{num_experts}, {layout}]" if stacked else f"{num_experts} times [{layout}]"
    shapes = [list(w.shape) for w in weights]
    of_experts = [s[1:] for s in shapes if s[:1] == [num_experts]] if stacked else shapes
    inner = x.shape[1]
    fits = len(of_experts) == (1 if stacked else num_experts) > 0 and all(
        len(s) == 2 and s == of_experts[0] and s[1 if transpose_b else 0] == inner
        for s in of_experts
    )
    if not fits or num_experts == 0:
        raise ValueError(
            f"grouped_gemm: weight must have shape {want} with K {inner}, as x has, and E 1 or more, "
            f"got {shapes[0] if stacked else shapes}"
        )
    for w in weights:
        if w.dtype != x.dtype or w.device != x.device:
            raise ValueError(
                f"grouped_gemm: weight must be {x.dtype} on {x.device} like x, got {w.dtype} on "
                f"{w.device}"
            )
    _check_counts(counts, x.shape[0])


def _check_counts(counts: Tensor, num_rows: int) -> None:
    if torch.compiler.is_compiling() or counts.device.type != "cpu":
        # Not known while tracing, or not without waiting. What reads the rows must keep to them anyway.
        return
    rows = counts.tolist()
    if min(rows) < 0 or sum(rows) != num_rows:
        raise ValueError(
            f"grouped_gemm: tokens_per_expert must not be negative and sum up to {num_rows}, the rows "
            f"of x, got {rows}"
        )
