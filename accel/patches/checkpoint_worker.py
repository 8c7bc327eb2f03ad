"""``--use-persistent-ckpt-worker`` in programs that enable accel inside a function.

With ``--async-save`` Megatron hands checkpoints to a worker, a process that is spawned: of the program it has
what the top level of the main module does. Where accel is enabled in a function, or imported by a module that
is, it has no device runtime: without a GPU it stops at its first question to ``torch.cuda``, and the training
waits for it for ever. Here the worker starts on the device that accel serves in the training. Features stay
off in it, which copies and writes; checkpoints are what they are without the flag. It costs the import of
accel there.

**Not on** CUDA, where the worker needs nothing, and **not for** ``--async-strategy nvrx``, whose worker is
that of nvidia-resiliency-ext.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature
from accel.patches._settings import idle_without
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_Loop = Callable[..., None]


def with_device(async_loop: _Loop) -> _Loop:
    """Wraps ``PersistentAsyncCaller.async_loop``: by a function that another process finds by its name, which
    is all that it is told."""
    from accel.session import SESSION

    loop = on_npu if SESSION.device is not None and SESSION.device.name == "npu" else on_cpu
    return functools.update_wrapper(loop, async_loop, assigned=(), updated=())


def on_cpu(*args: Any) -> None:
    """The worker's main function."""
    _work(on_cpu, "cpu", args)


def on_npu(*args: Any) -> None:
    """The worker's main function."""
    _work(on_npu, "npu", args)


def _work(loop: _Loop, device: str, args: tuple[Any, ...]) -> None:
    from accel.session import SESSION

    SESSION.attach(device)  # nothing where the main module, or a fork, has brought one

    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    # a main module that enables accel at its top level has wrapped it in this process too
    upstream: _Loop = getattr(loop, "__wrapped__", PersistentAsyncCaller.async_loop)
    upstream(*args)


def idle(context: Context) -> str | None:
    if getattr(context.args, "async_strategy", None) == "nvrx":
        return "--async-strategy nvrx has a worker of its own"
    return idle_without("async_save", "use_persistent_ckpt_worker")(context)


FEATURE = Feature(
    name="checkpoint_worker",
    summary="give the worker of --use-persistent-ckpt-worker the device that accel serves",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu", "npu"),
    idle=idle,
    patches=(
        Patch(
            target="megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop",
            replacement="accel.patches.checkpoint_worker:with_device",
            how="wrap",
            expects=(
                "rank",
                "queue",
                "preload_q",
                "comp_q",
                "log_level",
                "cpu_priority",
                "io_priority",
            ),
            why="Upstream's worker is a spawned process, in which nobody has enabled accel.",
        ),
    ),
)
