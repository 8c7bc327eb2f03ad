"""Waiting for a device no longer than for what was asked of its current stream."""

import torch

__all__ = ["finish_current_stream"]


def finish_current_stream(device: torch.device) -> None:
    """The host waits for the stream, to which transfers belong that it waits for itself; nothing on a CPU.

    Not for the whole device, as its `synchronize` does: a pipeline schedule may have a receive in flight on
    another stream, which ends when another rank has got what this one is about to compute.
    """
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
