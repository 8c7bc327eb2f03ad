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
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed import distributed_c10d
from torch.utils._device import _device_constructors

from accel import patching
from accel.device import absent
from accel.device.audience import AUDIENCE
from accel.device.cpu import memory
from accel.patching import Applied, Patch, table

__all__ = ["install", "patches"]

_HERE = "accel.device.cpu"
_C10D = "torch.distributed.distributed_c10d"

_LIKE = (
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
)  # fmt: skip
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
_ACCELERATOR_STREAMS = {
    "torch.accelerator:current_device_index": "accelerator_device_index",
    "torch.accelerator:set_device_index": "set_accelerator_device_index",
    "torch.accelerator:current_stream": "accelerator_stream",
    "torch.accelerator:synchronize": "accelerator_synchronize",
}
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
    "torch.distributed.nn.functional:_AlltoAll.forward": "all_to_all_with_gradient",
    "torch.distributed.nn.functional:_AllGatherBase.backward": "gradient_of_gather",
}


def patches() -> tuple[Patch, ...]:
    """The whole table, for the installed torch."""
    rows = (*_places(), *_cuda(), *_random_streams(), *_compilation(), *_collectives())
    return (*itertools.chain.from_iterable(rows), *absent.patches())


def install(audience: Sequence[str]) -> Applied:
    """Redirect ``torch.cuda`` to the host.

    Args:
        audience: top-level packages (and ``__main__``) that are told that a cuda device exists.

    Returns:
        The applied set; its ``undo()`` restores every binding and the allocator.
    """
    importlib.import_module("torch._dynamo")  # rebinds torch.manual_seed: before us, not after
    _device_constructors()  # cached by torch: it must hold the originals, by which device contexts compare
    applied = patching.apply(patches(), scope=(*audience, "torch"))
    AUDIENCE.update(audience)
    memory.install()
    return _Installed(**vars(applied))


class _Installed(Applied):
    """Also forgets the audience and gives the allocator back."""

    def undo(self) -> None:
        super().undo()
        AUDIENCE.clear()
        memory.uninstall()


_Rows = Iterator[Iterable[Patch]]


def _places() -> _Rows:
    constructors = {f.__name__ for f in _device_constructors()} & set(dir(torch)) | set(_LIKE)
    factories = [f"torch:{name}" for name in sorted(constructors)]
    factories += [f"torch:Tensor.{name}" for name in _NEW]
    tensor = {f"torch:Tensor.{name}": adapter for name, adapter in _TENSOR.items()}
    module = f"{_HERE}.factories"
    why = "A tensor asked for on cuda is made on the host."
    yield table(module, dict.fromkeys(factories, "factory"), why)
    yield table(module, tensor, "A cuda tensor is a host tensor here.")
    yield table(
        module, _CONTEXTS, "A cuda context, mesh, map_location or pinned copy means the host."
    )


def _cuda() -> _Rows:
    """What is called as ``torch.cuda.<name>``, and as ``torch.accelerator.<name>``."""
    for module, names, why in (
        (
            "streams",
            _STREAMS,
            "Work on the host is done when the call returns: streams are always idle.",
        ),
        ("generators", _GENERATORS, "The default CPU generator plays the device's random stream."),
        ("memory", _MEMORY, "Memory figures and the limit are the host allocator's own."),
        ("surface", _SURFACE, "Megatron asks what the device can do."),
    ):
        served = {_home(name): name for name in names if hasattr(torch.cuda, name)}
        yield table(f"{_HERE}.{module}", served, why, how="replace")
    lazy = {"torch.cuda:_lazy_init": "lazy_init", "torch.cuda:_lazy_call": "lazy_call"}
    yield table(f"{_HERE}.surface", lazy, "There is no CUDA context.", how="replace")
    asked = {_home(name): name for name in ("is_available", "is_initialized", "device_count")}
    yield table(f"{_HERE}.surface", asked, "Megatron sees a cuda device, everybody else the truth.")
    nothing = {_home(name): "silent" for name in ("empty_cache", "ipc_collect", "_sleep")}
    yield table(absent.__name__, nothing, "Nothing is pending or cached on the host.")
    sensor = {_home("utilization"): "unmeasured"}
    yield table(absent.__name__, sensor, "There is no GPU whose sensors could be read.")
    why = "A CUDA build of torch takes cuda for the accelerator even without a driver."
    accelerator = {"torch.accelerator:current_accelerator": "current_accelerator"}
    yield table(f"{_HERE}.surface", accelerator, why, how="replace")
    yield table(f"{_HERE}.streams", _ACCELERATOR_STREAMS, why, how="replace")


def _random_streams() -> _Rows:
    module = f"{_HERE}.generators"
    made = {"torch:Generator": "generator"}
    yield table(module, made, "A cuda generator is a host generator.")
    default = {"torch.cuda:default_generators": "DEFAULT_GENERATORS"}
    why = "The default CPU generator plays the device's random stream."
    yield table(module, default, why, how="replace")
    yield table(module, _HOST_GENERATOR, "Host and device draw from streams of their own.")


def _compilation() -> _Rows:
    module = f"{_HERE}.surface"
    why = "torch.compile as a fuser costs tens of seconds per shape on a CPU."
    yield table(module, {"torch:compile": "compile_"}, why)
    why = (
        "torch.compile knows torch's functions by identity, and forgets them at init_process_group."
    )
    yield table(module, {"torch._dynamo.trace_rules:load_object": "traced"}, why)


def _collectives() -> _Rows:
    there = {f"{_C10D}:{n}": a for n, a in _COLLECTIVES.items() if hasattr(distributed_c10d, n)}
    module = f"{_HERE}.collectives"
    yield table(
        module, there, "Megatron counts on NCCL's contract, which gloo alone does not keep."
    )
    why = "torch's collectives with gradients lack on gloo what they do on NCCL."
    yield table(module, _COLLECTIVES_WITH_GRADIENTS, why)


def _home(name: str) -> str:
    """The module of ``torch.cuda`` that defines ``name``; copies elsewhere are rebound by identity."""
    module = getattr(getattr(torch.cuda, name), "__module__", "torch.cuda") or "torch.cuda"
    return f"{module}:{name}" if module.startswith("torch.cuda") else f"torch.cuda:{name}"
