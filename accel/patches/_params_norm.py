"""``--log-params-norm`` of masters that the inner optimizer keeps: Megatron looks for main parameters."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from accel.memory.precision_aware_adam import PrecisionAwareAdam
from accel.ops import l2_norm
from accel.patches._told import told
from accel.patching import Patch, around

__all__ = ["PARAMS_NORM", "Master", "keep_master_of"]


class Master(NamedTuple):
    """What stands for a master in fp32 that is joined when its norm is taken, and let go of."""

    adam: weakref.ref[PrecisionAwareAdam]
    param: weakref.ref[Any]
    """Of that optimizer."""
    sharded: bool
    """Whether other ranks have other parts of it."""

    @classmethod
    def of(cls, adam: PrecisionAwareAdam, param: Any, *, sharded: bool) -> Master:
        return cls(weakref.ref(adam), weakref.ref(param), sharded)

    def joined(self) -> Tensor:
        adam, param = self.adam(), self.param()
        assert adam is not None
        assert param is not None, "its optimizer holds it"
        return adam.master_of(param)


_MASTERS = WeakTensorKeyDictionary()
"""A model's parameter -> its `Master`, or None where other ranks have all of it. No attribute: parameters are
pickled with theirs."""


def keep_master_of(weight: Any, master: Master | None) -> None:
    """For `of_masters`."""
    _MASTERS[weight] = master


@around
def of_masters(
    norm: Callable[..., float], model: Any, force_create_fp32_copy: bool = False
) -> float:
    """Wraps ``calc_params_l2_norm``."""
    if force_create_fp32_copy:
        return norm(model, force_create_fp32_copy)
    names: dict[str, Any] = {"multi_tensor_l2norm": _norm_of_all}
    if part := inspect.unwrap(norm).__globals__.get("_compute_norm_2"):
        names["_compute_norm_2"] = told(part, {}, **names)
    chunks = model if isinstance(model, list) else [model]
    with _main_params([param for chunk in chunks for param in chunk.parameters()]):
        return told(norm, {}, **names)(model)


@contextlib.contextmanager
def _main_params(params: Sequence[Any]) -> Iterator[None]:
    """Gives those in bf16 that have no main parameter what upstream asks for."""
    names = ("main_param", "main_param_sharded")
    without = [p for p in params if p.dtype == torch.bfloat16 and not hasattr(p, names[0])]
    for param in without:
        master = _MASTERS.get(param, param)
        if isinstance(master, Master) and master.adam() is None:
            master = param  # of an optimizer that is gone
        param.main_param = param.detach() if master is param else master
        param.main_param_sharded = master is None or getattr(master, "sharded", False)
    try:
        yield
    finally:
        for param in without:
            for name in names:
                delattr(param, name)


def _norm_of_all(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Any, per_tensor: bool, *args: Any
) -> tuple[Tensor, None]:
    """``multi_tensor_l2norm`` of tensors of any dtypes, and of `Master`."""
    each = [entry for entries in tensor_lists for entry in entries]
    norms = [l2_norm([entry.joined()]) for entry in each if isinstance(entry, Master)]
    norms.append(l2_norm([entry.detach() for entry in each if isinstance(entry, Tensor)]))
    return l2_norm(norms).view(1), None


PARAMS_NORM = Patch(
    target="megatron.training.utils:calc_params_l2_norm",
    replacement="accel.patches._params_norm:of_masters",
    how="wrap",
    why="Upstream takes the norm of main parameters; of weights without, which it copies all to fp32.",
)
