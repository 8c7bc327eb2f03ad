"""Fully sharded parameters, torch's and Megatron's, train like whole ones.

Shards are gathered into memory of another alignment, by which MKL's products round on Intel's CPUs: the last
of the seven digits that Megatron prints of a loss, and of the four of a gradient's norm, may differ by one.
"""

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
        found = numbers(launch(2, [*whole, *flags.split()]))
        for each, wanted in zip(found, expected, strict=True):
            for number, other, unit in zip(each, wanted, (1e-6, 1e-3), strict=True):
                assert float(number) == pytest.approx(float(other), abs=1.01 * unit), flags
