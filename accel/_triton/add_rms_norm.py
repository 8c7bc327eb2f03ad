"""A residual addition and RMSNorm in Triton: the kernels of `rms_norm.py`, which take the addends."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from accel._triton.rms_norm import launch_backward, launch_forward

__all__ = ["KERNELS", "backward", "compile_cases", "forward"]


def forward(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accel::add_rms_norm_fwd`."""
    bias = None if bias is None else bias.contiguous()
    y, total, rstd_T = launch_forward(
        x.contiguous(), residual.contiguous(), bias, weight.contiguous(), eps, zero_centered
    )
    assert total is not None
    return y, total, rstd_T


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd_T: Tensor,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """`accel::add_rms_norm_bwd`."""
    dy, total, weight = dy.contiguous(), total.contiguous(), weight.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    return launch_backward(dy, dtotal, total, weight, rstd_T, zero_centered)


KERNELS = {"accel::add_rms_norm_fwd": forward, "accel::add_rms_norm_bwd": backward}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """A model's widths, without a bias as Llama has it, and once with all that there may be."""
    for num_cols in (4096, 7168, 16384, 20480):
        x = torch.empty(8192, num_cols, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(num_cols, dtype=torch.bfloat16, device="meta")
        rstd_T = torch.empty(8192, device="meta")
        yield f"N={num_cols}", forward, (x, x, None, weight, 1e-5, False)
        yield f"N={num_cols}", backward, (x, x, x, weight, rstd_T, False)
    x = torch.empty(8192, 8192, device="meta")
    weight, rstd_T = torch.empty(8192, device="meta"), torch.empty(8192, device="meta")
    yield "N=8192 fp32 bias", forward, (x, x, weight, weight, 1e-5, True)
    yield "N=8192 fp32", backward, (x, x, x, weight, rstd_T, True)
