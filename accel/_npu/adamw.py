"""Adam and AdamW on Ascend: see `accel/ops/adamw.py` for the formulas.

`npu_apply_adam_w.out` is one step of one weight, in place. It multiplies beta^(t - 1), which it is
given, with beta; two zeros turn bias correction off. What it does not know is done before it, in
tensors of the weight's size: a gradient of another dtype, `grad_scale`, and Adam's own decay, which
is added to the gradient.

The op takes its numbers as fp32: beta2 = 0.999 is 0.99900001287 there, in every term.
"""

import torch
from torch import Tensor

from accel.ops.remainder import join_remainder, split_remainder

__all__ = ["KERNELS", "step"]


def step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    copies: list[Tensor],
    remainders: list[Tensor],
    grad_scale: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """`accel::adamw_`."""
    decay = weight_decay if decoupled else 0.0
    for i, (param, grad, m, v, count) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        count += 1
        if param.numel() == 0:
            continue
        w = join_remainder(param, remainders[i]) if remainders else param
        g = grad.float()
        if grad_scale is not None:
            g = g * grad_scale.reshape(())
        if not decoupled and weight_decay:
            g = g.add(w, alpha=weight_decay)
        before = float(count) - 1  # on the host: nothing is waited for
        powers = (beta1**before, beta2**before) if bias_correction else (0.0, 0.0)
        torch.ops.npu.npu_apply_adam_w.out(
            *powers, lr, decay, beta1, beta2, eps, g, None, False, False, var=w, m=m, v=v
        )
        if copies:
            copies[i].copy_(w)
        if remainders:
            for kept, new in zip((param, remainders[i]), split_remainder(w), strict=True):
                kept.copy_(new)


KERNELS = {"accel::adamw_": step}
