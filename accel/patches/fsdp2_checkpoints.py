"""``--use-torch-fsdp2`` resumes from its checkpoints (``--ckpt-format torch_dist``) where it left off.

Upstream has two faults there:

* from torch 2.13 on its first checkpoint stops, at ``KeyError: 0`` in bf16, and in fp32 at ``Param id 0 does
  not match any model sharded param``: it looks an optimizer's parameters up by the identity of their local
  shards, of which torch makes a new view each time it is asked. Here they are those that parameters hold;
* it loads the shards of weights, masters and moments into their places, and nothing else of the optimizers.
  The step count begins at 0 again beside moments of many steps, so Adam's bias correction would be silently
  wrong (or the first step stops at ``KeyError: 'step'``). Here Megatron's optimizers load their states as
  without FSDP, into the shards that they hold.

Checkpoints stay as upstream writes them, with FSDP or without, and each loads in the other. A run that
upstream had resumed has saved the steps since then as its count, and goes on from that. Upstream saves no
experts so, nor what the ranks cannot share out evenly: that is an error here, which names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.patches._settings import idle_without
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_HERE = "accel.patches.fsdp2_checkpoints"
_SKIPPED = "skip_load_to_model_and_opt"


@around
def by_held_shards(
    upstream: Callable[..., dict[int, int]], optim_params_iter: Iterable[Tensor]
) -> dict[int, int]:
    """Wraps ``get_optim_param_to_id_map``."""
    return upstream(map(_held, optim_params_iter))


def _held(param: Tensor) -> Tensor:
    """The object that the model's sharded state dict has too."""
    from torch.distributed.tensor import DTensor, Shard  # some seconds, at the first import

    if not isinstance(param, DTensor):
        return param
    for placement, ranks in zip(param.placements, param.device_mesh.shape, strict=True):
        if isinstance(placement, Shard) and param.shape[placement.dim] % ranks:
            raise ValueError(
                f"a parameter {list(param.shape)} cannot be saved with --use-torch-fsdp2 on {ranks} "
                f"data-parallel ranks, which must share out dimension {placement.dim} evenly: use fewer"
            )
    held: Tensor = param._local_tensor
    return held


@around
def with_optimizers(
    upstream: Callable[..., Any], ddp_model: Any, *args: Any, **options: Any
) -> Any:
    """Wraps ``load_checkpoint``."""
    from megatron.core.distributed.torch_fully_sharded_data_parallel import (
        TorchFullyShardedDataParallel,
    )

    # whose `load_state_dict` does nothing: the weights are in their places by then
    if all(isinstance(chunk, TorchFullyShardedDataParallel) for chunk in ddp_model):
        options = {name: value for name, value in options.items() if name != _SKIPPED}
    return upstream(ddp_model, *args, **options)


@around
def into_held_shards(upstream: Callable[[Any, Any], None], self: Any, state_dict: Any) -> None:
    """Wraps ``load_state_dict`` of the optimizers that are not distributed."""
    upstream(self, _as_held(self, state_dict))


@torch.no_grad()
def _as_held(optimizer: Any, saved: Any) -> Any:
    """A state dict with the shards of `optimizer`, now of the values in `saved`, in their stead."""
    from torch.distributed.tensor import DTensor

    params = list(_params(optimizer.optimizer))
    if not any(isinstance(param, DTensor) for param in params):
        return saved
    inner, states = saved.get("optimizer", saved), optimizer.optimizer.state
    found = {
        number: state
        if number == "common_step"
        else {k: _filled(states.get(params[number], {}).get(k), v) for k, v in state.items()}
        for number, state in inner["state"].items()
    }
    if inner is saved:
        return {**saved, "state": found}
    saved = {**saved, "optimizer": {**inner, "state": found}}
    if masters := saved.get("fp32_from_fp16_params"):
        groups = zip(optimizer.fp32_from_float16_groups, masters, strict=True)
        saved["fp32_from_fp16_params"] = [list(map(_filled, *group)) for group in groups]
    return saved


def _params(optimizer: Any) -> Iterator[Tensor]:
    """In the order in which torch counts them; of a stub's None there are none."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _filled(held: Any, value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if not isinstance(held, DTensor) or isinstance(value, DTensor):
        return value
    held.to_local().copy_(value)
    return held


FEATURE = Feature(
    name="fsdp2_checkpoints",
    summary="resume --use-torch-fsdp2 where it left off, and save it with torch 2.13",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=idle_without("use_torch_fsdp2"),
    patches=(
        Patch(
            target="megatron.core.dist_checkpointing.optimizer:get_optim_param_to_id_map",
            replacement=f"{_HERE}:by_held_shards",
            how="wrap",
            why="Upstream knows parameters by their local shards, of which torch makes a new view each time.",
        ),
        Patch(
            target="megatron.training.checkpointing:load_checkpoint",
            replacement=f"{_HERE}:with_optimizers",
            how="wrap",
            why="Upstream loads no step counts: with FSDP2 it leaves the optimizers' load_state_dict out.",
        ),
        *(
            Patch(
                target=f"megatron.core.optimizer.optimizer:{optimizer}.load_state_dict",
                replacement=f"{_HERE}:into_held_shards",
                how="wrap",
                why="What is loaded are local shards, which an optimizer of distributed tensors cannot take.",
            )
            for optimizer in ("Float16OptimizerWithFloat16Params", "FP32Optimizer")
        ),
    ),
)
