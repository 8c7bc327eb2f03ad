"""Where the small tensors beside an op's own may lie: lengths, seeds, scales and counts of steps."""

import torch
from torch import Tensor

__all__ = ["check_at_hand"]


def check_at_hand(op: str, name: str, t: Tensor, device: torch.device, like: str) -> None:
    """That `t` is on the CPU, or on the `device` of the argument `like`.

    Raises:
        ValueError: it is elsewhere.
    """
    if t.device.type != "cpu" and t.device != device:
        where = "" if device.type == "cpu" else f" or on {device}"
        raise ValueError(f"{op}: {name} must be on the cpu{where} like {like}, got {t.device}")
