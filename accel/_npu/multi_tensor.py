"""Norm and scaling of many tensors on Ascend: see `accel/ops/multi_tensor.py`.

`_foreach_norm` and `_foreach_mul`, which torch-npu serves with kernels for whole lists; what they do
not do in fp32 is done in fp32 copies.
"""

import torch
from torch import Tensor

__all__ = ["KERNELS", "l2_norm", "scale"]


def l2_norm(tensors: list[Tensor]) -> Tensor:
    """`accel::l2_norm`."""
    filled = [t.float() for t in tensors if t.numel()]
    if not filled:
        return tensors[0].new_zeros((), dtype=torch.float32)
    norms = torch._foreach_norm(filled, 2)
    return torch.linalg.vector_norm(torch.stack(norms))


def scale(sources: list[Tensor], targets: list[Tensor], factor: float) -> None:
    """`accel::scale_`."""
    for target, scaled in zip(
        targets, torch._foreach_mul([t.float() for t in sources], factor), strict=True
    ):
        target.copy_(scaled)


KERNELS = {"accel::l2_norm": l2_norm, "accel::scale_": scale}
