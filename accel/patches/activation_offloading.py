"""``--fine-grained-activation-offloading --offload-modules ...`` without Transformer Engine.

Upstream accepts the flag for Transformer Engine's layers only, and asks its module ``cpu_offload`` before it
copies anything. Here the same places in Megatron's layers are groups of :mod:`accel.memory.swap`, in the
local spec too: an event for each tensor, one copy of a storage however often it is saved, pinned memory that
is made once, and nothing that is emptied while somebody else may hold it.

``--min-offloaded-tensor-size`` is in elements, as upstream. From the second micro-batch on the last group of
each name stays on the device, for its backward pass comes first; of the others
``--delta-offload-bytes-across-pp-ranks`` times the pipeline rank stay, and of the rest the first
``--activation-offload-fraction`` go, in every micro-batch. The host is not bound to the cores next to its GPU
where ``cuda-python`` or ``pynvml`` are missing; a line says so. CUDA graphs with offloading need Transformer
Engine. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature
from accel.memory.swap import Chain, Swap
from accel.patches._linear import LINEAR
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, te_installed, te_serves

_HERE = "accel.patches.activation_offloading"
_log = logging.getLogger("accel")


class Chunk:
    """The chains of one virtual stage: what the last one was made of, and which groups of the next go."""

    def __init__(self, fraction: float, keep_bytes: int) -> None:
        self._fraction = fraction
        self._keep_bytes = keep_bytes
        self._sizes: list[int] = []
        self.names: set[str] = set()

    def seen(self, chain: Chain) -> None:
        if chain.sizes:
            self._sizes = chain.sizes

    def wanted(self, number: int) -> bool:
        if not self._sizes:
            return True
        eligible = [n for n, size in enumerate(self._sizes[: -len(self.names)]) if size]
        kept = 0
        while eligible and kept < self._keep_bytes:
            kept += self._sizes[eligible.pop(0)]
        return number in eligible[: len(eligible) - int(len(eligible) * (1 - self._fraction))]


class Manager:
    """The chain that is running, and what is known of its like."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """As if nothing had run."""
        self._swap: Swap | None = None
        self._chunks: dict[int, Chunk] = {}
        self._chunk: Chunk | None = None
        self.chain: Chain | None = None
        self.enabled = True

    def begin(self, stage: int, min_numel: int, fraction: float, keep_bytes: int) -> None:
        """A forward pass of a virtual stage."""
        self.end()
        if self._swap is None:
            device = torch.empty(0, device=torch.cuda.current_device()).device
            self._swap = Swap(device, min_bytes=1, min_numel=min_numel)
        self._chunk = self._chunks.setdefault(stage, Chunk(fraction, keep_bytes))
        self.chain = self._swap.chain(self._chunk.wanted, max(1, len(self._chunk.names)))

    def end(self) -> None:
        if self.chain is not None and self._chunk is not None:
            self.chain.close()
            self._chunk.seen(self.chain)
        self.chain = self._chunk = None

    def group(self, name: str) -> AbstractContextManager[None]:
        if self.chain is None or self._chunk is None or not self.enabled:
            return contextlib.nullcontext()
        self._chunk.names.add(name)
        return self.chain.group()


MANAGER = Manager()


class FineGrainedActivationOffloadingInterface:
    """Upstream's: ``with interface(offload, tensor, name) as tensor`` is a group.

    What belongs to CUDA graphs of Transformer Engine is missing; an attribute error names it.
    """

    def __init__(self, offload: bool, tensor: Tensor, name: str) -> None:
        self._tensor = tensor
        self._group = MANAGER.group(name) if offload else contextlib.nullcontext()

    def __enter__(self) -> Tensor:
        self._group.__enter__()
        return self._tensor

    def __exit__(self, *exc: Any) -> None:
        self._group.__exit__(*exc)

    def group_offload(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """A group is let go when its copies had their time; nobody's storage is emptied for it."""
        return tensor

    @staticmethod
    def group_commit(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Before Megatron 0.19; see `group_offload`."""
        return tensor

    @staticmethod
    def init_chunk_handler(
        *,
        vp_stage: int | None,
        min_offloaded_tensor_size: int,
        vp_size: int | None = None,
        pp_rank: int = 0,
        delta_offload_bytes_across_pp_ranks: int = 0,
        activation_offload_fraction: float = 1.0,
        max_inflight_offloads: int | None = None,
    ) -> None:
        keep = pp_rank * delta_offload_bytes_across_pp_ranks
        MANAGER.begin(vp_stage or 0, min_offloaded_tensor_size, activation_offload_fraction, keep)

    @staticmethod
    def mark_not_offload(tensor: Tensor) -> None:
        """For parameters, which stay anyway."""

    mark_not_offloadable = mark_not_offload

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def flush_delayed_groups() -> None:
        """None is delayed."""

    @staticmethod
    def reset() -> None:
        """The last forward pass of a step has ended."""
        MANAGER.end()

    @staticmethod
    def reset_instance() -> None:
        MANAGER.clear()

    @staticmethod
    def disable_offload() -> None:
        MANAGER.enabled = False

    @staticmethod
    def enable_offload() -> None:
        MANAGER.enabled = True


@around
def near_the_gpu(bind: Callable[[], None]) -> None:
    """``set_ideal_affinity_for_current_gpu()``, where it can."""
    if torch.empty(0, device=torch.cuda.current_device()).device.type == "cpu":
        return
    try:
        bind()
    except (ImportError, RuntimeError) as error:
        _log.warning("the host is not bound to the cores next to its GPU: %s", error)


@contextlib.contextmanager
def unseen(context: Context) -> Iterator[None]:
    """Upstream's validator wants Transformer Engine's layers; it does not see the flag."""
    name = "fine_grained_activation_offloading"
    asked = getattr(context.args, name, False) and not te_installed()
    if asked:
        setattr(context.args, name, False)
    try:
        yield
    finally:
        if asked:
            setattr(context.args, name, True)


def switch_on() -> Callable[[], None]:
    return MANAGER.clear


FEATURE = Feature(
    name="activation_offloading",
    summary="serve Megatron's --fine-grained-activation-offloading without Transformer Engine",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    around_validation=unseen,
    switch_on=switch_on,
    patches=(
        Patch(
            target="megatron.core.pipeline_parallel.fine_grained_activation_offload"
            ":FineGrainedActivationOffloadingInterface",
            replacement=f"{_HERE}:FineGrainedActivationOffloadingInterface",
            sources={"0.17.1": "719032a531c3", "0.18.2": "0487cd758fab", "0.19.2": "aa40130e40a9"},
            why="Upstream's asks Transformer Engine before it copies anything.",
        ),
        Patch(
            target="megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
            replacement=f"{_HERE}:near_the_gpu",
            how="wrap",
            why="Upstream ends a training where cuda-python or pynvml is missing.",
        ),
        LINEAR,
    ),
)
