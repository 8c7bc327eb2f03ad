"""Whether a CUDA graph is captured, which runs with other numbers in the same memory at each replay."""

import torch

__all__ = ["is_capturing"]


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream captures a CUDA graph, into which work on `device` would go."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
