r"""Matrix products of bf16 operands through fp32, for CPUs without bf16 instructions.

.. math:: C_{MN} = \mathrm{bf16}(\beta\, I_{MN} + \alpha \sum_k \mathrm{fp32}(A_{MK})\, \mathrm{fp32}(B_{KN}))

Widening is exact, the sum is fp32, the result is rounded once. Extra memory: fp32 copies of both
operands for the time of the call, 4 (MK + KN + MN) bytes. Replaces the CPU kernels of ``aten::mm``,
``addmm``, ``bmm`` and ``baddbmm``, to which ``matmul`` and ``linear`` decompose; other dtypes are
handed to ATen's out-variants, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["has_native_bf16", "install"]

_aten = torch.ops.aten


def has_native_bf16() -> bool:
    """Whether oneDNN has bf16 products for this CPU (AVX-512 or better)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def install() -> Callable[[], None]:
    """Replace the four CPU kernels; returns the function that gives ATen its own back."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (mm, addmm, bmm, baddbmm):
        library.impl(kernel.__name__, kernel, "CPU", allow_override=True)
    return library._destroy


def mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of two matrices."""
    out_MN = a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=_wide(a_MK))
    return _aten.mm.out(_widened(a_MK), _widened(b_KN), out=out_MN).to(a_MK.dtype)


def bmm(a_BMK: torch.Tensor, b_BKN: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of two batches of matrices."""
    out_BMN = a_BMK.new_empty((a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2]), dtype=_wide(a_BMK))
    return _aten.bmm.out(_widened(a_BMK), _widened(b_BKN), out=out_BMN).to(a_BMK.dtype)


def addmm(
    input: torch.Tensor,
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """``beta * input + alpha * a @ b``; ``input`` broadcasts to ``[M, N]``."""
    out_MN = a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=_wide(a_MK))
    wide = (_widened(input), _widened(a_MK), _widened(b_KN))
    return _aten.addmm.out(*wide, beta=beta, alpha=alpha, out=out_MN).to(a_MK.dtype)


def baddbmm(
    input: torch.Tensor,
    a_BMK: torch.Tensor,
    b_BKN: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """``beta * input + alpha * a @ b`` for batches; ``beta == 0`` ignores what ``input`` holds, NaN
    included."""
    out_BMN = a_BMK.new_empty((a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2]), dtype=_wide(a_BMK))
    wide = (_widened(input), _widened(a_BMK), _widened(b_BKN))
    return _aten.baddbmm.out(*wide, beta=beta, alpha=alpha, out=out_BMN).to(a_BMK.dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x
