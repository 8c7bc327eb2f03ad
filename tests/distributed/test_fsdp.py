"""Fully sharded parameters, torch's and Megatron's, train like whole ones.

To the last digit with the gradients as they are. Clipped, they are scaled by a norm that is summed shard by
shard, in another order, so the last of the seven digits of a loss may differ by one (an Intel Xeon's does).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.testing.distributed import launch, under_torchrun
from tests.tiers import cases

from .test_resume import check_resumption, numbers
from .training import MODEL, SCRIPT

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
NOT_FUSED = "--no-gradient-accumulation-fusion"
"""Not with torch's, which Megatron refuses to have it with; Megatron's own is without it by itself."""
TORCHS = f"--use-torch-fsdp2 --ckpt-format torch_dist {NOT_FUSED}"
SHARDED = (
    TORCHS,
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    " --ckpt-format fsdp_dtensor",
)


def test_sharded_parameters_train_like_whole_ones() -> None:
    whole = [str(SCRIPT), *MODEL, "--train-iters", "5", "--clip-grad", "0.0"]
    expected = [loss for loss, _ in numbers(launch(2, [*whole, NOT_FUSED]))]
    assert len(expected) == 5
    for flags in SHARDED:  # Megatron's own computes no norm where nothing is clipped
        found = [loss for loss, _ in numbers(launch(2, [*whole, *flags.split()]))]
        assert found == expected, flags


def test_sharded_gradients_are_clipped_like_whole_ones() -> None:
    whole = [str(SCRIPT), *MODEL, "--train-iters", "5"]
    expected = numbers(launch(2, [*whole, NOT_FUSED]))
    assert len(expected) == 5
    for flags in SHARDED:
        found = numbers(launch(2, [*whole, *flags.split()]))
        for each, wanted in zip(found, expected, strict=True):
            for number, other, unit in zip(each, wanted, (1e-6, 1e-3), strict=True):
                assert float(number) == pytest.approx(float(other), abs=1.01 * unit), flags


@pytest.mark.parametrize("precision", cases(["fp32", "bf16"], "bf16"))
def test_a_resumed_run_is_the_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    check_resumption(2, [*TORCHS.split(), *["--bf16"] * (precision == "bf16")], tmp_path)


@pytest.mark.parametrize("sharded", cases(["first", "then"], "first"))
def test_checkpoints_load_with_whole_parameters_and_theirs_with_sharded_ones(
    sharded: str, tmp_path: Path
) -> None:
    """Megatron's own code saves or loads the whole ones."""
    flags = [
        "--ckpt-format",
        "torch_dist",
        NOT_FUSED,
        "--clip-grad",
        "0.0",
    ]
    check_resumption(2, flags, tmp_path, **{sharded: ["--use-torch-fsdp2"]})
