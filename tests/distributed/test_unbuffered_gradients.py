"""One rank's trainings without a buffer for gradients have the losses and gradient norms of those with one,
digit for digit, in less memory."""

from __future__ import annotations

import gc
import re

import pytest

from accel.device.cpu import memory

from .against_stock import FreshStore, check_checkpoints, check_training
from .training import KINDS, train

ONE = "--micro-batch-size 2 --global-batch-size 2"
WITHOUT = ["--accel-preset", "off", "--accel-unbuffered-gradients"]
WITH = [
    *("--accel-preset", "off", "--accel-shared-weights", "--accel-fused-adamw"),
    "--no-gradient-accumulation-fusion",
]
FAST_WITH = ["--no-accel-unbuffered-gradients", "--no-gradient-accumulation-fusion"]
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES = {
    "dense": ("dense", ""),
    "tied": ("tied", ""),
    "local": ("dense", "--transformer-impl local"),
    "recomputed": ("dense", RECOMPUTED),
    "moe": ("moe", "--moe-grouped-gemm"),
    "mtp": ("mtp", ""),
    "gradients_in_bf16": ("dense", "--grad-reduce-in-bf16"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.distributed(world_size=1)
def test_trains_as_with_a_buffer(case: str, fresh_store: FreshStore) -> None:
    kind, flags = CASES[case]
    check_training(kind, f"{ONE} {flags}", WITHOUT, WITH, fresh_store)


@pytest.mark.distributed(world_size=1)
def test_preset_fast_trains_as_with_a_buffer(fresh_store: FreshStore) -> None:
    check_training("dense", f"{ONE} --transformer-impl local", [], FAST_WITH, fresh_store)


@pytest.mark.distributed(world_size=1)
def test_each_goes_on_from_the_others_checkpoint(fresh_store: FreshStore) -> None:
    flags = f"{ONE} --ckpt-format torch"
    check_checkpoints("unbuffered", flags, flags, WITHOUT, WITH, fresh_store)


@pytest.mark.distributed(world_size=1)
def test_gradients_take_two_bytes_from_their_backward_on(fresh_store: FreshStore) -> None:
    """Weights of 2 bytes, remainders of 2, two moments of 4; the buffer's gradients are 4 more, ours 2."""
    flags = f"--bf16 {ONE} --train-iters 3 --log-memory-interval 3 --hidden-size 256".split()
    held, parameters = {}, 0
    for side, more in (("without", WITHOUT), ("with", WITH)):
        fresh_store()
        gc.collect()  # the models of runs before
        before = memory.memory_allocated()
        printed = train([*KINDS["dense"], *flags, *more])
        (allocated,) = re.findall(
            r"\(after 3 iterations\) memory .*? \| allocated: (\S+) ", printed
        )
        held[side] = float(allocated) * 2**20 - before
        (parameters,) = map(int, re.findall(r"parameters on .*?: (\d+)", printed))
    per_parameter = (held["with"] - held["without"]) / parameters
    assert per_parameter == pytest.approx(2, abs=0.05)
