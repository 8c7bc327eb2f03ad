"""Megatron's mixed-precision optimizer on weights that are the upper halves of their masters.

Its import needs a Megatron: ``shared_weights`` does it when an optimizer is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    MixedPrecisionOptimizer,
)
from torch import Tensor

from accel.memory.pinned import not_on_device
from accel.memory.precision_aware_adam import MASTER, PrecisionAwareAdam
from accel.patches._inner_masters import reads_any_dtype
from accel.patches._params_norm import Master, keep_master_of
from accel.patches.adam_resume import count_from_0, counted_by_group

__all__ = ["SharedWeightsOptimizer"]

_MAIN_PARAMS = ("fp32_from_fp16_params", "fp32_from_fp16")
"""What checkpoints call them, of Megatron's today and of old ones."""


class SharedWeightsOptimizer(Float16OptimizerWithFloat16Params):
    """As its base class, but the inner optimizer steps on the parameters of the model.

    Args:
        optimizer: on bf16 and fp32 parameters, or None on a rank that has none.
        config, grad_scaler, init_state_fn: as in the base class.

    Raises:
        ValueError: a parameter of another dtype.
    """

    def __init__(
        self,
        optimizer: PrecisionAwareAdam | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Callable[..., None],
    ) -> None:
        MixedPrecisionOptimizer.__init__(self, optimizer, config, grad_scaler, init_state_fn)
        self.is_stub_optimizer = optimizer is None
        if optimizer is None:
            return
        groups = [group["params"] for group in optimizer.param_groups]
        for param in itertools.chain.from_iterable(groups):
            if param.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(
                    f"a parameter {list(param.shape)} is {param.dtype}: an optimizer that keeps the masters "
                    "serves torch.bfloat16, and leaves torch.float32 as it is"
                )
            keep_master_of(param, Master.of(optimizer, param, sharded=False))
        self.float16_groups = [[p for p in g if p.dtype == torch.bfloat16] for g in groups]
        self.fp32_from_fp32_groups = [[p for p in g if p.dtype == torch.float32] for g in groups]
        # what the base class copies to and from, pair by pair: nothing
        self.fp32_from_float16_groups: list[list[Tensor]] = [[] for _ in groups]

    def _params(self) -> Iterator[Any]:
        """Tensors with a `decoupled_grad`."""
        return itertools.chain.from_iterable(g["params"] for g in self.optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if not self.is_stub_optimizer:
            self.optimizer.zero_grad(set_to_none)

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        return [p.decoupled_grad for p in self._params() if p.decoupled_grad is not None]

    def _copy_model_grads_to_main_grads(self) -> None:
        as_it_is = reads_any_dtype(self)
        for param in self._params():
            grad = getattr(param, "main_grad", param.grad)
            param.decoupled_grad = grad if grad is None or as_it_is else grad.float()
            param.grad = None

    def _copy_main_params_to_model_params(self) -> None:
        """The step has."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        assert state_dict is None, "as upstream: no main parameters from a state dict"
        self.optimizer.reload_masters()

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """In the form of the base class: masters in fp32, apart from the inner optimizer's states."""
        found = super().state_dict(is_loading)
        inner = found["optimizer"]
        inner["state"] = {
            number: {name: value for name, value in state.items() if name != MASTER}
            for number, state in inner["state"].items()
        }
        found[_MAIN_PARAMS[0]] = [[self._master(p) for p in group] for group in self.float16_groups]
        return counted_by_group(self.optimizer, found)

    def _master(self, param: Tensor) -> Tensor:
        """On the host, where the checkpoint wants it."""
        if not self.optimizer.state.get(param):
            with not_on_device(param.device):
                return param.detach().to("cpu").float()
        return self.optimizer.get_unscaled_state(param, MASTER)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises:
        ValueError: the masters are not those of these parameters; nothing is loaded.
        """
        masters = next((state_dict[key] for key in _MAIN_PARAMS if key in state_dict), None)
        expected = [[list(p.shape) for p in group] for group in self.float16_groups]
        found = [[list(m.shape) for m in group] for group in masters or ()]
        if found != expected:
            raise ValueError(f"the checkpoint's fp32 masters {_difference(expected, found)}")
        inner = state_dict.get("optimizer", state_dict.get("optimizer_state_dict", {}))
        count_from_0(
            inner.get("state", {}), inner.get("param_groups", [])
        )  # `adam_resume` may be off
        super().load_state_dict({**state_dict, _MAIN_PARAMS[0]: []})
        for group, loaded in zip(self.float16_groups, masters or (), strict=True):
            for param, master in zip(group, loaded, strict=True):
                self.optimizer.set_scaled_state(param, MASTER, master.detach().to(param.device))


def _difference(expected: list[list[Any]], found: list[list[Any]]) -> str:
    """Where the shapes of two lists of groups differ."""
    if len(expected) != len(found):
        return f"are in {len(found)} groups, the model's parameters in {len(expected)}"
    for i, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        if len(ours) != len(theirs):
            return f"of group {i} are {len(theirs)}, the model's parameters {len(ours)}"
        for j, (shape, other) in enumerate(zip(ours, theirs, strict=True)):
            if shape != other:
                return f"of group {i}: number {j} is {other}, the model's parameter {shape}"
    raise AssertionError("they do not differ")
