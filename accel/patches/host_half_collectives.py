"""Reduce-scatters and small all-reduces of bf16 and fp16 on gloo: exchanged, then summed in fp32.

gloo sums 16-bit numbers one by one: a reduce-scatter of 384 KiB over 2 ranks takes 2.2 ms in bf16 and
1.8 ms in fp32 (`python -m accel bench host_collectives`, AMD EPYC with AVX-512). Here the ranks exchange
their operands, each sums its own shard in fp32 in the order of the ranks and rounds once. For 2 ranks the
bits are gloo's; for more they are closer to the exact sum, because gloo rounds after each rank. All-reduces
of up to 4 ranks gather all operands; larger groups stay with gloo. Groups on other backends are not touched,
and groups on one host have `host_shared_memory_collectives`, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accel.feature import Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

HALF = frozenset({torch.bfloat16, torch.float16})


def sums_here(tensor: torch.Tensor, op: Any) -> bool:
    """Yes for a sum of 16-bit floats."""
    return tensor.dtype in HALF and op == dist.ReduceOp.SUM


FEATURE = Feature(
    name="host_half_collectives",
    summary="sum 16-bit collectives in fp32 after the exchange, where gloo sums them one by one",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    patches=(
        Patch(
            target="accel.device.cpu.collectives:sums_here",
            replacement="accel.patches.host_half_collectives:sums_here",
            expects=("tensor", "op"),
            why="gloo's own 16-bit sums cost more than fp32 sums of as many bytes.",
        ),
    ),
)
