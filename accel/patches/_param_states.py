"""A parameter's master and moments in Megatron's optimizers, whole, wherever their shards lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.memory.precision_aware_adam import MASTER, PrecisionAwareAdam

__all__ = ["ParamStates"]

_KEPT = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Name of a state here -> in `PrecisionAwareAdam`."""
_NAMES = tuple(_KEPT)


class ParamStates:
    """Of all parameters of some model chunks.

    Args:
        model: Megatron's list of chunks.
        optimizer: Megatron's, for all of them.

    Raises:
        ValueError: an optimizer whose states cannot be told apart by parameter.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any) -> None:
        self.model = model
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        # a stub has no optimizer: none of its parameters are on this rank
        inner = [each for each in chained if getattr(each, "optimizer", True) is not None]
        self.optimizers = [_kind_of(each) for each in inner]
        self._of = {param: each for each in self.optimizers for param in each.params()}

    def whole(self, param: Tensor) -> Tensor:
        """`[3, numel]` fp32: master and moments, 0 where there are none.

        All ranks that hold a shard of the parameter call it together.
        """
        optimizer = self._of.get(param, _FROZEN)
        found = torch.zeros(len(_NAMES), param.numel(), device=param.device)
        held = optimizer.held(param)
        for row, name in zip(found[:, optimizer.shard(param)], _NAMES, strict=True):
            if name in held:
                row.copy_(held[name].flatten())
        optimizer.gather(found)
        return found

    def put(self, param: Tensor, states: Tensor) -> None:
        """What `whole` gave of another parameter of the same shape."""
        optimizer = self._of.get(param, _FROZEN)
        held = optimizer.held(param)
        named = dict(zip(_NAMES, states[:, optimizer.shard(param)], strict=True))
        if held:
            optimizer.put(param, {name: named[name].view_as(held[name]) for name in held})

    def settle(self) -> None:
        """Wait for masters that are on their way to the model, as an optimizer's step may leave them."""
        for chunk in self.model:
            for name in ("bucket_groups", "expert_parallel_bucket_groups"):
                for group in getattr(chunk, name, ()):
                    if group.param_gather_handle is not None:
                        group.start_param_sync(force_sync=True)

    def publish(self) -> None:
        """Give the model the masters that were put."""
        for optimizer in self.optimizers:
            optimizer.publish()
        if any(isinstance(optimizer, _Sharded) for optimizer in self.optimizers):
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)


class _Whole:
    """An optimizer that has all of its parameters' states on each rank; None: of frozen parameters."""

    def __init__(self, optimizer: Any, groups: Sequence[Sequence[Tensor]] = ()) -> None:
        self.optimizer, self.groups = optimizer, groups

    def params(self) -> Iterable[Tensor]:
        return [param for group in self.groups for param in group]

    def shard(self, param: Tensor) -> slice:
        """Its elements whose states are here."""
        return slice(param.numel())

    def held(self, param: Tensor) -> dict[str, Tensor]:
        main = getattr(param, "main_param", None)
        main = param if main is None else main
        state = {} if self.optimizer is None else self.optimizer.optimizer.state.get(main, {})
        return {"param": main.data, **_moments(state, param)}

    def put(self, param: Tensor, states: dict[str, Tensor]) -> None:
        for name, old in self.held(param).items():
            old.copy_(states[name])

    def gather(self, states: Tensor) -> None:
        pass

    def publish(self) -> None:
        copy = getattr(self.optimizer, "_copy_main_params_to_model_params", None)
        if copy is not None:
            copy()


class _SharedWeights(_Whole):
    """A `SharedWeightsOptimizer`, whose masters are weights and remainders."""

    def held(self, param: Tensor) -> dict[str, Tensor]:
        adam = self.optimizer.optimizer
        if not adam.state[param]:
            adam.initialize_state(param)  # all steps until now were skipped
        return {name: adam.get_unscaled_state(param, kept) for name, kept in _KEPT.items()}

    def put(self, param: Tensor, states: dict[str, Tensor]) -> None:
        for name, state in states.items():
            self.optimizer.optimizer.set_scaled_state(param, _KEPT[name], state)


class _Sharded(_Whole):
    """A `DistributedOptimizer`."""

    def params(self) -> Iterable[Tensor]:
        return [param for buffer in self.optimizer.buffers for param in buffer.params]

    def shard(self, param: Tensor) -> slice:
        if param not in self.optimizer.model_param_group_index_map:
            return slice(0)
        there = self.optimizer._get_model_param_range_map(param)["param"]
        return slice(there.start, there.end)

    def held(self, param: Tensor) -> dict[str, Tensor]:
        if param not in self.optimizer.model_param_group_index_map:
            return {}
        inner = self.optimizer.optimizer
        if isinstance(inner, PrecisionAwareAdam) and not inner.state[self._inner(param)]:
            inner.initialize_state(self._inner(param))  # all steps until now were skipped
        states = dict(self.optimizer._get_main_param_and_optimizer_states(param))
        return {"param": states.pop("param").detach(), **_moments(states, param)}

    def put(self, param: Tensor, states: dict[str, Tensor]) -> None:
        kept = self.optimizer._get_main_param_and_optimizer_states(param)
        self.optimizer._set_main_param_and_optimizer_states(param, {**kept, **states})
        if self.optimizer.config.use_precision_aware_optimizer:
            # its masters are rounded for the model in its own step
            shard = self._inner(param)
            shard.data.copy_(states["param"].view_as(shard))

    def _inner(self, param: Tensor) -> Tensor:
        """What the inner optimizer has of it."""
        group, place = self.optimizer.model_param_group_index_map[param]
        found: Tensor = self.optimizer.optimizer.param_groups[group]["params"][place]
        return found

    def gather(self, states: Tensor) -> None:
        dist.all_reduce(states, group=self.optimizer.data_parallel_group)


_FROZEN = _Whole(None)


def _moments(state: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
    """Raises ValueError for an optimizer that keeps something else of each element than Adam does."""
    found = {}
    for name, value in state.items():
        if name in _NAMES:
            found[name] = value.detach()
        elif isinstance(value, Tensor) and value.numel() > 1:
            raise ValueError(
                f"the {name} {list(value.shape)} of a parameter {list(param.shape)} cannot be moved from "
                "rank to rank; --optimizer adam makes states that can"
            )
    return found


def _kind_of(optimizer: Any) -> _Whole:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    from accel.patches.shared_weights_optimizer import SharedWeightsOptimizer

    kind = type(optimizer)
    if issubclass(kind, DistributedOptimizer):
        return _Sharded(optimizer)
    if kind in (Float16OptimizerWithFloat16Params, SharedWeightsOptimizer):
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
        return (_SharedWeights if kind is SharedWeightsOptimizer else _Whole)(optimizer, groups)
    if kind is FP32Optimizer:
        return _Whole(optimizer, [group["params"] for group in optimizer.optimizer.param_groups])
    raise ValueError(
        f"the states of {kind.__name__} cannot be moved from rank to rank; --use-distributed-optimizer makes "
        "an optimizer whose states can"
    )
