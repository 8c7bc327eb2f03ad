"""Fully sharded parameters, torch's and Megatron's, train like whole ones."""

from __future__ import annotations

import pytest

from accel.testing.distributed import launch, under_torchrun

from .test_resume import numbers
from .training import MODEL, SCRIPT

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
SHARDED = (
    "--use-torch-fsdp2 --ckpt-format torch_dist",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    " --ckpt-format fsdp_dtensor",
)


def test_sharded_parameters_train_like_whole_ones() -> None:
    whole = [str(SCRIPT), *MODEL, "--no-gradient-accumulation-fusion", "--train-iters", "5"]
    expected = numbers(launch(2, whole))
    assert len(expected) == 5
    for flags in SHARDED:
        assert numbers(launch(2, [*whole, *flags.split()])) == expected, flags
