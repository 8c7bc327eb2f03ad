"""The CPU device runtime: ``torch.cuda``, as Megatron uses it, served by the host and gloo.

Everything is a :class:`~accel.patching.Patch` on a torch function, in one table, applied and undone
as one set. Three ideas carry it:

* a *place* given as cuda (``device="cuda:1"``, ``.cuda()``, an integer device) means the host, for
  everybody (``factories``);
* a *question* about cuda (``is_available()``, ``tensor.is_cuda``, ``tensor.type()``) is answered
  yes only to the packages named at :func:`install` (``audience``), so torch's own code never looks
  for a GPU;
* *state* is real: random streams (``generators``), memory figures and a limit on them (``memory``),
  event times (``streams``), and collectives that keep NCCL's contract on gloo (``collectives``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import torch
from torch.utils._device import _device_constructors

from accel import patching
from accel.device.audience import AUDIENCE
from accel.device.cpu import memory
from accel.patching import Applied, Patch

__all__ = ["install", "patches"]

_HERE = "accel.device.cpu"
_ABSENT = "accel.device.absent"

_LIKE = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
)
_NEW = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_TENSOR = {
    "to": "tensor_to",
    "cpu": "tensor_cpu",
    "cuda": "tensor_cuda",
    "type": "tensor_type",
    "is_cuda": "is_cuda",
    "record_stream": "record_stream",
    "pin_memory": "pin_memory",
}
_CONTEXTS = {
    "torch.serialization:load": "load",
    "torch.utils._device:DeviceContext.__init__": "device_context",
    "torch.amp.autocast_mode:autocast.__init__": "autocast",
    "torch.amp.autocast_mode:custom_fwd": "function_under_autocast",
    "torch.amp:custom_fwd": "function_under_autocast",
    "torch.amp.autocast_mode:custom_bwd": "function_under_autocast",
    "torch.amp:custom_bwd": "function_under_autocast",
    "torch.distributed.device_mesh:DeviceMesh.__init__": "device_type",
    "torch.utils.data.dataloader:DataLoader.__init__": "data_loader",
}
_STREAMS = (
    "Stream", "Event", "set_device", "current_device", "current_stream", "default_stream", "set_stream",
    "stream", "device", "synchronize",
)  # fmt: skip
_GENERATORS = (
    "get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all", "manual_seed",
    "manual_seed_all", "initial_seed",
)  # fmt: skip
_HOST_GENERATOR = {
    "torch.random:get_rng_state": "host_get_rng_state",
    "torch.random:set_rng_state": "host_set_rng_state",
    "torch.random:manual_seed": "host_manual_seed",
    "torch.random:fork_rng": "host_fork_rng",
    "torch:manual_seed": "host_manual_seed",
    "torch.utils.data.dataloader:DataLoader.__iter__": "drawn_on_host",
    "torch.utils.data.dataloader:_SingleProcessDataLoaderIter._next_data": "drawn_on_host",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._try_put_index": "drawn_on_host",
}
_MEMORY = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
    "reset_peak_memory_stats", "mem_get_info", "memory_snapshot", "memory_summary", "device_memory_used",
    "set_per_process_memory_fraction", "get_per_process_memory_fraction",
)  # fmt: skip
_SURFACE = (
    "get_device_name", "get_device_capability", "get_device_properties", "is_bf16_supported",
    "is_current_stream_capturing",
)  # fmt: skip
_ACCELERATOR = {
    "current_accelerator": "surface:current_accelerator",
    "current_device_index": "streams:accelerator_device_index",
    "set_device_index": "streams:set_accelerator_device_index",
    "current_stream": "streams:accelerator_stream",
    "synchronize": "streams:accelerator_synchronize",
}
_ASKED = ("is_available", "is_initialized", "device_count")
_SILENT = ("empty_cache", "ipc_collect", "check_error", "_sleep")
_UNMEASURED = ("utilization", "temperature", "power_draw", "clock_rate")
_COLLECTIVES = {
    "init_process_group": "init_process_group",
    "new_group": "new_group",
    "_process_group_name": "process_group_name",
    "_set_pg_timeout": "set_group_timeout",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",  # torch's name since 2.13
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "isend": "isend",
    "_coalescing_manager": "coalescing_manager",
}
_COLLECTIVES_WITH_GRADIENTS = {
    "_AlltoAll.forward": "all_to_all_with_gradient",
    "_AllGatherBase.backward": "gradient_of_gather",
}


def patches() -> tuple[Patch, ...]:
    """The whole table, for the installed torch."""
    return tuple(_tensor_places()) + tuple(_cuda_surface()) + tuple(_collectives())


def install(audience: Sequence[str]) -> Applied:
    """Redirect ``torch.cuda`` to the host.

    Args:
        audience: top-level packages (and ``__main__``) that are told that a cuda device exists.

    Returns:
        The applied set; its ``undo()`` restores every binding and the allocator.
    """
    importlib.import_module("torch._dynamo")  # rebinds torch.manual_seed: before us, not after
    _device_constructors()  # cached by torch: it must hold the originals, by which device contexts compare
    applied = _Installed.of(patching.apply(patches(), scope=(*audience, "torch")))
    AUDIENCE.update(audience)
    memory.install()
    return applied


class _Installed(Applied):
    """Also forgets the audience and gives the allocator back."""

    @classmethod
    def of(cls, applied: Applied) -> _Installed:
        return cls(**vars(applied))

    def undo(self) -> None:
        super().undo()
        AUDIENCE.clear()
        memory.uninstall()


def _wrap(target: str, replacement: str, why: str) -> Patch:
    return Patch(target=target, replacement=replacement, how="wrap", why=why)


def _tensor_places() -> Iterable[Patch]:
    names = {f.__name__ for f in _device_constructors()} & set(dir(torch))
    for name in sorted(names | set(_LIKE)):
        yield _wrap(
            f"torch:{name}",
            f"{_HERE}.factories:factory",
            "A tensor asked for on cuda is made on the host.",
        )
    for name in _NEW:
        yield _wrap(
            f"torch:Tensor.{name}",
            f"{_HERE}.factories:factory",
            "A tensor asked for on cuda is made on the host.",
        )
    for name, adapter in _TENSOR.items():
        yield _wrap(
            f"torch:Tensor.{name}",
            f"{_HERE}.factories:{adapter}",
            "A cuda tensor is a host tensor here.",
        )
    yield _wrap(
        "torch:Generator", f"{_HERE}.generators:generator", "A cuda generator is a host generator."
    )
    for target, adapter in _CONTEXTS.items():
        yield _wrap(
            target,
            f"{_HERE}.factories:{adapter}",
            "A cuda context, mesh, map_location or pinned copy means the host.",
        )


def _cuda_surface() -> Iterable[Patch]:
    tables: tuple[tuple[str, Sequence[str], str], ...] = (
        (
            "streams",
            _STREAMS,
            "Work on the host is done when the call returns, so streams are always idle.",
        ),
        ("generators", _GENERATORS, "The default CPU generator plays the device's random stream."),
        ("memory", _MEMORY, "Memory figures and the limit are the host allocator's own."),
        ("surface", _SURFACE, "Megatron asks what the device can do."),
    )
    for module, names, why in tables:
        for name in names:
            if hasattr(torch.cuda, name):
                yield Patch(target=_home(name), replacement=f"{_HERE}.{module}:{name}", why=why)
    for old, new in (("_lazy_init", "lazy_init"), ("_lazy_call", "lazy_call")):
        yield Patch(
            target=f"torch.cuda:{old}",
            replacement=f"{_HERE}.surface:{new}",
            why="There is no CUDA context.",
        )
    for name, adapter in _ACCELERATOR.items():
        yield Patch(
            target=f"torch.accelerator:{name}",
            replacement=f"{_HERE}.{adapter}",
            why="A CUDA build of torch takes cuda for the accelerator even without a driver.",
        )
    for name in _ASKED:
        yield _wrap(
            _home(name),
            f"{_HERE}.surface:{name}",
            "Megatron sees a cuda device, everybody else the truth.",
        )
    for name in _SILENT:
        if hasattr(torch.cuda, name):
            yield _wrap(
                _home(name), f"{_ABSENT}:silent", "Nothing is pending or cached on the host."
            )
    for name in _UNMEASURED:
        yield _wrap(
            _home(name), f"{_ABSENT}:unmeasured", "There is no GPU whose sensors could be read."
        )
    for name in ("range_push", "range_pop", "mark"):
        yield _wrap(
            f"torch.cuda.nvtx:{name}", f"{_ABSENT}:silent", "NVTX marks need the CUDA profiler."
        )
    for name in ("start", "stop"):
        yield _wrap(
            f"torch.cuda.profiler:{name}", f"{_ABSENT}:silent", "The CUDA profiler is not there."
        )
    yield Patch(
        target=_home("cudart"),
        replacement=f"{_ABSENT}:cudart",
        why="The CUDA profiler is not there.",
    )
    yield Patch(
        target="torch.cuda.nvtx:range",
        replacement=f"{_ABSENT}:nvtx_range",
        why="NVTX ranges need the CUDA profiler.",
    )
    for name, replacement in {
        "__enter__": f"{_ABSENT}:itself",
        "__exit__": f"{_ABSENT}:silent",
    }.items():
        yield _wrap(
            f"torch.autograd.profiler:emit_nvtx.{name}",
            replacement,
            "Torch without CUDA refuses to mark what runs for its profiler.",
        )
    yield Patch(
        target="torch.cuda:default_generators",
        replacement=f"{_HERE}.generators:DEFAULT_GENERATORS",
        why="The default CPU generator plays the device's random stream.",
    )
    for target, adapter in _HOST_GENERATOR.items():
        yield _wrap(
            target,
            f"{_HERE}.generators:{adapter}",
            "Host and device draw from streams of their own.",
        )
    yield _wrap(
        "torch:compile",
        f"{_HERE}.surface:compile_",
        "torch.compile as a fuser costs tens of seconds per shape on a CPU.",
    )
    yield _wrap(
        "torch._dynamo.trace_rules:load_object",
        f"{_HERE}.surface:traced",
        "torch.compile knows torch's functions by identity, and forgets them at init_process_group.",
    )


def _collectives() -> Iterable[Patch]:
    for name, adapter in _COLLECTIVES.items():
        if hasattr(torch.distributed.distributed_c10d, name):
            yield _wrap(
                f"torch.distributed.distributed_c10d:{name}",
                f"{_HERE}.collectives:{adapter}",
                "Megatron counts on NCCL's contract, which gloo alone does not keep.",
            )
    for target, adapter in _COLLECTIVES_WITH_GRADIENTS.items():
        yield _wrap(
            f"torch.distributed.nn.functional:{target}",
            f"{_HERE}.collectives:{adapter}",
            "torch's collectives with gradients lack on gloo what they do on NCCL.",
        )


def _home(name: str) -> str:
    """The module of ``torch.cuda`` that defines ``name``; copies elsewhere are rebound by identity."""
    module = getattr(getattr(torch.cuda, name), "__module__", "torch.cuda") or "torch.cuda"
    return f"{module}:{name}" if module.startswith("torch.cuda") else f"torch.cuda:{name}"
