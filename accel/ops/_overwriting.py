"""What a gradient may be written over."""

from torch import Tensor

__all__ = ["overwritable"]


def overwritable(x: Tensor) -> str | None:
    """Why a backward may not write over what this tensor holds; None if it may."""
    base = x if x._base is None else x._base
    mine = base.is_leaf and base.requires_grad
    return "a leaf that requires grad (or a view of one)" if mine else None
