"""Products over symmetric memory: PyTorch's own ("async tensor parallelism"), in which ranks read each
other's memory while they multiply.

    gather_matmul           torch.ops.symm_mem.fused_all_gather_matmul
    matmul_reduce_scatter   torch.ops.symm_mem.fused_matmul_reduce_scatter

For CUDA devices of one host that read each other's memory, by NVLink. No two of them were at hand: what has
run is these operators' own fallbacks, on CPUs, by which tests hold names, arguments and results. A workspace
of a rank's rows stays as long as the process. A rank that is gone is waited for on the device, with no end.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_matmul", "matmul_reduce_scatter", "reason", "reason_of"]


def gather_matmul(
    x: Tensor, w: Tensor, group: dist.ProcessGroup, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """As `overlapped_linear.gather_matmul`; some rows."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    lead = (group.size() * x.shape[0], *x.shape[1:-1])
    # without x for small shapes one product after all has come, which would be measured for this
    whole, (y,) = _ops().fused_all_gather_matmul(rows, [w], 0, group.group_name, return_A=True)
    return _alone(y, lead), _alone(whole, lead) if keep else None


def matmul_reduce_scatter(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `overlapped_linear.matmul_reduce_scatter`; some rows, which the ranks divide."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = _ops().fused_matmul_reduce_scatter(rows, w, "sum", 0, group.group_name)
    return _alone(y, (x.shape[0] // group.size(), *x.shape[1:-1]))


def _alone(y: Tensor, lead: Sequence[int]) -> Tensor:
    """The same memory as a tensor that is no view: who gets it of an autograd function may write into it."""
    y = y.reshape(*lead, y.shape[-1])
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


def _ops() -> Any:
    import torch.distributed._symmetric_memory  # defines them

    return torch.ops.symm_mem


def reason(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """Why the group cannot, the same on every rank; None: it can. All ranks ask together."""
    if device.type != "cuda":
        return f"its tensors are on {device.type}, and only CUDA devices have symmetric memory"
    index = torch.cuda.current_device() if device.index is None else device.index
    here = torch.tensor([_host(), index], device=device)
    every = here.new_empty((group.size(), 2))
    dist.all_gather_into_tensor(every, here, group=group)
    hosts, devices = every.t().tolist()
    visible = torch.cuda.device_count()
    reads = torch.tensor(
        [i < visible and torch.cuda.can_device_access_peer(index, i) for i in devices if i != index]
    )
    all_read = reads.all().to(device=device, dtype=torch.int32)
    dist.all_reduce(all_read, dist.ReduceOp.MIN, group=group)
    return reason_of(hosts, devices, bool(all_read))


def reason_of(hosts: Sequence[int], devices: Sequence[int], all_read: bool) -> str | None:
    """Of the ranks' hosts and their devices' numbers there, and whether each reads all others' memory."""
    if len(set(hosts)) > 1:
        return "its ranks are on several hosts"
    if len(set(devices)) < len(devices):
        return (
            "several of its ranks call their GPU by the same number: let each process see all GPUs of its "
            "host (CUDA_VISIBLE_DEVICES)"
        )
    return None if all_read else "its GPUs do not all read each other's memory"


def _host() -> int:
    """A number that other hosts do not have."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
