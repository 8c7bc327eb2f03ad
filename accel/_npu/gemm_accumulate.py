"""A matrix product added to an fp32 matrix on Ascend: see `accel/ops/gemm_accumulate.py`.

`npu_grouped_matmul_add_` with one group, which is all of K: it wants its first operand as `[K, M]`,
as this op has it. Sizes beyond its documentation take plain PyTorch, from fp32 copies.
"""

import torch
from torch import Tensor

__all__ = ["KERNELS", "accumulate"]

LARGEST = 65535
"""M and N."""


def accumulate(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`accel::gemm_accumulate`."""
    if out.numel() == 0 or len(a) == 0:
        return
    if max(out.shape) > LARGEST:
        out.addmm_(a.t().float(), b.float())
        return
    total = out.contiguous()
    torch.ops.npu.npu_grouped_matmul_add_(
        total,
        a.contiguous(),
        b.contiguous(),
        torch.full((1,), len(a), dtype=torch.int64, device=a.device),
        transpose_x=True,
        transpose_weight=False,
        group_type=2,
    )
    if total is not out:
        out.copy_(total)


KERNELS = {"accel::gemm_accumulate": accumulate}
