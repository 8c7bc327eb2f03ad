"""Collectives of ranks on one host through shared memory, where gloo would take the loopback device.

TBD
"""

from __future__ import annotations

from typing import Any

from accel.feature import Context, Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE


def shared_memory(group: Any) -> Any:
    """The channel of the group; at its first collective the ranks find out whether there is one."""
    from accel.device.cpu.shared_memory import channel

    return channel(group)


def _unavailable(context: Context) -> str | None:
    from accel.device.cpu.shared_memory import unavailable

    return unavailable() if context.device == "cpu" else None


FEATURE = Feature(
    name="host_shared_memory_collectives",
    summary="collectives of ranks on one host through shared memory in place of sockets",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    unavailable=_unavailable,
    patches=(
        Patch(
            target="accel.device.cpu.collectives:shared_memory",
            replacement="accel.patches.host_shared_memory_collectives:shared_memory",
            expects=("group",),
            why="A message through the loopback device costs several times the copy that it is.",
        ),
    ),
)
