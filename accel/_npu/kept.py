"""What is kept between calls: to read a tensor waits for all that the device was given before."""

from torch import Tensor

from accel.ops.findings import Findings

__all__ = ["KEPT", "host_list"]

KEPT = Findings()
"""Of all ops: what each asks begins with a name of its own."""


def host_list(x: Tensor) -> list[int]:
    """`x.tolist()`."""
    found: list[int] = KEPT.get(x, find=x.tolist, about="list")
    return found
