"""Memory of the CPU runtime in pages of 2 MiB: fewer faults as a step's tensors come and go.

What malloc has given back to the kernel comes anew as pages of 4 KiB, zeroed at the first touch, one fault
each: 48,000 in a step of four layers of hidden size 1024. Here PyTorch's allocator asks for huge pages within
each block of 2 MiB and more (``madvise``), and there are 1,500 to 2,600. The numbers are the same, and so is
what ``torch.cuda.memory_allocated`` counts; the resident set of the process rises by what such a page holds
beyond its tensors.

Idle where the kernel gives huge pages unasked, or none
(``/sys/kernel/mm/transparent_hugepage/enabled``). Blocks that are there already keep what they were promised,
when the feature is off again too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from accel.device.cpu import memory
from accel.feature import Context, Feature
from accel.upstream import SUPPORTED_RANGE

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Reads like ``always [madvise] never``."""


def _idle(context: Context) -> str | None:
    modes = _ENABLED.read_text().split() if _ENABLED.exists() else []
    if "[madvise]" in modes:
        return None
    return "the kernel gives huge pages unasked" if "[always]" in modes else "the kernel has none"


def _unavailable(context: Context) -> str | None:
    return memory.missing()


def switch_on() -> Callable[[], None]:
    memory.huge_pages(True)
    return functools.partial(memory.huge_pages, False)


FEATURE = Feature(
    name="host_huge_pages",
    summary="memory of the CPU runtime in pages of 2 MiB where the kernel has them",
    preset="fast",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    idle=_idle,
    unavailable=_unavailable,
    benchmarks=("step",),
    switch_on=switch_on,
)
