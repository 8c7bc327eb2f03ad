"""A device's streams: waiting for no more than the current one, and what they share."""

import os

import torch

__all__ = ["finish_current_stream", "one_queue"]


def one_queue(device: torch.device) -> bool:
    """Whether all streams share one queue, in which nothing begins before what was put there first: Megatron
    wants it with tensor or context parallelism on GPUs before Blackwell."""
    return device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def finish_current_stream(device: torch.device) -> None:
    """The host waits for the stream, to which transfers belong that it waits for itself; nothing on a CPU.

    Not for the whole device, as its `synchronize` does: a pipeline schedule may have a receive in flight on
    another stream, which ends when another rank has got what this one is about to compute.
    """
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
