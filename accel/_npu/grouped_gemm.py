"""Products of ragged groups on Ascend: see `accel/ops/grouped_gemm.py`.

    npu_grouped_matmul          groups along the rows (group_type 0), or along K for the gradient of the
                                weight (group_type 2, whose x is a transpose)
    npu_grouped_matmul_add_     that gradient added to fp32 main gradients, which are one tensor

The counts go as their cumulative sums in a tensor on the device, the last of which is the number of rows.
Those of the device may sum up to less, or lie; they are clamped as on CUDA. Rows that are no expert's are
then multiplied with the last matrix, are a group of their own for the gradient, whose result is dropped,
and zeros where it is added. A list of up to 128 matrices goes as it is, a longer one is stacked. What the ops
do not take (fp64, rows of 65536 elements, main gradients apart from each other) is one product after another.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel._npu.kept import KEPT
from accel.ops.grouped_gemm import add_wgrad_loop, product_loop, wgrad_loop

__all__ = ["KERNELS", "add_weight_gradient", "product", "weight_gradient"]

HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})
DTYPES = HALF_DTYPES | {torch.float32}
INNER_LIMIT = 65536
"""The last dimension of every operand, as it lies in memory, is below."""
MOST_MATRICES = 128
"""In a list."""
MOST_GROUPS = 1024

BY_ROWS, BY_K = 0, 2
ONE_RESULT = 3
"""`split_item`."""
CUMULATIVE = 0
"""`group_list_type`."""


def _known(tokens_per_expert: Tensor) -> bool:
    """Whether the caller has held them against the number of rows, as those of the host."""
    return tokens_per_expert.device.type == "cpu"


def _ends(
    tokens_per_expert: Tensor, num_rows: int, device: torch.device, *, more_rows: bool = False
) -> Tensor:
    """`[E]`, the cumulative sums on the device, or with `more_rows` `[E + 1]`, a group more: rows that are no
    expert's are that group's, else the last expert's. Counts of the host are copied while it goes on, which
    torch-npu does from pinned memory alone."""

    def find() -> Tensor:
        ends = tokens_per_expert.clamp(0, num_rows).cumsum(0).clamp_(max=num_rows)
        if more_rows:
            ends = F.pad(ends, (0, 1), value=num_rows)
        else:
            ends[-1:].fill_(num_rows)
        if ends.device == device:
            return ends
        return ends.pin_memory().to(device, non_blocking=True)

    about = "ends", num_rows, device, more_rows
    ends: Tensor = KEPT.get(tokens_per_expert, find=find, about=about)
    return ends


def _zeros_from(end: Tensor, rows: Tensor) -> Tensor:
    """`rows` with zeros from that one on, a number on the device."""
    is_beyond = torch.arange(len(rows), device=rows.device) >= end
    return rows.masked_fill(is_beyond[:, None], 0.0)


def _columns(left: Tensor) -> Tensor:
    """`left.T` with the strides of a transposed matrix, which the op looks at even of a single row."""
    dense = left.contiguous()
    if dense.stride(0) != dense.shape[1]:
        dense = dense.clone(memory_format=torch.contiguous_format)
    return dense.T


def _taken(dtype: torch.dtype, num_groups: int, *widths: int) -> bool:
    return (
        dtype in DTYPES
        and num_groups <= MOST_GROUPS
        and all(0 < width < INNER_LIMIT for width in widths)
    )


def product(
    x: Tensor, weights: Sequence[Tensor], tokens_per_expert: Tensor, transpose_b: bool
) -> Tensor:
    """`accel::grouped_gemm`."""
    operands = [w.transpose(-1, -2) if transpose_b else w for w in weights]
    num_cols = operands[0].shape[-1]
    num_groups = len(tokens_per_expert)
    if not len(x) or not num_cols:
        return x.new_zeros(len(x), num_cols)
    if not _taken(x.dtype, num_groups, x.shape[1], num_cols):
        return product_loop(x, list(weights), tokens_per_expert, transpose_b)
    if len(operands) > MOST_MATRICES or (len(operands) == 1 and operands[0].ndim == 2):
        operands = [torch.stack(operands)]
    elif not (
        all(w.is_contiguous() for w in operands) or all(w.mT.is_contiguous() for w in operands)
    ):
        operands = [w.contiguous() for w in operands]
    return torch.ops.npu.npu_grouped_matmul(
        [x.contiguous()],
        operands,
        group_list=_ends(tokens_per_expert, len(x), x.device),
        split_item=ONE_RESULT,
        group_type=BY_ROWS,
        group_list_type=CUMULATIVE,
    )[0]


def weight_gradient(dy: Tensor, x: Tensor, tokens_per_expert: Tensor, transpose_b: bool) -> Tensor:
    """`accel::grouped_gemm_wgrad`."""
    left, right = (dy, x) if transpose_b else (x, dy)
    num_groups = len(tokens_per_expert)
    shape = (num_groups, left.shape[1], right.shape[1])
    if not len(x) or 0 in shape:
        return x.new_zeros(shape)
    known = _known(tokens_per_expert)
    if not _taken(x.dtype, num_groups + (not known), left.shape[1], right.shape[1]):
        return wgrad_loop(dy, x, tokens_per_expert, transpose_b)
    ends = _ends(tokens_per_expert, len(x), x.device, more_rows=not known)
    dw = torch.ops.npu.npu_grouped_matmul(
        [_columns(left)],
        [right.contiguous()],
        group_list=ends,
        split_item=ONE_RESULT,
        group_type=BY_K,
        group_list_type=CUMULATIVE,
    )[0][:num_groups]
    # The documentation does not say what the op leaves where an expert has no rows.
    if known:
        for e in (tokens_per_expert == 0).nonzero()[:, 0].tolist():
            dw[e].zero_()
        return dw
    has_none = ends[:num_groups] == F.pad(ends, (1, 0))[:num_groups]
    return dw.masked_fill_(has_none[:, None, None], 0.0)


def add_weight_gradient(
    dy: Tensor,
    x: Tensor,
    tokens_per_expert: Tensor,
    main_grads: Sequence[Tensor],
    transpose_b: bool,
) -> None:
    """`accel::grouped_gemm_add_wgrad_`."""
    left, right = (dy, x) if transpose_b else (x, dy)
    stack = main_grads[0]
    if not len(x) or stack.numel() == 0:
        return
    taken = (
        stack.ndim == 3
        and stack.dtype == torch.float32
        and stack.is_contiguous()
        and x.dtype in HALF_DTYPES
        and len(stack) <= MOST_MATRICES
        and max(stack.shape[1:]) < INNER_LIMIT
    )
    if not taken:
        add_wgrad_loop(dy, x, tokens_per_expert, list(main_grads), transpose_b)
        return
    if not _known(tokens_per_expert):  # of both: zero times what lies there may be NaN
        end = _ends(tokens_per_expert, len(x), x.device, more_rows=True)[-2]
        left, right = _zeros_from(end, left), _zeros_from(end, right)
    torch.ops.npu.npu_grouped_matmul_add_(
        stack.view(-1, stack.shape[2]),
        left.contiguous(),
        right.contiguous(),
        _ends(tokens_per_expert, len(x), x.device),
        transpose_x=True,
        transpose_weight=False,
        group_type=BY_K,
        group_list_type=CUMULATIVE,
    )


KERNELS = {
    "accel::grouped_gemm_add_wgrad_": add_weight_gradient,
    "accel::grouped_gemm": product,
    "accel::grouped_gemm_wgrad": weight_gradient,
}
