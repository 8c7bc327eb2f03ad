"""A checkpoint of a GPU, resumed on a CPU, and the reverse.

Megatron keeps a random state for each kind of parallelism and saves them all. A GPU's state is a seed and
an offset, a CPU's is 5056 bytes: upstream takes them as they come, and stops at ``Expected a
CPUGeneratorImplState`` on a CPU and at ``RNG state is wrong size`` on a GPU. Here a state of another kind of
device seeds the generator. The draws are not those of the device that saved it; a warning says so.
``--no-load-rng`` begins anew instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel.device.cpu.generators import seed_of
from accel.feature import Feature
from accel.log import log_once
from accel.patches._settings import idle_without
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


def taken_here(state: Any) -> Any:
    """A state as the generator of this device takes it; what is no tensor of bytes is left alone."""
    if not isinstance(state, Tensor):
        return state
    before = torch.cuda.get_rng_state()
    if state.numel() == before.numel():
        return state
    log_once(
        "cuda_rng_states",
        "the checkpoint's random states are those of another kind of device; this one's are seeded from "
        "them, so that draws go on reproducibly but differ",
    )
    torch.cuda.manual_seed(seed_of(state))
    try:
        return torch.cuda.get_rng_state()
    finally:
        torch.cuda.set_rng_state(before)


@around
def setting_states(
    upstream: Callable[[Any, dict[str, Any]], None], self: Any, states: dict[str, Any]
) -> None:
    """Wraps ``CudaRNGStatesTracker.set_states``."""
    upstream(self, {name: taken_here(state) for name, state in states.items()})


@around
def reading_states(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps ``_load_base_checkpoint``."""
    found = upstream(*args, **kwargs)
    for states in _random_states(found[0]):
        states["cuda_rng_state"] = taken_here(states["cuda_rng_state"])
        of_kinds = states.get("rng_tracker_states") or {}
        states["rng_tracker_states"] = {n: taken_here(s) for n, s in of_kinds.items()}
    return found


def _random_states(loaded: Any) -> Iterator[dict[str, Any]]:
    """Of each rank that a checkpoint has them of, as dicts that may be changed: in a list, with FSDP in a
    dict of lists, and in an old checkpoint of one rank beside the model."""
    if not isinstance(loaded, dict):
        return
    of_ranks = loaded.get("rng_state", [loaded])
    lists = of_ranks.values() if isinstance(of_ranks, dict) else [of_ranks]
    for states in (s for each in lists for s in each):
        if isinstance(states, dict) and "cuda_rng_state" in states:
            yield states


FEATURE = Feature(
    name="cuda_rng_states",
    summary="resume the random states of a GPU's checkpoint on a CPU, and the reverse",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=idle_without("load"),
    patches=(
        Patch(
            target="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states",
            replacement="accel.patches.cuda_rng_states:setting_states",
            how="wrap",
            why="Upstream hands it the states of any device, and the generator raises.",
        ),
        Patch(
            target="megatron.training.checkpointing:_load_base_checkpoint",
            replacement="accel.patches.cuda_rng_states:reading_states",
            how="wrap",
            why="What it reads has the state of the device's own generator, too.",
        ),
    ),
)
