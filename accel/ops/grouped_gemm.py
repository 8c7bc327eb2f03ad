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
Limits      `unsupported_reason`: there, torch's products one expert after the other, of counts that the host
            reads. The weight gradient has no derivative; asking for it raises.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from accel.ops._dispatch import log_fallback, missing_kernel, refuse_derivative, unsupported_dtype
from accel.ops.gemm_accumulate import add_product
from accel.ops.host_gemm import has_native_bf16

__all__ = ["accumulate_wgrad", "grouped_gemm", "grouped_gemm_ref", "unsupported_reason"]


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


def unsupported_reason(x: Tensor) -> str | None:
    """Why one expert comes after the other; None if one kernel serves them all."""
    return _reason(x.device.type, x.dtype)


def _reason(device_type: str, dtype: torch.dtype) -> str | None:
    if device_type == "cpu":  # whose products take any dtype
        if _is_replaced(device_type, dtype):
            return "oneDNN has no bf16 products for this CPU"
        return missing_kernel("accel::_products", device_type)
    return unsupported_dtype(dtype) or missing_kernel("accel::grouped_gemm", device_type)


_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see _dispatch.py


def _is_replaced(device_type: str, dtype: torch.dtype) -> bool:
    """Whether somebody else's `aten::mm` may be better: ATen's own `out` variant is a plain loop there."""
    return device_type == "cpu" and dtype == torch.bfloat16 and not has_native_bf16()


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
    """`out = a @ b` for each `out, a, b`, or `out += a @ b`."""
    if not (each := list(products)):
        return
    like = each[0][0]
    if like.device.type == "cpu" and unsupported_reason(like) is None:
        torch.ops.accel._products(*map(list, zip(*each, strict=True)), add)
        return
    for out, a, b in each:
        if add:
            add_product(out, a, b)
        elif _is_replaced(out.device.type, out.dtype):
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

    Where `unsupported_reason` has something to say, that is logged once and torch's products compute.
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    _check(x, weights, isinstance(weight, Tensor), tokens_per_expert, transpose_b)
    if reason := unsupported_reason(x):
        log_fallback("grouped_gemm", reason)
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

    Raises:
        ValueError: as `grouped_gemm`.
    """
    grads = [main_grads] if isinstance(main_grads, Tensor) else list(main_grads)
    stacked = isinstance(main_grads, Tensor)
    _check_accumulation(dy, x, grads, stacked, tokens_per_expert, transpose_b)
    _add_wgrad(dy, x, tokens_per_expert, grads, transpose_b)


def _check(
    x: Tensor, weights: list[Tensor], stacked: bool, tokens_per_expert: Tensor, transpose_b: bool
) -> None:
    op = "grouped_gemm"
    _check_rows(op, "x", "K", x)
    _check_counts(op, tokens_per_expert, x.device)
    num_experts, inner = tokens_per_expert.shape[0], x.shape[1]
    layout = "N, K" if transpose_b else "K, N"
    want = f"[{num_experts}, {layout}]" if stacked else f"{num_experts} times [{layout}]"
    of_experts = _shapes_of_experts(weights, stacked, num_experts)
    fits = bool(of_experts) and all(
        len(s) == 2 and s == of_experts[0] and s[1 if transpose_b else 0] == inner
        for s in of_experts
    )
    if not fits:
        shapes = [list(w.shape) for w in weights]
        raise ValueError(
            f"{op}: weight must have shape {want} with K {inner}, as x has, and E 1 or more, "
            f"got {shapes[0] if stacked else shapes}"
        )
    for w in weights:
        if w.dtype != x.dtype or w.device != x.device:
            raise ValueError(
                f"{op}: weight must be {x.dtype} on {x.device} like x, got {w.dtype} on {w.device}"
            )
    _check_sum(op, tokens_per_expert, x.shape[0])


def _check_accumulation(
    dy: Tensor,
    x: Tensor,
    grads: list[Tensor],
    stacked: bool,
    tokens_per_expert: Tensor,
    transpose_b: bool,
) -> None:
    op = "accumulate_wgrad"
    _check_rows(op, "x", "K", x)
    _check_rows(op, "dy", "N", dy)
    if (dy.dtype, dy.device, dy.shape[0]) != (x.dtype, x.device, x.shape[0]):
        raise ValueError(
            f"{op}: dy must be {x.dtype} [{x.shape[0]}, N] on {x.device} like x, got {dy.dtype} "
            f"{list(dy.shape)} on {dy.device}"
        )
    _check_counts(op, tokens_per_expert, x.device)
    num_experts = tokens_per_expert.shape[0]
    of_expert = [dy.shape[1], x.shape[1]] if transpose_b else [x.shape[1], dy.shape[1]]
    of_experts = _shapes_of_experts(grads, stacked, num_experts)
    if not of_experts or any(s != of_expert for s in of_experts):
        shapes = [list(g.shape) for g in grads]
        want = [num_experts, *of_expert] if stacked else f"{num_experts} times {of_expert}"
        raise ValueError(
            f"{op}: main_grads must have shape {want}, with E 1 or more, got "
            f"{shapes[0] if stacked else shapes}"
        )
    dtypes = dict.fromkeys((torch.float32, x.dtype))
    for g in grads:
        if g.dtype not in dtypes or g.dtype != grads[0].dtype or g.device != x.device:
            allowed = " or ".join(map(str, dtypes))
            raise ValueError(
                f"{op}: main_grads must be {allowed}, like each other and on {x.device}, got {g.dtype} "
                f"on {g.device}"
            )
    _check_sum(op, tokens_per_expert, x.shape[0])


def _check_rows(op: str, name: str, columns: str, rows: Tensor) -> None:
    if rows.ndim != 2 or not rows.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be floating of shape [T, {columns}], got {rows.dtype} {list(rows.shape)}"
        )


def _check_counts(op: str, counts: Tensor, device: torch.device) -> None:
    at_hand = counts.device.type == "cpu" or counts.device == device
    if counts.ndim != 1 or counts.dtype != torch.int64 or not at_hand:
        where = "" if device.type == "cpu" else f" or on {device}"
        raise ValueError(
            f"{op}: tokens_per_expert must be torch.int64 of shape [E] on the cpu{where}, got "
            f"{counts.dtype} {list(counts.shape)} on {counts.device}"
        )


def _shapes_of_experts(matrices: list[Tensor], stacked: bool, num_experts: int) -> list[list[int]]:
    """Of each matrix, or of all in one; none where they are not as many as there are experts."""
    shapes = [list(t.shape) for t in matrices]
    of_experts = [s[1:] for s in shapes if s[:1] == [num_experts]] if stacked else shapes
    fits = num_experts > 0 and len(of_experts) == (1 if stacked else num_experts)
    return of_experts if fits else []


def _check_sum(op: str, counts: Tensor, num_rows: int) -> None:
    if torch.compiler.is_compiling() or counts.device.type != "cpu":
        # Not known while tracing, or not without waiting. What reads the rows must keep to them anyway.
        return
    rows = counts.tolist()
    if min(rows) < 0 or sum(rows) != num_rows:
        raise ValueError(
            f"{op}: tokens_per_expert must not be negative and sum up to {num_rows}, the rows of x, "
            f"got {rows}"
        )
