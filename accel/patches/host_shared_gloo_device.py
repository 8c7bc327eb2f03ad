"""All groups of a rank share one gloo device: one thread watches the sockets of all of them.

A device of gloo's is a thread that waits for sockets, and wakes a hundred times a second to see whether it is
to end. torch makes one for each group, and Megatron 24 groups on a rank with TP 2 and PP 2. Here a new group
gets the devices of the default group, which came first; so it has their addresses too (`GLOO_SOCKET_IFNAME`,
read when the default group is made). What travels and in which order each group's operations run stays as it
was. One thread then reads for all groups of a rank.

Groups on other backends, and groups of a default group that isn't gloo's, are not touched. Groups that exist
keep what they have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel.feature import Context, Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_C10D: Any = distributed_c10d
_GLOO: Any = getattr(_C10D, "ProcessGroupGloo", None)


def _shared() -> list[Any] | None:
    """The default group's devices; ``None`` if it isn't gloo's."""
    default = dist.group.WORLD
    if default is None or torch.device("cpu") not in default._device_types:
        return None
    backend = default._get_backend(torch.device("cpu"))
    return backend.options._devices if isinstance(backend, _GLOO) else None


def _on(devices: list[Any]) -> type:
    class GlooOnSharedDevices(_GLOO):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any
        ) -> None:
            if any(more.values()):  # torch 2.14's `enable_reconfigure`, which options do not say
                super().__init__(store, rank, size, timeout, **more)
                return
            options = _GLOO._Options()
            options._timeout = timeout
            options._devices = devices
            super().__init__(store, rank, size, options)

    return GlooOnSharedDevices


@contextlib.contextmanager
def devices_of_new_group() -> Iterator[None]:
    """Around what makes a group. One that another thread makes meanwhile may get a device of its own."""
    devices = _shared()
    if not devices or _C10D.ProcessGroupGloo is not _GLOO:
        yield
        return
    _C10D.ProcessGroupGloo = _on(devices)
    try:
        yield
    finally:
        _C10D.ProcessGroupGloo = _GLOO


def _unavailable(context: Context) -> str | None:
    if _GLOO is None:
        return "this torch has no gloo"
    if not hasattr(_GLOO, "_Options") or not hasattr(_GLOO._Options, "_devices"):
        return "this torch does not let a gloo group be given its devices"
    return None


FEATURE = Feature(
    name="host_shared_gloo_device",
    summary="one thread, not one for each group, watches the sockets of gloo's groups",
    preset="fast",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    unavailable=_unavailable,
    benchmarks=("host_collectives",),
    patches=(
        Patch(
            target="accel.device.cpu.collectives:devices_of_new_group",
            replacement="accel.patches.host_shared_gloo_device:devices_of_new_group",
            expects=(),
            why="A thread for each of two dozen groups and more wakes a hundred times a second.",
        ),
    ),
)
