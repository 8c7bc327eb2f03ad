"""A small call of another library's kernels, held against the reference before they are used."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["mistake"]


def mistake(
    results: Callable[[], Iterable[tuple[str, Tensor, Tensor]]], allowed: float
) -> str | None:
    """What is wrong in a trial, or raises; None if all is right.

    Args:
        results: computes what each result is, the result, and what the reference gives in fp32 on the CPU.
        allowed: the norm of an error over that of the result.

    Raises:
        torch.OutOfMemoryError: of no library: the call itself would not fit either.
    """
    try:
        for what, got, wanted in results():
            if got.shape != wanted.shape:
                return f"its {what} was {list(got.shape)}, not {list(wanted.shape)}, in a trial"
            off = float(
                (got.detach().cpu().float() - wanted.detach()).norm() / wanted.detach().norm()
            )
            if not off <= allowed:  # so is NaN
                return f"its {what} was off by {off:.2g} in a trial"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return f"a trial raised {type(error).__name__}: {first_line[:200]}"
    return None
