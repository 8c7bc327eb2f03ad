"""Experts' gradients are divided by what the loss was multiplied by, also after an overflow elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accel.feature import Context
from accel.patches import one_loss_scale
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

from .test_fused_adamw import one_rank


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = (
            torch.nn.Parameter(torch.ones(64, 64, dtype=torch.float16)) for _ in range(2)
        )
        self.expert.allreduce = False


def steps(overflows: str, distributed: bool) -> list[tuple[float, bool, list[float]]]:
    """Loss scale, success and the gradients (of 1) as they were stepped, of each step; `overflows` says in
    which parameter."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    model = Model()
    wrapped = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, fp16=True),
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        ),
        model,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        fp16=True,
        initial_loss_scale=16.0,
        hysteresis=1,
        clip_grad=0.0,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    assert len(optimizer.chained_optimizers) == 2
    found = []
    for where in ("", overflows, "", ""):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        scale = optimizer.get_loss_scale().item()
        for name, param in model.named_parameters():
            param.main_grad.fill_(scale)
            if name == where:
                param.main_grad[0, 0] = float("inf")
        success = bool(optimizer.step()[0])
        stepped = [
            inner.optimizer.param_groups[0]["params"][0].grad.flatten()[-1].item()
            for inner in optimizer.chained_optimizers
        ]
        found.append((scale, success, stepped))
    return found


def check() -> None:
    right = [(16.0, True, [1.0] * 2), (8.0, True, [1.0] * 2), (8.0, True, [1.0] * 2)]
    for distributed in (False, True):
        for where in ("dense", "expert"):
            with one_rank(one_loss_scale=True):
                found = steps(where, distributed)
            assert found.pop(1)[:2] == (16.0, False)
            assert found == right, (distributed, where)
        with one_rank(one_loss_scale=False):
            assert steps("dense", distributed)[2] == (8.0, True, [1.0, 0.5]), "it is right upstream"


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_scales_change_together(version: str) -> None:
    run_on(version, check)


def test_where_it_is_idle() -> None:
    for args, reason in ((None, None), ({"fp16": True}, None), ({}, "--fp16 is not given")):
        given = None if args is None else SimpleNamespace(**args)
        assert one_loss_scale.FEATURE.idle(Context("cpu", "0.19.2", given)) == reason
