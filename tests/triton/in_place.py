"""An op that changes its arguments, called with CPU tensors, on the GPU where there is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.ops import adamw
from tests.triton.harness import HAS_GPU

__all__ = ["AdamwOnDevice", "in_place_on_device"]

STEPS = 4
"""Position of the steps among `adamw`'s arguments."""


def in_place_on_device(op: Callable[..., None], stay: tuple[int, ...] = ()) -> Callable[..., None]:
    """The op on the GPU: the memory of its arguments travels there, once and whole, and back.

    Args:
        op: changes its arguments, returns nothing.
        stay: positions of arguments that stay on the CPU.
    """
    if not HAS_GPU:
        return op

    def moved(*args: Any, **options: Any) -> None:
        there: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

        def send(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(send, value))
            if not isinstance(value, Tensor):
                return value
            here = value.untyped_storage()
            if here.data_ptr() not in there:
                there[here.data_ptr()] = (here, here.cuda())
            view = torch.empty(0, dtype=value.dtype, device="cuda")
            storage = there[here.data_ptr()][1]
            return view.set_(storage, value.storage_offset(), value.size(), value.stride())

        sent = [a if i in stay else send(a) for i, a in enumerate(args)]
        op(*sent, **{name: send(value) for name, value in options.items()})
        for here, storage in there.values():
            here.copy_(storage)

    return moved


class AdamwOnDevice:
    """Mixin before a contract of what `adamw` writes."""

    @pytest.fixture(
        autouse=True, params=["steps beside the params", "steps on the host"][: 1 + HAS_GPU]
    )
    def moved(self, request: pytest.FixtureRequest) -> None:
        stay = (STEPS,) if request.param == "steps on the host" else ()
        self.step = in_place_on_device(adamw, stay)
        self.kernel = in_place_on_device(torch.ops.accel.adamw_)
