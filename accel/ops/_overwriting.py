"""What a gradient may be written over."""

from torch import Tensor

__all__ = ["overwritable"]


def overwritable(x: Tensor) -> str | None:
    """Why a backward may not write over what this tensor holds; None if it may."""
    leaf = any(t is not None and t.is_leaf and t.requires_grad for t in (x, x._base))
    return "a leaf that requires grad (or a view of one)" if leaf else None
