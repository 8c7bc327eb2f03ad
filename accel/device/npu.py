"""Ascend: torch-npu redirects ``torch.cuda`` itself, and accel serves what its redirect leaves.

``torch_npu.contrib.transfer_to_npu`` patches ``torch.cuda`` when it is imported and offers no way back, so
it stays when the rest is undone; ``accel.disable()`` says so. With it alone no training of Megatron gets
further than its start (torch-npu 2.11 to 2.14, by their sources):

* ``torch.compile``, Megatron's fuser, ends in "Unsupported device type: npu": the redirect says that there is
  no Triton, and without it torch-npu registers nothing with Inductor;
* times of the start and lengths of packs are reduced in fp64, which HCCL does not do before Atlas A5;
* ``tensor.type()`` is ``torch.npu.FloatTensor``, which Megatron's optimizers compare with CUDA's names;
* capability and architecture are None, and compared with numbers;
* the backend is called ``hccl``, and ``--exit-signal-handler`` knows ``nccl``;
* NVTX marks, CUDA's profiler, sensors and ``device_memory_used`` are still CUDA's, which fail;
* a group's time-out is set for NCCL and gloo alone.

Not run on hardware yet.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from accel import patching
from accel.device import absent
from accel.device.audience import AUDIENCE, addressed, addressed_fuser
from accel.patching import Applied, Patch, PatchError, table

__all__ = ["install", "patches"]

_HERE = "accel.device.npu"
_C10D = "torch.distributed.distributed_c10d"

CAPABILITY = (8, 0)
"""Told to Megatron where torch-npu says nothing: bf16 yes, FP8 (8.9) no, nothing that needs Hopper."""


def install(audience: Sequence[str]) -> Applied:
    """Import torch-npu and its redirect of ``torch.cuda``, and serve what it leaves.

    Args:
        audience: top-level packages (and ``__main__``) that are told of a cuda device.
    """
    importlib.import_module("torch_npu")
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    applied = patching.apply(patches(), scope=(*audience, "torch"))
    AUDIENCE.update(audience)
    return _Redirected(**vars(applied))


class _Redirected(Applied):
    def undo(self) -> None:
        super().undo()
        AUDIENCE.clear()
        raise PatchError(
            "torch_npu.contrib.transfer_to_npu cannot be undone; start a new process without accel"
        )


def patches() -> tuple[Patch, ...]:
    """The whole table."""
    capability = {"torch.cuda:get_device_capability": "capability"}
    properties = {"torch.cuda:get_device_properties": "properties"}
    memory = {"torch.cuda:device_memory_used": "device_memory_used"}
    return (
        *table(_HERE, {"torch:compile": "compile_"}, "After the redirect Inductor has no NPU."),
        *table(
            _HERE, {"torch:Tensor.type": "tensor_type"}, "Megatron compares the name with CUDA's."
        ),
        *table(_HERE, capability, "torch-npu's is None, and Megatron indexes it."),
        *table(_HERE, properties, "torch-npu's have no architecture to compare."),
        *table(_HERE, memory, "CUDA's asks NVML.", how="replace"),
        *table(
            _HERE, {f"{_C10D}:all_reduce": "all_reduce"}, "HCCL reduces no fp64 before Atlas A5."
        ),
        *table(_HERE, {f"{_C10D}:get_backend": "get_backend"}, "Megatron knows HCCL as nccl."),
        *table(
            _HERE, {f"{_C10D}:_set_pg_timeout": "set_pg_timeout"}, "torch's knows NCCL and gloo."
        ),
        *absent.patches(),
    )


def compile_(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``jit_fuser`` is ``torch.compile``: its functions stay as they are.

    A script's own ``torch.compile`` is torch-npu's matter.
    """

    @functools.wraps(original)
    def compile_unless_fuser(model: Any = None, **kwargs: Any) -> Any:
        if not addressed_fuser():
            return original(model, **kwargs)
        return model if model is not None else (lambda fn: fn)

    return compile_unless_fuser


def tensor_type(type_: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.npu.FloatTensor`` is called ``torch.cuda.FloatTensor`` when the audience asks."""

    @functools.wraps(type_)
    def type_as_cudas(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = type_(self)
            return name.replace("torch.npu.", "torch.cuda.", 1) if addressed() else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.npu.", 1)
        return type_(self, dtype, *args, **kwargs)

    return type_as_cudas


def capability(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def known_capability(device: Any = None) -> Any:
        found = original(device)
        return CAPABILITY if found is None and addressed() else found

    return known_capability


def properties(original: Callable[..., Any]) -> Callable[..., Any]:
    """With the architecture's numbers where torch-npu leaves them out."""

    @functools.wraps(original)
    def known_properties(device: Any = None) -> Any:
        found = original(device)
        if not addressed() or getattr(found, "major", None) is not None:
            return found
        known = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        return SimpleNamespace(**{**known, "major": CAPABILITY[0], "minor": CAPABILITY[1]})

    return known_properties


def device_memory_used(device: Any = None) -> int:
    """Bytes in use on the card, by whomever."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def get_backend(original: Callable[..., str]) -> Callable[..., str]:
    """``hccl`` is ``nccl`` to the audience; what it passes on, as a group's backend, torch-npu turns back."""

    @functools.wraps(original)
    def backend_as_cudas(group: Any = None) -> str:
        found = original(group)
        return "nccl" if found == "hccl" and addressed() else found

    return backend_as_cudas


def set_pg_timeout(original: Callable[..., None]) -> Callable[..., None]:
    """``--distributed-timeout-seconds-after-init``."""

    @functools.wraps(original)
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        group = dist.group.WORLD if group is None else group
        devices = getattr(group, "_device_types", ())  # none where this rank is not in it
        if all(device.type != "npu" for device in devices):
            original(timeout, group)
            return
        for device in devices:
            group._get_backend(device)._set_default_timeout(timeout)

    return set_timeout


def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather fp64, which HCCL does not reduce, and reduce it on the host, in the order of the ranks."""

    @functools.wraps(original)
    def all_reduce_in_fp64(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        is_fp64 = tensor.dtype == torch.float64 and dist.get_rank(group) >= 0
        if not is_fp64 or dist.get_backend(group) != "hccl":
            return original(tensor, op, group, async_op)
        num_ranks = dist.get_world_size(group)
        parts = tensor.new_empty(num_ranks * tensor.numel())
        work = dist.all_gather_into_tensor(parts, tensor.reshape(-1), group, async_op=True)
        work.wait()
        tensor.copy_(_reduced(parts.cpu().view(num_ranks, *tensor.shape), op))
        return work if async_op else None

    return all_reduce_in_fp64


def _reduced(parts: torch.Tensor, op: Any) -> torch.Tensor:
    """Over the first dimension."""
    reductions: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.SUM: lambda x: x.sum(0),
        dist.ReduceOp.AVG: lambda x: x.mean(0),
        dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
        dist.ReduceOp.MIN: lambda x: x.amin(0),
        dist.ReduceOp.MAX: lambda x: x.amax(0),
    }
    for kind, reduce in reductions.items():
        if op == kind:
            return reduce(parts)
    raise ValueError(
        f"all_reduce of torch.float64 on Ascend: {op} is none of SUM, AVG, PRODUCT, MIN, MAX"
    )
