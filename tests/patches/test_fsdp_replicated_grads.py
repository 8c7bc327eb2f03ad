"""Sums of gradients that Megatron-FSDP would make again without them. Trainings:
`tests/distributed/test_fsdp_replicated_grads.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accel.feature import Context
from accel.patches import fsdp_replicated_grads
from accel.patches.fsdp_replicated_grads import write_back


def test_a_sum_in_a_copy_is_written_back() -> None:
    kept = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    copy = kept.float().view(3, 1)
    copy[1] += 1 / 4
    write_back(copy, kept)
    assert kept.tolist() == [1.0, 2.25, 3.0]


def test_what_a_narrower_copy_does_not_hold_is_kept() -> None:
    unchanged = 1 + 2**-20
    kept = torch.tensor([unchanged, 2.0])
    copy = kept.bfloat16()
    copy[1] = 5.0
    write_back(copy, kept)
    assert kept.tolist() == [unchanged, 5.0]


def test_a_copy_in_the_same_dtype_is_written_back_and_a_view_left() -> None:
    kept = torch.tensor([1.0, 2.0])
    version = kept._version
    write_back(kept.view(2, 1), kept)
    assert kept._version == version
    write_back(torch.tensor([3.0, 4.0]), kept)
    assert kept.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("fsdp", "per_token", "reason"),
    [
        (True, True, None),
        (False, True, "--use-megatron-fsdp is not given"),
        (True, False, "--calculate-per-token-loss is not given"),
    ],
)
def test_where_it_is_idle(fsdp: bool, per_token: bool, reason: str | None) -> None:
    args = SimpleNamespace(use_megatron_fsdp=fsdp, calculate_per_token_loss=per_token)
    idle = fsdp_replicated_grads.FEATURE.idle
    assert idle(Context("cpu", "0.19.2", args)) == reason
