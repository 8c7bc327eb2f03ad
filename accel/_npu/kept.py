"""What is kept between calls: to read a tensor waits for all that the device was given before."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["host_list", "kept"]

T = TypeVar("T")

_KEPT: Any = WeakTensorKeyDictionary()
"""Of each tensor: the version that what follows was made from, and what was made, by name."""


def kept(x: Tensor, what: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave before if x is the same tensor and has not changed since.

    Args:
        x: the tensor that `make` reads. Inference tensors do not count their changes: nothing is
            kept for them. Writes that PyTorch does not count, a collective into x or one into
            `x.data`, are not seen: give a new tensor instead.
        what: the name of what is made, and all else that it depends on.
        make: what it gives must not hold x, a view of x neither: both would live for ever.
    """
    if x.is_inference():
        return make()
    version, made = _KEPT.get(x, (None, {}))
    if version != x._version:
        made = {}
        _KEPT[x] = (x._version, made)
    if what not in made:
        made[what] = make()
    result: T = made[what]
    return result


def host_list(x: Tensor) -> list[int]:
    """`x.tolist()`."""
    return kept(x, "list", x.tolist)
