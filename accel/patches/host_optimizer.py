"""Adam's states in host memory: on the device are weights and gradients alone.

``--accel-host-optimizer`` keeps the fp32 masters and both moments, 10 bytes of a parameter (12 with
``--no-accel-shared-weights``), in pinned memory of the host. ``--accel-host-optimizer 8`` keeps at most 8 GiB
of each rank's there, experts' included, and the rest on the device, in whole parameters; several numbers are
those of the pipeline stages.

A step copies bucket after bucket to the device, steps it there and copies it back, both directions at once,
in two buffers of 48 MiB. A share of the elements can be stepped by the host instead, with the CPU's kernel,
so that only gradients and weights are copied: ``--accel-host-optimizer-ratio`` is that share. Without it this
machine's copies and kernels are measured when the optimizer is built, and the share is the one with which a
step is shortest (on all ranks the same, by the slowest). See ``accel/memory/host_adam.py``.

With the distributed optimizer a rank has its shard of the states on its host. Gradient clipping, loss scales,
skipped steps, frozen and tied parameters, ``shared_weights`` and ``--use-precision-aware-optimizer``
with fp32 states are as without it. Checkpoints are stock's, in every format, and load with and without the
flag; the states go to the writer from the host and come back to it, and never are on the device as a whole.

A step is the arithmetic of states on the device, bit for bit where host and device have the same kernel, as
on the CPU. On a GPU the two may differ in the last place of fp32; a weight that is on several ranks is
stepped in the same place on all of them.

On the CPU device runtime the host is the device: the memory of the states does not count as the device's
(``torch.cuda.memory_allocated``, and the limit of ``torch.cuda.set_per_process_memory_fraction``), and the
host's share, which is all if it is measured, is stepped where it is; the rest is copied as anywhere else.
On an H200 (Llama 3 8B, 4 layers, vocabulary 32,000, 65,536 tokens a step) a step with ``all`` took 1.42
times that of preset fast, at 28 % of stock's peak memory, with the same losses, digit for digit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from accel.feature import Context, Feature, Setting
from accel.memory.host_adam import Budget, HostOptions
from accel.memory.host_split import Rates, measure_rates
from accel.patches._inner_masters import HOST, INNER_MASTERS, WANTED, refused, want
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, flag_of

_GIB = 1 << 30


@dataclass
class Wish:
    """What was asked for, and what was found on the way."""

    num_bytes: Sequence[int | None]
    """Of one rank, for each pipeline stage or for all; None: everything."""
    ratio: float | None
    rates: Rates | None = None
    budget: Budget | None = None
    """Of the model whose optimizers are being built."""

    def __call__(self) -> HostOptions:
        """For an optimizer of this rank; dense parameters and experts have one each."""
        return HostOptions(budget=self.budget, ratio=self.ratio, rates=self.rates)

    def begin(self) -> None:
        """Before the optimizers of a model are built: on every rank, for all of them take part."""
        if self.ratio is None and self.rates is None:
            self.rates = slowest(measure_rates(_device()))
        num_bytes = self.num_bytes[self._stage()]
        self.budget = None if num_bytes is None else Budget(num_bytes)

    def _stage(self) -> int:
        from megatron.core import parallel_state

        if len(self.num_bytes) == 1:
            return 0
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if stages != len(self.num_bytes):
            raise ValueError(_wrong_number(len(self.num_bytes), stages))
        return int(parallel_state.get_pipeline_model_parallel_rank())


def _device() -> torch.device:
    """Of this rank, whether or not it has parameters."""
    return torch.empty(0, device=torch.cuda.current_device()).device


def _wrong_number(given: int, stages: int) -> str:
    return f"{given} sizes for {stages} pipeline stages: give one for each, or one for all"


def parse_sizes(given: Any) -> tuple[int | None, ...]:
    """Bytes from GiB: a number, ``all``, or a list of these."""
    words = given if isinstance(given, list | tuple) else [given]
    return tuple(_size(word) for word in words) or (None,)


def _size(word: Any) -> int | None:
    if word == "all":
        return None
    num_bytes = _number(word) * _GIB
    if not 1 <= num_bytes < float("inf"):
        raise ValueError(f"{word!r} is no size: give GiB of host memory above 0, or all")
    return int(num_bytes)


def _number(given: Any) -> float:
    """Or one below 0, which nothing takes."""
    try:
        return -1.0 if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        return -1.0


def parse_ratio(given: Any) -> float:
    """A share within 0 and 1."""
    ratio = _number(given)
    if not 0 <= ratio <= 1:
        raise ValueError(f"{given!r} is no share of the elements: give a number from 0 to 1")
    return ratio


def _refuses(context: Context) -> str | None:
    args = context.args
    if args is None:
        return None
    if getattr(args, "use_precision_aware_optimizer", False):
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if (dtype := getattr(args, name, "fp32")) not in ("fp32", torch.float32):
                return f"{flag_of(name)} {dtype}: states on the host are fp32"
    sizes = getattr(args, "accel_host_optimizer", None)
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    if isinstance(sizes, list | tuple) and len(sizes) > 1 and len(sizes) != stages:
        return _wrong_number(len(sizes), stages)
    return refused(args)


def switch_on(value: Sequence[int | None], ratio: float | None) -> Callable[[], None]:
    return want(HOST, Wish(value, ratio))


@around
def measured(get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    WANTED[HOST].begin()
    return get(*args, **kwargs)


def slowest(rates: Rates) -> Rates:
    """Of all ranks, so that all decide alike."""
    if not torch.distributed.is_initialized():
        return rates
    everything = torch.tensor(astuple(rates), dtype=torch.float32, device=_device())
    torch.distributed.all_reduce(everything, torch.distributed.ReduceOp.MIN)  # HCCL reduces no fp64
    values = dict(zip((f.name for f in fields(Rates)), everything.tolist(), strict=True))
    return Rates(**{**values, "at_once": bool(values["at_once"])})


FEATURE = Feature(
    name="host_optimizer",
    summary="keep Adam's states in host memory: all, or so many GiB of each rank's",
    preset=None,
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("host_optimizer",),
    refuses=_refuses,
    settings=(
        Setting(
            name="",
            metavar="GiB|all",
            summary="GiB of host memory, for all pipeline stages or for each",
            parse=parse_sizes,
            default=(None,),
            many=True,
        ),
        Setting(
            name="ratio",
            metavar="SHARE",
            summary="share of the elements that the host steps, 0 to 1 (measured if not given)",
            parse=parse_ratio,
        ),
    ),
    switch_on=switch_on,
    patches=(
        *INNER_MASTERS,
        Patch(
            target="megatron.core.optimizer:get_megatron_optimizer",
            replacement="accel.patches.host_optimizer:measured",
            how="wrap",
            why="All ranks come here once: they agree on the share of a step that the host does.",
        ),
    ),
)
