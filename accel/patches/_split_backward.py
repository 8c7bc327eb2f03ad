"""Megatron's data parallelism in backward passes of two parts (`accel.parallel.split_backward`).

A feature that trains with such backward passes lists `HOOK`, and `accel.patches._linear`, whose layers put
off the gradients of their weights.

    HOOK        a parameter's gradient goes to ``main_grad``, and counts as ready to be reduced, when the
                weights' part delivers it; what its input part had for it already is delivered with it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.parallel.split_backward import current
from accel.patching import Patch, around

__all__ = ["HOOK"]


@around
def waiting(
    upstream: Callable[..., Callable[..., None]], self: Any, param: torch.nn.Parameter
) -> Callable[..., None]:
    """Wraps ``DistributedDataParallel._make_backward_post_hook``."""
    hook = upstream(self, param)

    def unless_put_off(*unused: Any) -> None:
        part = current()
        if part is not None and part.holds(param):
            part.take(param)
        else:
            hook(*unused)

    return unless_put_off


HOOK = Patch(
    target="megatron.core.distributed.distributed_data_parallel"
    ":DistributedDataParallel._make_backward_post_hook",
    replacement="accel.patches._split_backward:waiting",
    how="wrap",
    sources={"0.17.1": "fec59a9c44a4", "0.18.2": "fec59a9c44a4", "0.19.2": "9db16cb6b15f"},
    why="Autograd calls the hook of a parameter in the input part too, which has no gradient for it yet.",
)
