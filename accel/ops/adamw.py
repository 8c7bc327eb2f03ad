"""One step of Adam (Kingma and Ba 2015, arXiv:1412.6980) or AdamW (Loshchilov and Hutter 2019,
arXiv:1711.05101) over a list of parameters, in one pass over memory.

    g = grad * grad_scale                        AdamW:  w = w (1 - lr weight_decay)
                                                 Adam:   g = g + weight_decay w
    m = beta1 m + (1 - beta1) g                  t = t + 1
    v = beta2 v + (1 - beta2) g^2
    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)           copy = w

Letters     w  weight ("params"), m  exp_avg, v  exp_avg_sq, t  step, one for each parameter; as in
            `torch.optim.Adam`, whose order of operations is kept, so a checkpoint goes both ways.
            Without bias correction the two 1 - beta^t are 1.
Dtypes      w, m, v: float32 (w is the master weight of a model in bf16 or fp16). grad and copy:
            float32, bfloat16 or float16. t: float32, on the host; or all of them beside CUDA parameters,
            which a CUDA graph needs. All arithmetic is fp32; copy is w rounded to nearest, ties to even.
            Or w is bfloat16 with an int16 remainder (`accel.ops.remainder`): what is stepped is the fp32
            number that both tell, and no copy is needed.
Moved       read grad, w, m, v; write w, m, v, copy: 28 bytes per element where all is fp32 and there
            is no copy, and where w has a remainder. Every tensor once.
Order       element by element: neither the number of threads nor the other tensors change a bit.
Autograd    none: changes its arguments in place, under `torch.no_grad`.
Limits      `unsupported_reason`. No amsgrad (a fifth tensor of traffic, which no Megatron option asks
            for) and no sparse gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.ops._dispatch import KERNEL_DTYPES, log_fallback, missing_kernel
from accel.ops._placement import check_at_hand
from accel.ops.remainder import join_remainder, split_remainder

__all__ = ["adamw", "adamw_ref", "unsupported_reason"]


def adamw_ref(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    remainders: Sequence[Tensor] = (),
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
) -> None:
    """The definition of correct, on any device: torch.optim.Adam's own operations, one by one. Same
    contract as `adamw`."""
    beta1, beta2 = betas
    lists = zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    for i, (param, grad, m, v, step) in enumerate(lists):
        w = join_remainder(param, remainders[i]) if remainders else param
        step += 1
        g = grad.to(w.dtype)
        if grad_scale is not None:
            g = g * grad_scale
        if decoupled:
            w.mul_(1 - lr * weight_decay)
        else:
            g = g.add(w, alpha=weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        t = step.item() if bias_correction else torch.inf
        denominator = (v.sqrt() / (1 - beta2**t) ** 0.5).add_(eps)
        w.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))
        if copies:
            copies[i].copy_(w)
        if remainders:
            for kept, new in zip((param, remainders[i]), split_remainder(w), strict=True):
                kept.copy_(new)


def unsupported_reason(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    remainders: Sequence[Tensor] = (),
) -> str | None:
    """Why `adamw` takes the reference for valid inputs; None if it takes the kernel."""
    masters = () if remainders else params
    for name, tensors in (
        ("params", masters),
        ("exp_avgs", exp_avgs),
        ("exp_avg_sqs", exp_avg_sqs),
    ):
        for t in tensors:
            if t.dtype != torch.float32:
                return f"{name} of dtype {t.dtype} (the kernels take float32)"
    for name, tensors in (("grads", grads), ("copies", copies)):
        dtypes = {t.dtype for t in tensors}
        if len(dtypes) > 1 or not dtypes <= KERNEL_DTYPES:
            return f"{name} of {dtypes} (the kernels take one of float32, bfloat16 and float16)"
    for tensors in (params, grads, exp_avgs, exp_avg_sqs, copies, remainders):
        if not all(t.is_contiguous() for t in tensors):
            return "a tensor that is not contiguous"
    if any(t.dtype != torch.float32 for t in steps) or not _at_hand(steps, params[0].device):
        return "steps that are not float32 on the host"
    return missing_kernel("accel::adamw_", params[0].device.type)


def _at_hand(steps: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all are on the host, or all on the device, if it has kernels that count there."""
    if all(t.device.type == "cpu" for t in steps):
        return True
    return device.type == "cuda" and all(t.device == device for t in steps)


torch.library.define(
    "accel::adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] steps, Tensor(e!)[] copies, Tensor(f!)[] remainders, Tensor? grad_scale, float lr,"
    " float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool bias_correction) -> ()",
)
_step = torch.ops.accel.adamw_.default


@torch.library.register_fake("accel::adamw_")
def _step_fake(*args: object) -> None:
    return None


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    remainders: Sequence[Tensor] = (),
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
) -> None:
    """One step of AdamW (or Adam) on every parameter, in place.

    Args:
        params: weights, any shapes and any number of them; updated.
        grads: one for each parameter, of its shape; all of one dtype.
        exp_avgs, exp_avg_sqs: the moments, like params; updated.
        steps: one number for each parameter, how many steps were done, on the CPU or beside it; 1 is
            added first.
        copies: the weights in the dtype that the model computes in, one for each parameter or none;
            overwritten.
        remainders: what bfloat16 params lack of fp32, int16, one for each parameter or none; updated.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: per unit of lr.
        decoupled: decay the weight itself (AdamW) instead of adding to the gradient (Adam).
        bias_correction: divide the moments by `1 - beta^t`.
        grad_scale: one number that the gradients are multiplied by first: a clip coefficient, the
            inverse of a loss scale, or their product; on the CPU or beside params. The gradients
            themselves are left as they are.

    Raises:
        ValueError: lists of different lengths or shapes, tensors on several devices, what is no
            float, remainders that are not int16 or whose params are not bfloat16, remainders beside
            copies, or gradients recorded (call it under `torch.no_grad`).

    Where `unsupported_reason` has something to say, that is logged once and `adamw_ref` computes
    instead.
    """
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "copies": copies}
    _check(
        params, steps, {name: list_ for name, list_ in lists.items() if name != "copies" or list_}
    )
    if remainders:
        _check_remainders(params, copies, remainders)
    if grad_scale is not None and grad_scale.numel() != 1:
        raise ValueError(f"adamw: grad_scale must be one number, got {list(grad_scale.shape)}")
    if not params:
        return
    if grad_scale is not None:
        check_at_hand("adamw", "grad_scale", grad_scale, params[0].device, "params")
    tensors = (params, grads, exp_avgs, exp_avg_sqs, steps, copies, remainders)
    if reason := unsupported_reason(*tensors):
        log_fallback("adamw", reason)
        adamw_ref(
            *tensors,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            bias_correction=bias_correction,
            grad_scale=grad_scale,
        )
        return
    _step(*tensors, grad_scale, lr, *betas, eps, weight_decay, decoupled, bias_correction)


def _check(
    params: Sequence[Tensor], steps: Sequence[Tensor], lists: dict[str, Sequence[Tensor]]
) -> None:
    if torch.is_grad_enabled() and any(p.requires_grad for p in params):
        raise ValueError("adamw: changes params in place, call it under torch.no_grad()")
    for name, tensors in (*lists.items(), ("steps", steps)):
        if len(tensors) != len(params):
            raise ValueError(
                f"adamw: needs one of {name} for each of {len(params)} params, got {len(tensors)}"
            )
    for name, tensors in lists.items():
        for i, (t, p) in enumerate(zip(tensors, params, strict=True)):
            if t.shape != p.shape or t.device != p.device or not t.is_floating_point():
                raise ValueError(
                    f"adamw: {name}[{i}] must be floating, of shape {list(p.shape)} and on "
                    f"{p.device} like params[{i}], got {t.dtype} {list(t.shape)} on {t.device}"
                )
    for i, (p, step) in enumerate(zip(params, steps, strict=True)):
        if not p.is_floating_point() or p.device != params[0].device:
            raise ValueError(
                f"adamw: params[{i}] must be floating and on {params[0].device} like the first, "
                f"got {p.dtype} on {p.device}"
            )
        if step.numel() != 1:
            raise ValueError(f"adamw: steps[{i}] must be one number, got {list(step.shape)}")
        check_at_hand("adamw", f"steps[{i}]", step, p.device, f"params[{i}]")


def _check_remainders(
    params: Sequence[Tensor], copies: Sequence[Tensor], remainders: Sequence[Tensor]
) -> None:
    if copies:
        raise ValueError(
            "adamw: params with remainders are what a model computes in: give no copies"
        )
    if len(remainders) != len(params):
        raise ValueError(
            f"adamw: needs one of remainders for each of {len(params)} params, got {len(remainders)}"
        )
    for i, (r, p) in enumerate(zip(remainders, params, strict=True)):
        if p.dtype != torch.bfloat16:
            raise ValueError(f"adamw: params[{i}] with a remainder must be bfloat16, got {p.dtype}")
        if r.dtype != torch.int16 or r.shape != p.shape or r.device != p.device:
            raise ValueError(
                f"adamw: remainders[{i}] must be int16, of shape {list(p.shape)} and on {p.device} like "
                f"params[{i}], got {r.dtype} {list(r.shape)} on {r.device}"
            )
