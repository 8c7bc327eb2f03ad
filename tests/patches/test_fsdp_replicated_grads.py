"""Sums of gradients that Megatron-FSDP would make again without them. Trainings:
`tests/distributed/test_fsdp_replicated_grads.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accel.feature import Context
from accel.patches import fsdp_replicated_grads
from accel.patches.fsdp_replicated_grads import with_sums_kept, write_back


def test_a_sum_in_a_copy_is_written_back() -> None:
    kept = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    copy = kept.float().view(3, 1)
    copy[1] += 1 / 4
    write_back(copy, kept)
    assert kept.tolist() == [1.0, 2.25, 3.0]


def test_ranks_write_the_same_back_whatever_their_part_of_the_sum_was() -> None:
    parts = [torch.tensor([1 + 2**-20, 2.0]), torch.tensor([0.0, 3.0])]
    copies = [part.bfloat16() for part in parts]
    total = copies[0] + copies[1]
    for kept in parts:
        write_back(total, kept)
    assert parts[0].tolist() == parts[1].tolist() == [1.0, 5.0]


def parameter_of(grad: torch.Tensor, **marks: bool) -> SimpleNamespace:
    original = torch.nn.Parameter(torch.zeros(1))
    vars(original).update(marks)
    return SimpleNamespace(grad=grad, orig_param=original)


def test_what_ranks_do_not_sum_is_left_alone() -> None:
    names = {
        "norm.weight": {"sequence_parallel": True},
        "mamba.bias": {"average_gradients_across_tp_domain": True},
        "q_layernorm.weight": {},
        "linear.weight": {"sequence_parallel": False},
    }
    buffers = [torch.tensor([1 + 2**-20]) for _ in names]
    copies = [torch.tensor([7.0]).bfloat16() for _ in names]
    parameters = [
        parameter_of(copy, **marks) for copy, marks in zip(copies, names.values(), strict=True)
    ]
    groups = [
        SimpleNamespace(
            main_grad_buffer=SimpleNamespace(
                param_idx={p.orig_param: 0}, get_item=lambda _, only_shard, kept=kept: kept
            )
        )
        for p, kept in zip(parameters, buffers, strict=True)
    ]
    buffer = SimpleNamespace(
        bucketing_policy=SimpleNamespace(data_parallel_sharding_strategy="optim"),
        optimizer_named_parameters=list(zip(names, parameters, strict=True)),
        parameter_groups=groups,
        param_to_param_group={p.orig_param: number for number, p in enumerate(parameters)},
    )
    factors: list[float] = []
    with_sums_kept(lambda self, factor: factors.append(factor))(buffer, 0.5)
    assert [kept.item() for kept in buffers] == [7.0, 7.0, 7.0, pytest.approx(1 + 2**-20, abs=0)]
    assert factors == [0.5]


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
