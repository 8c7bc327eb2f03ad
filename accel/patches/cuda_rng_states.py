"""A checkpoint of a GPU, resumed on a CPU.

Megatron keeps a random state for each kind of parallelism and saves them all. A GPU's state is a seed and
an offset, a CPU's is 5056 bytes: upstream takes them as they come, and the first initialisation or dropout
afterwards stops at ``Expected a CPUGeneratorImplState``. Here a GPU's state seeds the CPU's generator. The
draws are not the GPU's, which a CPU cannot make; a warning says so. ``--no-load-rng`` begins anew instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.device.cpu.generators import of_this_device
from accel.feature import Feature
from accel.patches._settings import idle_without
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE


def of_the_cpu(upstream: Callable[[Any, dict[str, Any]], None]) -> Callable[..., None]:
    """Wraps ``CudaRNGStatesTracker.set_states``."""

    @functools.wraps(upstream)
    def set_states(self: Any, states: dict[str, Any]) -> None:
        kept = {n: of_this_device(s) if isinstance(s, Tensor) else s for n, s in states.items()}
        upstream(self, kept)

    return set_states


FEATURE = Feature(
    name="cuda_rng_states",
    summary="resume the random states of a GPU's checkpoint on a CPU",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    idle=idle_without("load"),
    patches=(
        Patch(
            target="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states",
            replacement="accel.patches.cuda_rng_states:of_the_cpu",
            how="wrap",
            expects=("self", "states"),
            why="Upstream hands a GPU's states to the CPU's generator, which raises.",
        ),
    ),
)
