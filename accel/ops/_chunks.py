"""Work in chunks of one size, of which the last may be smaller."""

__all__ = ["chunks_of"]


def chunks_of(total: int, size: int) -> list[slice]:
    """The slices of `size` that cover `range(total)`, in order."""
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]
