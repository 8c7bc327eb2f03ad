"""``torch.cuda`` served by the host, with the answers that torch-npu's redirect gives on a card.

What a card computes is not here, only what Megatron is told and refused. Each answer names its source in
torch-npu 2.13 (Ascend/pytorch) or in torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from accel import patching
from accel.device import cpu
from accel.patching import AUDIENCE, Patch


def answer(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def collect(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        ANSWERS.append(
            Patch(
                target=target,
                replacement=f"{__name__}:{wrapper.__name__}",
                how="wrap",
                why="As torch-npu answers.",
            )
        )
        return wrapper

    return collect


ANSWERS: list[Patch] = []


@answer("torch:compile")
def unsupported(original: Callable[..., Any]) -> Callable[..., Any]:
    """No backend is registered where `has_triton` says no: torch/_inductor/scheduler.py, create_backend."""

    def compile_(model: Any = None, **kwargs: Any) -> Any:
        def compiled(*args: Any, **kwargs: Any) -> NoReturn:
            raise RuntimeError("Unsupported device type: npu")

        return compiled if model is not None else lambda model: compiled

    return compile_


@answer("torch:Tensor.type")
def npu_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch/csrc/utils/tensor_types.cpp: `torch.<device>.<dtype>Tensor`."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.npu.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


@answer("torch.cuda:get_device_capability")
def no_capability(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch_npu/npu/__init__.py, without TORCH_NPU_DEVICE_CAPABILITY."""
    return lambda device=None: None


@answer("torch.cuda:get_device_properties")
def no_architecture(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch_npu/csrc/npu/Module.cpp: major and minor are optional, and nobody sets them."""
    return lambda device=None: SimpleNamespace(
        **{**vars(original(device)), "major": None, "minor": None}
    )


@answer("torch.distributed.distributed_c10d:all_reduce")
def no_fp64(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch_npu/csrc/distributed/ProcessGroupHCCL.cpp, checkSupportedDataType."""

    @functools.wraps(original)
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype in (torch.float64, torch.uint8, torch.bool):
            raise RuntimeError(f"HCCL AllReduce: Unsupported data type {tensor.dtype}")
        return original(tensor, *args, **kwargs)

    return all_reduce


@answer("torch.distributed.distributed_c10d:get_backend")
def hccl(original: Callable[..., str]) -> Callable[..., str]:
    """To all but the host's runtime, which serves the groups."""

    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") == "accel.device.npu":
            frame = frame.f_back
        asks = str(frame.f_globals.get("__name__"))
        found = original(group)
        return "hccl" if found == "gloo" and not asks.startswith("accel.device.cpu") else found

    return get_backend


@answer("torch.distributed.distributed_c10d:new_group")
def new_hccl_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch_npu/__init__.py registers the backend `hccl`."""

    @functools.wraps(original)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any
    ) -> Any:
        return original(ranks, timeout, "nccl" if backend == "hccl" else backend, **kwargs)

    return new_group


@answer("torch.cuda.nvtx:range_push")
@answer("torch.cuda.nvtx:range_pop")
@answer("torch.cuda.nvtx:mark")
@answer("torch.cuda.nvtx:range")
@answer("torch.cuda.profiler:start")
@answer("torch.cuda.profiler:stop")
@answer("torch.cuda:check_error")
@answer("torch.cuda:cudart")
@answer("torch.cuda:temperature")
@answer("torch.cuda:power_draw")
@answer("torch.cuda:clock_rate")
@answer("torch.cuda:device_memory_used")
@answer("torch.autograd.profiler:emit_nvtx.__enter__")
def not_served(original: Callable[..., Any]) -> Callable[..., NoReturn]:
    """Not in `torch_npu.npu.__all__`, which is all that the redirect copies; a CPU build of torch refuses."""

    def fails(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{original.__name__}: are you sure you have a CUDA build?")

    return fails


class HcclOptions:
    """torch_npu/csrc/distributed/Init.cpp: made without arguments, then written to."""

    is_high_priority_stream = False


@answer("torch.distributed.distributed_c10d:ProcessGroupNCCL")
def hccl_group(original: type) -> type:
    """The redirect puts HCCL's in NCCL's place."""
    return type("ProcessGroupHCCL", (), {"Options": HcclOptions})


cpu.install(AUDIENCE)
patching.apply(ANSWERS, scope=(*AUDIENCE, "torch"))
