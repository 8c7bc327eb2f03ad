"""The norm of many tensors, and many tensors times one number: what gradient clipping needs.

    l2_norm     sqrt(sum over all tensors and elements of x^2)
    scale       target = source * factor

Dtypes      float32, bfloat16 or float16, one per list of `scale`; the norm is float32.
Sums        squares: fp32 over at most 64 (16 with AVX-512, 32 on CUDA), fp64 over those. The order
            depends on the shapes alone (Triton: on the number of processors, and on which tensors start
            at a multiple of 16 bytes): the number of threads changes no bit. Infinity and NaN in any
            element show in the norm. The host never waits for it.
Moved       l2_norm reads every tensor once; scale reads and writes once.
Autograd    none: `l2_norm` is taken of gradients, `scale` writes in place.
Limits      `unsupported_reason`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.ops._dispatch import KERNEL_DTYPES, log_fallback, missing_kernel

__all__ = ["l2_norm", "l2_norm_ref", "scale", "scale_ref", "unsupported_reason"]


def l2_norm_ref(tensors: Sequence[Tensor]) -> Tensor:
    """The definition of correct, on any device. Same contract as `l2_norm`."""
    if not tensors:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(t.detach(), dtype=_sum_dtype(t)) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(norms))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def scale_ref(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float) -> None:
    """The definition of correct, on any device. Same contract as `scale`."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source * factor)


def unsupported_reason(op: str, *lists: Sequence[Tensor]) -> str | None:
    """Why `op`, "accel::l2_norm" or "accel::scale_", cannot take these valid lists, not empty; None
    if it can."""
    for tensors in lists:
        dtypes = {t.dtype for t in tensors}
        if len(dtypes) > 1 or not dtypes <= KERNEL_DTYPES:
            return f"dtypes {dtypes} (the kernels take one of float32, bfloat16 and float16)"
        if not all(t.is_contiguous() for t in tensors):
            return "a tensor that is not contiguous"
    return missing_kernel(op, lists[0][0].device.type)


torch.library.define("accel::l2_norm", "(Tensor[] tensors) -> Tensor")
torch.library.define(
    "accel::scale_", "(Tensor[] sources, Tensor(a!)[] targets, float factor) -> ()"
)
_l2_norm = torch.ops.accel.l2_norm.default
_scale = torch.ops.accel.scale_.default


@torch.library.register_fake("accel::l2_norm")
def _l2_norm_fake(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)


@torch.library.register_fake("accel::scale_")
def _scale_fake(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float) -> None:
    return None


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """`sqrt(sum x^2)` over all elements of all tensors.

    Args:
        tensors: any number, any shapes, any floating dtypes (those of one dtype are summed first), one
            device; none of them may require a gradient while gradients are recorded.

    Returns:
        One float32 number, shape `[]`, on their device; 0 of no tensors.

    Raises:
        ValueError: what is no float, tensors on several devices, or gradients recorded.
    """
    if not tensors:
        return l2_norm_ref(tensors)
    _check("l2_norm", "tensors", tensors)
    if len(dtypes := {t.dtype for t in tensors}) > 1:
        return l2_norm_ref(
            [l2_norm([t for t in tensors if t.dtype == d]) for d in sorted(dtypes, key=str)]
        )
    if reason := unsupported_reason("accel::l2_norm", tensors):
        log_fallback("l2_norm", reason)
        return l2_norm_ref(tensors)
    return _l2_norm(tensors)


def scale(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float) -> None:
    """`target = source * factor` for each pair, in place: fp32 product, rounded once.

    Args:
        sources: any number, any shapes, one floating dtype.
        targets: one for each source, of its shape, may be the sources; one floating dtype.

    Raises:
        ValueError: lists of different lengths or shapes, what is no float, tensors on several
            devices, or gradients recorded.
    """
    _check("scale", "sources", sources)
    _check("scale", "targets", targets)
    if [t.shape for t in sources] != [t.shape for t in targets]:
        raise ValueError(
            f"scale: targets must have the shapes of sources, {[list(t.shape) for t in sources]}, "
            f"got {[list(t.shape) for t in targets]}"
        )
    if not sources:
        return
    if sources[0].device != targets[0].device:
        raise ValueError(
            f"scale: targets must be on {sources[0].device} like sources, got {targets[0].device}"
        )
    if reason := unsupported_reason("accel::scale_", sources, targets):
        log_fallback("scale", reason)
        scale_ref(sources, targets, factor)
    else:
        _scale(sources, targets, factor)


def _check(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    for i, t in enumerate(tensors):
        if not t.is_floating_point() or t.device != tensors[0].device:
            raise ValueError(
                f"{op}: {name}[{i}] must be floating and on {tensors[0].device} like the first, "
                f"got {t.dtype} on {t.device}"
            )
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: {name}[{i}] requires a gradient, there is none: call it under torch.no_grad()"
            )
